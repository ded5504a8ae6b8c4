"""What the client returns: the API's JSON with names.

Unlike the service's own models these accept keys and values that they do not know, and keep them, so that
an older client reads a newer service's answers and ``--json`` passes on everything that was sent.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from cadenza_service.jobs.lifecycle import TERMINAL


class Answer(BaseModel):
    """A part of an answer of the API."""

    model_config = ConfigDict(extra="allow", frozen=True)


class ReasonView(Answer):
    """Why a job is in its state."""

    code: str
    message: str
    remedy: str = ""
    details: dict[str, Any] = {}


class WorkerView(Answer):
    """One worker of a running job."""

    worker: int
    incarnation: int = 0
    state: str
    node: str = ""
    device: str = ""
    steps: int = 0
    samples: int = 0
    local_steps: int = 0


class ProgressView(Answer):
    """How far a job has come; see ``cadenza_service.snapshot.Progress`` for each field's meaning."""

    samples: int = 0
    total_samples: int | None = None
    epoch: int = 0
    rounds: int = 0
    steps: int = 0
    loss: float | None = None
    metrics: dict[str, float] = {}
    wire_bytes: int = 0
    seconds: float = 0.0
    samples_per_second: float = 0.0
    workers: list[WorkerView] = []
    decision: dict[str, Any] = {}


class JobView(Answer):
    """A job as the API shows it."""

    id: str
    name: str
    state: str
    reason: ReasonView | None = None
    spec: dict[str, Any] = {}
    progress: ProgressView = ProgressView()
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    links: dict[str, str] = {}

    @property
    def ended(self) -> bool:
        """Whether the state is one that no job leaves."""
        return self.state in TERMINAL


class EventView(Answer):
    """Something that happened to a job."""

    seq: int
    time: datetime
    kind: str
    message: str
    severity: str = "info"
    data: dict[str, Any] = {}


class LogView(Answer):
    """A line that a worker printed."""

    seq: int
    time: datetime
    worker: int
    stream: str = "stdout"
    text: str


class CheckpointView(Answer):
    """A complete checkpoint of a job."""

    number: int
    size_bytes: int | None = None
    sha256: str | None = None
