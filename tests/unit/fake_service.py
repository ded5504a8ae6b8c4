"""A stand-in for the REST API that answers in memory, and fails when a test says so."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import httpx

CREATED_AT = "2026-01-02T03:04:05Z"
Script = Callable[[dict[str, Any]], None]


def problem(status: int, detail: str, **members: Any) -> httpx.Response:
    """A problem document (RFC 9457)."""
    document = {"type": "about:blank", "title": "Problem", "status": status, "detail": detail, **members}
    return httpx.Response(status, json=document, headers={"Content-Type": "application/problem+json"})


def event(seq: int, message: str, kind: str = "state", **members: Any) -> dict[str, Any]:
    """A stored event."""
    return {
        "seq": seq,
        "time": 1_767_323_045.0 + seq,
        "kind": kind,
        "message": message,
        "severity": "info",
        **members,
    }


def sse(name: str, row: dict[str, Any]) -> str:
    """A row as a server-sent event."""
    return f"id: {row.get('seq', 0)}\nevent: {name}\ndata: {json.dumps(row)}\n\n"


class FakeService:
    """Jobs, packages, events and models in dictionaries; usable as an httpx transport's handler."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.logs: dict[str, list[dict[str, Any]]] = {}
        self.packages: dict[str, bytes] = {}
        self.models: dict[str, bytes] = {}
        self.requests: list[httpx.Request] = []
        self.faults: deque[Exception | httpx.Response | None] = deque()
        """What the next requests meet instead of an answer; None lets one through."""

        self.streams: deque[list[str | Exception]] = deque()
        """What each event stream sends, chunk by chunk; an exception breaks it off."""

        self.script: deque[Script] = deque()
        """What happens to a job, one step before each time that it is looked at."""

        self.page_size = 2

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self)

    def add(self, job_id: str, state: str = "RUNNING", **members: Any) -> dict[str, Any]:
        """A job that exists."""
        links = {"events": f"/v1/jobs/{job_id}/events"}
        document = {
            "id": job_id,
            "name": job_id.rsplit("-", 1)[0],
            "state": state,
            "reason": None,
            "links": links,
        }
        self.jobs[job_id] = document | {"created_at": CREATED_AT, "progress": {}, "spec": {}} | members
        return self.jobs[job_id]

    def asked(self, method: str, path: str) -> list[httpx.Request]:
        """The requests so far of ``method`` for ``path``."""
        return [request for request in self.requests if (request.method, request.url.path) == (method, path)]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        return fault or self._answer(request)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        for method, pattern, handler in ROUTES:
            match = re.fullmatch(pattern, request.url.path)
            if match and method == request.method:
                return handler(self, request, *match.groups())
        return problem(404, f"there is no {request.url.path}", code="not_found")

    def _ready(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"ready": True})

    def _create(self, request: httpx.Request) -> httpx.Response:
        spec = json.loads(request.content)
        job = self.add(f"{spec['name']}-{len(self.jobs):08d}", "QUEUED", spec=spec)
        return httpx.Response(201, json=job, headers={"Location": f"/v1/jobs/{job['id']}"})

    def _list(self, request: httpx.Request) -> httpx.Response:
        query = request.url.params
        newest = [job for job in reversed(self.jobs.values()) if query.get("state") in (None, job["state"])]
        start = int(query.get("cursor", 0))
        end = start + min(self.page_size, int(query["limit"]))
        cursor = str(end) if end < len(newest) else None
        return httpx.Response(200, json={"items": newest[start:end], "next_cursor": cursor})

    def _job(self, request: httpx.Request, job_id: str) -> httpx.Response:
        if job_id not in self.jobs:
            return problem(404, f"there is no job {job_id!r}", code="job_not_found")
        if self.script:
            self.script.popleft()(self.jobs[job_id])
        return httpx.Response(200, json=self.jobs[job_id])

    def _cancel(self, request: httpx.Request, job_id: str) -> httpx.Response:
        self.jobs[job_id] |= {
            "state": "CANCELLED",
            "reason": {"code": "cancelled", "message": "cancelled on request"},
        }
        return httpx.Response(202, json=self.jobs[job_id])

    def _rows(self, request: httpx.Request, job_id: str, topic: str) -> httpx.Response:
        if request.headers.get("accept") == "text/event-stream":
            return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=self._stream())
        rows = {"events": self.events, "logs": self.logs}[topic].get(job_id, [])
        after = int(request.url.params["after"])
        items = [row for row in rows if row["seq"] > after][: self.page_size]
        return httpx.Response(200, json={"items": items, "next_after": items[-1]["seq"] if items else after})

    def _stream(self) -> Iterator[bytes]:
        for chunk in self.streams.popleft():
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk.encode()

    def _checkpoints(self, request: httpx.Request, job_id: str) -> httpx.Response:
        items = [{"number": 1, "size_bytes": len(self.models[job_id])}] if job_id in self.models else []
        return httpx.Response(200, json={"items": items})

    def _model(self, request: httpx.Request, job_id: str, number: str) -> httpx.Response:
        if job_id not in self.models:
            return problem(404, f"{job_id} is RUNNING and has no model yet", code="no_checkpoint")
        return httpx.Response(200, content=self.models[job_id])

    def _has_package(self, request: httpx.Request, digest: str) -> httpx.Response:
        return httpx.Response(200 if digest in self.packages else 404)

    def _put_package(self, request: httpx.Request, digest: str) -> httpx.Response:
        self.packages[digest] = request.content
        return httpx.Response(201)


JOB = r"/v1/jobs/([^/]+)"
ROUTES: list[tuple[str, str, Callable[..., httpx.Response]]] = [
    ("GET", "/readyz", FakeService._ready),
    ("POST", "/v1/jobs", FakeService._create),
    ("GET", "/v1/jobs", FakeService._list),
    ("GET", JOB, FakeService._job),
    ("POST", JOB + "/cancel", FakeService._cancel),
    ("GET", JOB + "/(events|logs)", FakeService._rows),
    ("GET", JOB + "/checkpoints", FakeService._checkpoints),
    ("GET", JOB + r"/checkpoints/(\w+)/model\.safetensors", FakeService._model),
    ("HEAD", "/v1/packages/([0-9a-f]{64})", FakeService._has_package),
    ("PUT", "/v1/packages/([0-9a-f]{64})", FakeService._put_package),
]
