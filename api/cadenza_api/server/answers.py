"""What the API answers with: the service's rows as JSON."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

from starlette.responses import JSONResponse

from cadenza_service.jobs.records import Job, StoredEvent, StoredLog
from cadenza_service.jobs.storage import Checkpoint


class JsonResponse(JSONResponse):
    """JSON that any parser reads: numbers that are not finite become null, other alphabets are escaped."""

    def render(self, content: Any) -> bytes:
        return to_json(content).encode("ascii")


def to_json(content: Any) -> str:
    """One line of JSON."""
    return json.dumps(_finite(content), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def moment(seconds: float | None) -> str | None:
    """Seconds since the Unix epoch in ISO 8601, UTC."""
    return (
        None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    )


def job_answer(job: Job) -> dict[str, Any]:
    """A job, with links to what belongs to it."""
    path = f"/v1/jobs/{job.id}"
    reason = job.reason
    return {
        "id": job.id,
        "name": job.name,
        "state": job.state,
        "reason": None
        if reason is None
        else {
            "code": reason.code,
            "message": reason.message,
            "remedy": reason.remedy,
            "details": dict(reason.details),
        },
        "desired": job.desired,
        "attempts": job.epoch,
        "created_at": moment(job.created_at),
        "updated_at": moment(job.updated_at),
        "started_at": moment(job.started_at),
        "finished_at": moment(job.finished_at),
        "spec": job.spec.model_dump(mode="json"),
        "progress": job.progress.model_dump(),
        "links": {
            "self": path,
            "events": f"{path}/events",
            "logs": f"{path}/logs",
            "cancel": f"{path}/cancel",
            "checkpoints": f"{path}/checkpoints",
            "model": model_link(job.id, "latest"),
        },
    }


def model_link(job_id: str, number: int | str) -> str:
    """Where the weights of a checkpoint are downloaded."""
    return f"/v1/jobs/{job_id}/checkpoints/{number}/model.safetensors"


def event_answer(event: StoredEvent) -> dict[str, Any]:
    """An event of a job."""
    return {
        "seq": event.seq,
        "time": moment(event.time),
        "kind": event.kind,
        "message": event.message,
        "severity": event.severity,
        "data": dict(event.data),
        "state": event.state,
    }


def log_answer(line: StoredLog) -> dict[str, Any]:
    """A line that a worker printed."""
    return {
        "seq": line.seq,
        "time": moment(line.time),
        "worker": line.worker,
        "stream": line.stream,
        "text": line.text,
    }


def checkpoint_answer(job_id: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """A complete checkpoint of a job."""
    return {
        "number": checkpoint.n,
        "round": checkpoint.round,
        "samples": checkpoint.samples,
        "size_bytes": checkpoint.size_bytes,
        "sha256": checkpoint.sha256,
        "created_at": moment(checkpoint.created_at),
        "links": {"model": model_link(job_id, checkpoint.n)},
    }
