"""Routes for whoever runs the service: probes, metrics, the cluster, and the index."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from cadenza_api.server.answers import JsonResponse
from cadenza_api.server.metrics import exposition
from cadenza_api.server.problems import Problem
from cadenza_api.server.services import Given

CONTROLLER_SILENCE_S = 15.0
"""The controller gives a sign of life every few seconds; without one for so long, new jobs would only wait."""

router = APIRouter(tags=["operations"])


@router.get("/")
def index() -> Response:
    """What this is, and where to go on."""
    links = {name: f"/{name}" for name in ("docs", "metrics", "healthz", "readyz")}
    return JsonResponse(
        {
            "name": "cadenza",
            "version": _version(),
            "links": {"jobs": "/v1/jobs", "cluster": "/v1/cluster"} | links,
        }
    )


def _version() -> str:
    try:
        return version("cadenza")
    except PackageNotFoundError:  # Run from a checkout that is not installed.
        return "unknown"


@router.get("/healthz")
async def healthz() -> Response:
    """Whether this API process answers."""
    return JsonResponse({"status": "ok"})


@router.get("/readyz")
def readyz(given: Given) -> Response:
    """Whether jobs can be taken and run: the store answers, and the controller is alive."""
    seen_at = given.store.controller_seen_at()
    silence_s = None if seen_at is None else max(0.0, time.time() - seen_at)
    if silence_s is None or silence_s > CONTROLLER_SILENCE_S:
        told = (
            "has given no sign of life yet" if silence_s is None else f"was last seen {silence_s:.0f} s ago"
        )
        raise Problem(503, "not_ready", f"the controller {told}", remedy="wait, and see the service's log")
    return JsonResponse({"status": "ready", "controller_silence_seconds": silence_s})


@router.get("/metrics")
def metrics(given: Given) -> Response:
    """Metrics of all jobs in Prometheus's text format; the same from every API process."""
    return Response(exposition(given.store), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/cluster")
def cluster(given: Given) -> Response:
    """The cluster's nodes and resources."""
    if given.cluster is None:
        raise Problem(503, "cluster_unavailable", "this API process runs without a cluster")
    seen: dict[str, Any] = given.cluster()
    return JsonResponse(seen)
