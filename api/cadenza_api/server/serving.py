"""The API on Ray Serve: one deployment, which opens the job store inside each replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from pydantic import SecretStr
from ray import serve

from cadenza_api.server.app import create_app
from cadenza_service.jobs.storage import Storage
from cadenza_service.jobs.store import Store
from cadenza_service.settings import Settings

APPLICATION = "cadenza"

MAX_ONGOING_REQUESTS = 1_000
"""Far above Ray's default of 5, which five open event streams would use up."""

DRAIN_S = 5.0
"""What remains open after its streams were told to end is cut after so long."""

ON_HEAD_NODE = {"node:__internal_head__": 0.001}
"""SQLite and the storage folder are there."""


class Api:
    """A replica."""

    def __init__(self, settings: Settings, token_file: Path | None) -> None:
        """``settings`` come without the token, since Ray keeps these arguments; the file holds it."""
        if token_file is not None:
            token = SecretStr(token_file.read_text(encoding="utf-8"))
            settings = settings.model_copy(update={"token": token})
        self._settings = settings
        self._store = Store.open(settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        storage = Storage(self._settings.storage_path, package_limit_bytes=self._settings.package_limit_bytes)
        self._app = create_app(self._store, storage, self._settings, cluster=cluster_view)
        return self._app

    async def drain(self) -> None:
        """End the open event streams, so that the replica can stop in time."""
        await self._app.state.services.followers.close()


_deployment: Any = serve.deployment(
    name="api",
    num_replicas=1,
    max_ongoing_requests=MAX_ONGOING_REQUESTS,
    graceful_shutdown_timeout_s=DRAIN_S,
    graceful_shutdown_wait_loop_s=0.2,
    ray_actor_options={"num_cpus": 0, "resources": ON_HEAD_NODE},
)(serve.ingress()(Api))


def application(settings: Settings, token_file: Path | None) -> Any:
    """The application to run; ``token_file`` holds the token where clients need one."""
    return _deployment.bind(settings.model_copy(update={"token": None}), token_file)


def cluster_view() -> dict[str, Any]:
    """The cluster as ``GET /v1/cluster`` shows it: its nodes, and what all of them have and have free."""
    return {
        "nodes": [
            {
                "id": node["NodeID"],
                "address": node["NodeManagerAddress"],
                "alive": node["Alive"],
                "resources": _countable(node["Resources"]),
            }
            for node in ray.nodes()
        ],
        "total": _countable(ray.cluster_resources()),
        "available": _countable(ray.available_resources()),
    }


def _countable(resources: dict[str, float]) -> dict[str, float]:
    """Without the resources that only name a node."""
    return {name: amount for name, amount in resources.items() if not name.startswith("node:")}
