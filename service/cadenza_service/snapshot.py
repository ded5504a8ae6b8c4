"""What a running job tells the control plane: plain data, cumulative, so that reading it twice changes nothing.

The round coordinator makes a :class:`JobSnapshot`, the supervisor carries it to the controller, the
controller stores it, and the API shows it. Counters only grow within one attempt (one epoch) of a job.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Phase = Literal["joining", "training", "completed", "failed"]
WorkerState = Literal["starting", "joining", "active", "evaluating", "finished", "failed", "lost"]
Severity = Literal["info", "warning", "error"]


class Part(BaseModel):
    """A part of a snapshot; unknown keys are a programming error."""

    model_config = ConfigDict(extra="forbid")


class Histogram(Part):
    """A cumulative histogram: ``counts[i]`` observations at most ``bounds[i]``, the last count is all of them."""

    bounds: list[float]
    counts: list[int]
    """One more than ``bounds``: the last is the bucket of +Inf. Cumulative, as Prometheus has it."""
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: list[float]) -> Histogram:
        return cls(bounds=bounds, counts=[0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        """Count one observation."""
        for index, bound in enumerate(self.bounds):
            if value <= bound:
                self.counts[index] += 1
        self.counts[-1] += 1
        self.sum += value

    def add(self, other: Histogram) -> None:
        """Add the observations of ``other``, which has the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum


class LinkStatus(Part):
    """A worker's link to the parameter servers on other hosts, as its latest synchronisations showed it."""

    goodput_bytes_per_second: float
    """Of updates: acknowledged bytes over busy time."""
    rtt_seconds: float
    """Under load."""
    queueing_delay_seconds: float
    congestion: float
    """0, as good as the link was lately, to 1."""
    retransmits: int
    """Segments that the worker sent again, since it joined."""
    cause: str
    """What took the time of the latest synchronisation: none, slow_shard, slow_worker, network_congested, lower_rate or
    loss."""
    reason: str
    """The same in a sentence with numbers."""


class WorkerStatus(Part):
    """One worker as the coordinator sees it."""

    worker: int
    incarnation: int
    state: WorkerState
    node: str = ""
    device: str = "cpu"
    steps: int = 0
    """Optimizer steps taken."""
    samples: int = 0
    local_steps: int = 0
    """Steps in its latest contribution."""
    compute_seconds: float = 0.0
    """Seconds outside synchronisation, while training."""
    link: LinkStatus | None = None
    """None while nothing is known, or where nothing leaves the worker's host."""


class Progress(Part):
    """How far a job has come; part of ``GET /v1/jobs/{id}``."""

    samples: int = 0
    """Samples in committed rounds, over all epochs."""
    total_samples: int | None = None
    """Samples until the job ends by its data or by ``stop.samples``; none while that is unknown."""
    epoch: int = 0
    """The data's epoch that is being handed out, from 0."""
    rounds: int = 0
    steps: int = 0
    """Committed global steps: what the learning-rate schedule follows."""
    loss: float | None = None
    """Mean training loss of the latest committed round, weighted by samples; none before the first, or if not finite."""
    metrics: dict[str, float] = {}
    """The latest value of each metric given to ``session.report``; values that are not finite are left out."""
    wire_bytes: int = 0
    """Bytes moved between workers and shards, both directions, frame headers included."""
    seconds: float = 0.0
    """Seconds of training so far, from the first step's permission."""
    samples_per_second: float = 0.0
    """Over the latest ten seconds or so."""
    workers: list[WorkerStatus] = []
    decision: dict[str, Any] = {}
    """What is in force: mode, local_steps, codec, and so on."""


class Telemetry(Part):
    """What /metrics shows of a job, beyond its progress."""

    sync_seconds: dict[str, Histogram] = {}
    """By phase: send, wait, receive, apply."""
    sync_bytes: dict[str, int] = {}
    """By direction as the worker sees it: push, pull."""
    sync_raw_bytes: dict[str, int] = {}
    """The same before the codec."""
    staleness: Histogram | None = None
    """Versions between what a contribution was computed from and where it was applied."""
    dropped: dict[str, int] = {}
    """Contributions by reason: non_finite, amp_overflow, duplicate, stale_incarnation, late."""
    failures: dict[str, int] = {}
    """By kind: user_error, worker_lost, shard_lost, timeout, …"""


class Event(Part):
    """Something that happened, told once. ``number`` counts from 1 within one attempt of the job."""

    number: int
    time: float
    """Seconds since the Unix epoch, by the clock of the node that saw it."""
    kind: str
    message: str
    severity: Severity = "info"
    data: dict[str, Any] = {}


class LogLine(Part):
    """One line that a worker printed. ``number`` counts from 1 within one attempt of the job."""

    number: int
    time: float
    worker: int
    stream: Literal["stdout", "stderr"]
    text: str


class Failure(Part):
    """Why a job failed: shown in its reason and in an event."""

    kind: str
    message: str
    remedy: str = ""
    worker: int | None = None
    step: int | None = None
    traceback: str | None = None


class JobSnapshot(Part):
    """Everything that one poll of a job's coordinator brings."""

    phase: Phase
    progress: Progress
    telemetry: Telemetry
    events: list[Event] = []
    logs: list[LogLine] = []
    failure: Failure | None = None
