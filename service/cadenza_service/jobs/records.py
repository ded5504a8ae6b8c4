"""What the job store hands out: frozen rows, and the errors that it raises.

All times are seconds since the Unix epoch by the clock of the machine that holds the store, those of events
and log lines by the clock of the node that saw them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from cadenza.spec import JobSpec
from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.snapshot import Progress, Severity, Telemetry

Desired = Literal["run", "cancelled"]
Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a job is where it is."""

    code: str
    """For programs: lower-case words joined by underscores."""
    message: str
    remedy: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, as it was when it was read."""

    id: str
    name: str
    spec: JobSpec
    state: JobState
    reason: Reason | None
    """None in RUNNING and SUCCEEDED, and only there."""
    desired: Desired
    """What the user wants; the controller works towards it."""
    epoch: int
    """Attempts begun so far; writers of an older one are refused."""
    created_at: float
    updated_at: float
    started_at: float | None
    """When it first ran."""
    finished_at: float | None
    progress: Progress
    telemetry: Telemetry


@dataclass(frozen=True, kw_only=True)
class StoredEvent:
    """One event of a job; ``seq`` counts from 1 without gaps."""

    seq: int
    time: float
    kind: str
    message: str
    severity: Severity
    data: Mapping[str, Any]
    state: JobState | None
    """The state that was entered, in events of kind ``state``."""


@dataclass(frozen=True, kw_only=True)
class StoredLog:
    """One line that a worker printed; ``seq`` counts from 1, and the oldest lines are deleted."""

    seq: int
    time: float
    worker: int
    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Latest:
    """What a follower compares to learn whether there is something new."""

    event_seq: int
    log_seq: int
    state: JobState


@dataclass(frozen=True, kw_only=True)
class Page(Generic[Row]):
    """Some rows, and the cursor to give for the ones after them (None: there are none)."""

    items: list[Row]
    next_cursor: str | None


class JobNotFound(LookupError):
    """There is no job with this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id!r}; list the jobs to see their ids")
        self.job_id = job_id


class JobEnded(Exception):
    """The job is over, and what was asked of it needs one that is not."""

    def __init__(self, job_id: str, state: JobState) -> None:
        super().__init__(f"job {job_id} has already ended as {state}")
        self.job_id = job_id
        self.state = state


class IdempotencyConflict(Exception):
    """The idempotency key was used before, with another spec."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(
            f"idempotency key {key!r} already made job {job_id} from another spec; use a new key for a new job"
        )
        self.key = key
        self.job_id = job_id


class InvalidCursor(ValueError):
    """The cursor is none that the store gave out."""

    def __init__(self, cursor: str) -> None:
        super().__init__(
            f"cursor {cursor!r} is not one that a page of jobs gave; start again without a cursor"
        )
        self.cursor = cursor


class StaleEpoch(Exception):
    """The writer belongs to an attempt that has been replaced; it must stop."""

    def __init__(self, job_id: str, epoch: int, current: int) -> None:
        super().__init__(f"job {job_id}: epoch {epoch} has been replaced by {current}")
        self.job_id = job_id
        self.epoch = epoch
        self.current = current


class SchemaTooNew(Exception):
    """The database was written by a later version of the service."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(
            f"the job store has schema version {found}, this service knows {known}; install a newer cadenza"
        )
        self.found = found
        self.known = known
