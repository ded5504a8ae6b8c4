"""Between the tables' rows and what the store hands out: new rows, cursors, and records from rows."""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from typing import Any

from sqlalchemy import Row

from cadenza.spec import JobSpec
from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.jobs.records import InvalidCursor, Job, Reason, StoredEvent, StoredLog
from cadenza_service.snapshot import Progress, Telemetry

ID_LENGTH = 63
"""What fits in a DNS label, a file name and a Kubernetes label."""

SUFFIX_LENGTH = 8


def new_job(spec: JobSpec, idempotency_key: str | None, now: float) -> dict[str, Any]:
    """The row of a job that was just accepted."""
    waiting = Reason(code="accepted", message="waiting for the controller to look at it")
    return {
        "id": _new_id(spec.name),
        "name": spec.name,
        "spec": spec.model_dump(mode="json"),
        "idempotency_key": idempotency_key,
        "state": JobState.QUEUED,
        "reason": reason_row(waiting),
        "desired": "run",
        "created_at": now,
        "updated_at": now,
        "progress": Progress().model_dump(),
        "telemetry": Telemetry().model_dump(),
    }


def _new_id(name: str) -> str:
    """The name in lower-case letters, digits and dashes, and 40 random bits in base 32."""
    suffix = base64.b32encode(secrets.token_bytes(5)).decode("ascii").lower()
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower())[: ID_LENGTH - SUFFIX_LENGTH - 1].strip("-")
    return f"{stem}-{suffix}"


def encode_cursor(number: int) -> str:
    """What leads to the jobs before this one."""
    return base64.urlsafe_b64encode(f"before:{number}".encode()).decode("ascii")


def decode_cursor(cursor: str) -> int:
    """The number in a cursor. Raises InvalidCursor."""
    try:
        match = re.fullmatch(rb"before:(\d{1,18})", base64.b64decode(cursor, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        match = None
    if match is None:
        raise InvalidCursor(cursor)
    return int(match[1])


def reason_row(reason: Reason | None) -> dict[str, Any] | None:
    """The reason as the jobs table keeps it."""
    if reason is None:
        return None
    return {
        "code": reason.code,
        "message": reason.message,
        "remedy": reason.remedy,
        "details": dict(reason.details),
    }


def job_of(row: Row[Any]) -> Job:
    """The job in a row of the jobs table."""
    return Job(
        id=row.id,
        name=row.name,
        spec=JobSpec.model_validate(row.spec),
        state=JobState(row.state),
        reason=None if row.reason is None else Reason(**row.reason),
        desired=row.desired,
        epoch=row.epoch,
        created_at=row.created_at,
        updated_at=row.updated_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        progress=Progress.model_validate(row.progress),
        telemetry=Telemetry.model_validate(row.telemetry),
    )


def event_of(row: Row[Any]) -> StoredEvent:
    """The event in a row of the events table."""
    return StoredEvent(
        seq=row.seq,
        time=row.time,
        kind=row.kind,
        message=row.message,
        severity=row.severity,
        data=row.data,
        state=None if row.state is None else JobState(row.state),
    )


def log_of(row: Row[Any]) -> StoredLog:
    """The line in a row of the logs table."""
    return StoredLog(seq=row.seq, time=row.time, worker=row.worker, stream=row.stream, text=row.text)
