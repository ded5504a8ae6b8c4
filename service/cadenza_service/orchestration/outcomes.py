"""What a supervisor's report does to its job in the store."""

from __future__ import annotations

import enum

from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.jobs.records import Job, Reason
from cadenza_service.jobs.store import Store
from cadenza_service.orchestration.instructions import (
    Failed,
    Interrupted,
    Outcome,
    Report,
    Succeeded,
    Unplaced,
)


class Verdict(enum.Enum):
    """What a report means for the processes of its attempt."""

    GO_ON = "go on"
    OVER = "over"
    """The attempt has ended with this report: they have to go."""
    UNWANTED = "unwanted"
    """The job has ended or moved on without this attempt: its supervisor has to stop."""


_ATTEMPTED = (JobState.STARTING, JobState.RUNNING)


def take(store: Store, job_id: str, epoch: int, report: Report) -> Verdict:
    """Store a report. One that is sent twice does no harm. Raises JobNotFound."""
    job = store.job(job_id)
    if job.epoch != epoch:
        return Verdict.UNWANTED
    if report.snapshot is not None:
        store.record(job_id, epoch, report.snapshot)
    if job.state not in _ATTEMPTED:
        return Verdict.UNWANTED
    if report.snapshot is not None and report.snapshot.phase in ("training", "completed"):
        _training(store, job)
    if report.outcome is None:
        return Verdict.GO_ON
    _end(store, job_id, report.outcome)
    return Verdict.OVER


def _training(store: Store, job: Job) -> None:
    if job.state is not JobState.RUNNING:
        store.move(job.id, JobState.RUNNING, message="all workers have joined, training has begun")


def _end(store: Store, job_id: str, outcome: Outcome) -> None:
    match outcome:
        case Succeeded(n, size_bytes):
            message = f"the model is ready: checkpoint {n}, {size_bytes} bytes"
            store.move(
                job_id, JobState.SUCCEEDED, message=message, data={"checkpoint": n, "size_bytes": size_bytes}
            )
        case Failed(failure):
            told = failure.model_dump(include={"worker", "step", "traceback"}, exclude_none=True)
            reason = Reason(code=failure.kind, message=failure.message, remedy=failure.remedy, details=told)
            store.move(job_id, JobState.FAILED, reason, message=reason.message, severity="error")
        case Unplaced():
            reason = _not_placed(outcome)
            store.move(job_id, JobState.QUEUED, reason, message=reason.message, severity="warning")
        case Interrupted():
            text = "its supervisor was lost while the job started; it starts again"
            reason = Reason(code="supervisor_lost", message=text)
            store.move(job_id, JobState.RECOVERING, reason, message=text, severity="warning")


def _not_placed(outcome: Unplaced) -> Reason:
    missing = ", ".join(outcome.missing)
    remedy = "it is tried again by itself"
    if outcome.node_gone:
        text = f"the node chosen for {missing} was lost before the job had started there"
    else:
        text = f"{missing} had not started after {outcome.waited_s:.0f} s"
        remedy += "; a higher CADENZA_START_TIMEOUT_S leaves more time for installations"
    return Reason(
        code="not_placed",
        message=f"{text}; everything was given back",
        remedy=remedy,
        details={"missing": list(outcome.missing)},
    )
