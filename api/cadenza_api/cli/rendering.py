"""A job in plain text: pure functions from what the API says to the lines that the command line prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from cadenza_api.sizes import human_bytes, human_seconds
from cadenza_api.views import CheckpointView, EventView, JobView, LogView, ProgressView, WorkerView

LABEL_WIDTH = 10


def seconds_left(progress: ProgressView) -> float | None:
    """Seconds until the data or ``stop.samples`` ends at the present rate; None while that is unknown."""
    if progress.total_samples is None or progress.samples_per_second <= 0:
        return None
    return max(0, progress.total_samples - progress.samples) / progress.samples_per_second


def samples_text(progress: ProgressView) -> str:
    """``1,024/5,000 samples``, without the total while it is unknown."""
    total = "" if progress.total_samples is None else f"/{progress.total_samples:,}"
    return f"{progress.samples:,}{total} samples"


def loss_text(progress: ProgressView) -> str:
    """``loss 0.1234``; a dash before the first round."""
    return f"loss {_number(progress.loss)}"


def rate_text(progress: ProgressView) -> str:
    """``812 samples/s``."""
    return f"{progress.samples_per_second:,.0f} samples/s"


def left_text(progress: ProgressView) -> str:
    """``1m 05s left``; empty while unknown."""
    left = seconds_left(progress)
    return "" if left is None else f"{human_seconds(left)} left"


def progress_text(progress: ProgressView) -> str:
    """Samples, loss, rate and time left on one line."""
    parts = (samples_text(progress), loss_text(progress), rate_text(progress), left_text(progress))
    return ", ".join(part for part in parts if part)


def metrics_text(metrics: Mapping[str, float]) -> str:
    """The reported metrics by name: ``accuracy 0.9812, eval_loss 1.503``."""
    return ", ".join(f"{name} {_number(value)}" for name, value in sorted(metrics.items()))


def event_text(event: EventView) -> str:
    """An event on one line, with its local time."""
    mark = "" if event.severity == "info" else f"{event.severity}: "
    return f"{event.time.astimezone():%H:%M:%S}  {mark}{event.message}"


def log_text(line: LogView) -> str:
    """A worker's line behind its number."""
    return f"worker {line.worker} | {line.text}"


def end_text(job: JobView) -> str:
    """How the job stands, on one line."""
    reason = f": {job.reason.message}" if job.reason else ""
    metrics = metrics_text(job.progress.metrics)
    return f"{job.id} {job.state}{reason}" + (f" ({metrics})" if metrics else "")


def jobs_lines(jobs: Sequence[JobView]) -> list[str]:
    """A table of jobs."""
    if not jobs:
        return ["no jobs; `cadenza submit SPEC` makes one"]
    rows = [("ID", "STATE", "SAMPLES", "LOSS", "CREATED")]
    rows += [
        (job.id, job.state, samples_text(job.progress), _number(job.progress.loss), _moment(job.created_at))
        for job in jobs
    ]
    return _table(rows)


def job_lines(job: JobView, checkpoints: Sequence[CheckpointView]) -> list[str]:
    """Everything about one job."""
    lines = [f"{job.id}  {job.state}"]
    lines += [f"  {label:<{LABEL_WIDTH}}{text}" for label, text in _facts(job, checkpoints) if text]
    return lines + _traceback(job)


def _facts(job: JobView, checkpoints: Sequence[CheckpointView]) -> Iterator[tuple[str, str]]:
    progress = job.progress
    if job.reason:
        yield "reason", f"{job.reason.message} [{job.reason.code}]"
        yield "remedy", job.reason.remedy
    yield "created", _moment(job.created_at)
    yield "started", _moment(job.started_at)
    yield "finished", _moment(job.finished_at)
    yield "progress", progress_text(progress)
    yield "metrics", metrics_text(progress.metrics)
    yield "moved", f"{human_bytes(progress.wire_bytes)} in {progress.rounds:,} rounds"
    yield "trained", human_seconds(progress.seconds)
    yield "decision", ", ".join(f"{key} {value}" for key, value in progress.decision.items())
    for index, worker in enumerate(progress.workers):
        yield ("" if index else "workers"), _worker_text(worker)
    yield "model", _model_text(job, checkpoints)


def _worker_text(worker: WorkerView) -> str:
    place = " ".join(part for part in (worker.device, worker.node and f"on {worker.node}") if part)
    return f"{worker.worker} {worker.state}, {place}, {worker.steps:,} steps, {worker.samples:,} samples"


def _model_text(job: JobView, checkpoints: Sequence[CheckpointView]) -> str:
    if not checkpoints:
        return "none yet" if not job.ended else "none"
    newest = max(checkpoints, key=lambda checkpoint: checkpoint.number)
    size = "" if newest.size_bytes is None else f", {human_bytes(newest.size_bytes)}"
    return f"checkpoint {newest.number}{size}; fetch it with: cadenza download {job.id}"


def _traceback(job: JobView) -> list[str]:
    """The user's own traceback, which is what a failed job is looked at for."""
    details: dict[str, Any] = job.reason.details if job.reason else {}
    if not details.get("traceback"):
        return []
    place = [f"{key} {details[key]}" for key in ("worker", "step") if details.get(key) is not None]
    title = f"  traceback ({', '.join(place)}):" if place else "  traceback:"
    return [title, *(f"    {line}" for line in str(details["traceback"]).splitlines())]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _moment(time: datetime | None) -> str:
    return "" if time is None else f"{time.astimezone():%Y-%m-%d %H:%M:%S}"
