"""When the supervisor polls the coordinator, and when it reports to the controller: pure bookkeeping.

All times are seconds on one monotonic clock.
"""

from __future__ import annotations

from cadenza_service.coordination.recorder import PAGE
from cadenza_service.orchestration.instructions import Outcome, Report
from cadenza_service.snapshot import JobSnapshot

POLL_INTERVAL_S = 0.5

REPORT_INTERVAL_S = 1.0
"""The store takes a job's snapshot once a second; sooner only where the phase changed or the job ends."""


class Polls:
    """One poll at a time, with a pause between."""

    def __init__(self, now_s: float) -> None:
        self.heard_at_s = now_s
        """When the coordinator last answered."""
        self._asked_at_s = now_s
        """When the latest answered poll began."""
        self._began_at_s = now_s
        self._open = False
        self._next_at_s = now_s

    def due(self, now_s: float) -> bool:
        return not self._open and now_s >= self._next_at_s

    def begin(self, now_s: float) -> None:
        self._open = True
        self._began_at_s = now_s

    def answered(self, now_s: float) -> None:
        self.heard_at_s = now_s
        self._asked_at_s = self._began_at_s
        self.missed(now_s)

    def missed(self, now_s: float) -> None:
        self._open = False
        self._next_at_s = now_s + POLL_INTERVAL_S

    def soon(self, now_s: float) -> None:
        """There is more to fetch: do not pause."""
        self._next_at_s = now_s

    def heard_since(self, moment_s: float) -> bool:
        """Whether the latest answer is to a poll that began at ``moment_s`` or later."""
        return self._asked_at_s >= moment_s


class Reports:
    """One report at a time; events and log lines are sent until a report that had them was answered."""

    def __init__(self, now_s: float) -> None:
        self.after_event = 0
        self.after_log = 0
        """The last event and log line that the controller has."""
        self._sent: Report | None = None
        self._next_at_s = now_s
        self._latest = Report(None)

    def due(self, snapshot: JobSnapshot | None, outcome: Outcome | None, now_s: float) -> Report | None:
        """The report to send now, if any."""
        if self._sent is not None or (snapshot is None and outcome is None):
            return None
        report = Report(snapshot, outcome)
        if now_s < self._next_at_s and not self._is_news(report):
            return None
        self._sent = self._latest = report
        return report

    def answered(self, now_s: float) -> Report | None:
        """The controller has what was sent; returns that."""
        sent, self._sent = self._sent, None
        self._next_at_s = now_s + REPORT_INTERVAL_S
        if sent is not None and sent.snapshot is not None:
            self.after_event = max([self.after_event, *(event.number for event in sent.snapshot.events)])
            self.after_log = max([self.after_log, *(line.number for line in sent.snapshot.logs)])
        return sent

    def missed(self, now_s: float) -> None:
        """It may or may not have it: send it again, which does no harm."""
        self._sent = None
        self._next_at_s = now_s + REPORT_INTERVAL_S

    def _is_news(self, report: Report) -> bool:
        return (
            _phase(report) != _phase(self._latest)
            or report.outcome != self._latest.outcome
            or (report.snapshot is not self._latest.snapshot and more_after(report.snapshot))
        )


def more_after(snapshot: JobSnapshot | None) -> bool:
    """Whether the coordinator has more events or log lines than fitted into this snapshot."""
    return snapshot is not None and max(len(snapshot.events), len(snapshot.logs)) >= PAGE


def _phase(report: Report) -> str:
    return report.snapshot.phase if report.snapshot is not None else ""
