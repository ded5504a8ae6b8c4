"""An API over a real store and storage in a temporary folder, without a cluster."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cadenza_api.server.app import create_app
from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.jobs.records import Reason
from cadenza_service.jobs.storage import MODEL, Storage
from cadenza_service.jobs.store import Store
from cadenza_service.settings import Settings

URL = "http://127.0.0.1:8000"
SPEC: dict[str, Any] = {"name": "digits", "entrypoint": "train:main"}
TICK_S = 0.01


@dataclass
class Api:
    """The app, a client of it, and what lies behind."""

    app: FastAPI
    client: TestClient
    store: Store
    storage: Storage

    def create(self, **more: object) -> str:
        """A new job's id."""
        answer = self.client.post("/v1/jobs", json=SPEC | more)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def move(self, job_id: str, *states: JobState) -> None:
        """Move the job along."""
        for state in states:
            reason = (
                None
                if state in (JobState.RUNNING, JobState.SUCCEEDED)
                else Reason(code="t", message="testing")
            )
            self.store.move(job_id, state, reason, message=f"to {state}")

    def succeed(self, job_id: str) -> None:
        """Bring a new job to its end."""
        self.move(job_id, JobState.STARTING, JobState.RUNNING, JobState.SUCCEEDED)

    def checkpoint(self, job_id: str, number: int, content: bytes = b"weights") -> None:
        """Write a checkpoint of the job."""
        with self.storage.checkpoint_writer(job_id, number, round=3, samples=30) as folder:
            (folder / MODEL).write_bytes(content)


@contextmanager
def running_api(
    folder: Path, *, cluster: Callable[[], dict[str, Any]] | None = None, **settings: Any
) -> Iterator[Api]:
    """An API whose files lie in ``folder``."""
    chosen = Settings(home=folder, **settings)
    store = Store.open(chosen)
    storage = Storage(chosen.storage_path, package_limit_bytes=chosen.package_limit_bytes)
    app = create_app(store, storage, chosen, cluster=cluster, tick_s=TICK_S)
    with TestClient(app, base_url=URL, raise_server_exceptions=False) as client:
        yield Api(app, client, store, storage)
    store.close()


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The problem document that ``answer`` must be."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["status"] == status
    assert document["code"] == code
    assert document["type"] == f"urn:cadenza:problem:{code}"
    assert document["title"]
    assert document["detail"]
    return document


def code_zip(content: bytes = b"def main(config): ...\n") -> bytes:
    """A package of one module."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("train.py", content)
    return buffer.getvalue()
