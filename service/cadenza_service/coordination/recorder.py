"""What a coordinator remembers for the control plane: events, log lines, counters. Pure: times are given."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from cadenza.plane.messages import SYNC_BOUNDS_S, LinkReport, Log, Telemetry
from cadenza_service import snapshot
from cadenza_service.snapshot import (
    Event,
    Histogram,
    LinkStatus,
    LogLine,
    Severity,
    WorkerState,
    WorkerStatus,
)

Entry = TypeVar("Entry", Event, LogLine)

MOST_EVENTS = 5_000
MOST_LOG_LINES = 20_000
"""Kept for a supervisor that is being restarted; older ones are dropped, and the gap in the numbers shows it."""

PAGE = 1_000
"""Entries in one snapshot, so that it stays a small message."""

STALENESS_BOUNDS: tuple[float, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)


@dataclass
class WorkerRecord:
    """One worker's figures as it last told them."""

    worker: int
    incarnation: int
    state: WorkerState = "starting"
    node: str = ""
    device: str = "cpu"
    local_steps: int = 0
    telemetry: Telemetry | None = None

    def status(self) -> WorkerStatus:
        """The public view."""
        told = self.telemetry
        return WorkerStatus(
            worker=self.worker,
            incarnation=self.incarnation,
            state=self.state,
            node=self.node,
            device=self.device,
            steps=told.steps if told else 0,
            samples=told.samples if told else 0,
            local_steps=self.local_steps,
            compute_seconds=told.compute_seconds if told else 0.0,
            link=_link(told.link) if told and told.link else None,
        )


@dataclass
class Recorder:
    """Everything that a snapshot shows beside the training's progress."""

    workers: dict[int, WorkerRecord] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    staleness: Histogram = field(default_factory=lambda: Histogram.empty(list(STALENESS_BOUNDS)))
    _events: deque[Event] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    _logs: deque[LogLine] = field(default_factory=lambda: deque(maxlen=MOST_LOG_LINES))
    _event_count: int = 0
    _log_count: int = 0

    def event(
        self,
        time: float,
        kind: str,
        message: str,
        severity: Severity = "info",
        data: dict[str, Any] | None = None,
    ) -> None:
        """Note an event that happened at ``time`` (seconds since the Unix epoch)."""
        self._event_count += 1
        entry = Event(
            number=self._event_count,
            time=time,
            kind=kind,
            message=message,
            severity=severity,
            data=finite(data or {}),
        )
        self._events.append(entry)

    def log(self, worker: int, message: Log) -> None:
        """Note lines that a worker printed."""
        for time, stream, text in message.lines:
            self._log_count += 1
            self._logs.append(
                LogLine(number=self._log_count, time=time, worker=worker, stream=stream, text=text)
            )

    def events_after(self, number: int) -> list[Event]:
        """The next page of events; those up to ``number`` are stored elsewhere and forgotten."""
        return _page(self._events, number)

    def logs_after(self, number: int) -> list[LogLine]:
        """The next page of log lines; those up to ``number`` are stored elsewhere and forgotten."""
        return _page(self._logs, number)

    def wire_bytes(self) -> int:
        """Bytes that workers and shards moved, both directions."""
        return sum(told.push_bytes + told.pull_bytes for told in self._told())

    def telemetry(self) -> snapshot.Telemetry:
        """All counters, for /metrics."""
        told = self._told()
        return snapshot.Telemetry(
            sync_seconds=_phases(told),
            sync_bytes={"push": sum(t.push_bytes for t in told), "pull": sum(t.pull_bytes for t in told)},
            sync_raw_bytes={
                "push": sum(t.raw_push_bytes for t in told),
                "pull": sum(t.raw_pull_bytes for t in told),
            },
            staleness=self.staleness.model_copy(deep=True),
            dropped=dict(self.dropped),
            failures=dict(self.failures),
        )

    def _told(self) -> list[Telemetry]:
        return [record.telemetry for record in self.workers.values() if record.telemetry is not None]


def finite(value: Any) -> Any:
    """``value`` with whatever JSON does not have (NaN, infinities, bytes) written as text."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def severity(text: str) -> Severity:
    """A severity as a worker gave it; anything unknown is a warning, so that it is not overlooked."""
    return cast(Severity, text) if text in ("info", "warning", "error") else "warning"


def _link(report: LinkReport) -> LinkStatus:
    return LinkStatus(
        goodput_bytes_per_second=report.goodput_bytes_per_s,
        rtt_seconds=report.rtt_s,
        queueing_delay_seconds=report.queueing_delay_s,
        congestion=report.congestion,
        retransmits=report.retransmits,
        cause=report.cause.value,
        reason=report.reason,
    )


def _phases(told: Iterable[Telemetry]) -> dict[str, Histogram]:
    phases: dict[str, Histogram] = {}
    for telemetry in told:
        for phase, (counts, total) in telemetry.phases.items():
            histogram = phases.setdefault(phase, Histogram.empty(list(SYNC_BOUNDS_S)))
            histogram.add(Histogram(bounds=list(SYNC_BOUNDS_S), counts=list(counts), sum=total))
    return phases


def _page(entries: deque[Entry], number: int) -> list[Entry]:
    while entries and entries[0].number <= number:
        entries.popleft()
    return list(itertools.islice(entries, PAGE))
