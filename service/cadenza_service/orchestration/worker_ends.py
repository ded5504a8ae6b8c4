"""How the workers' processes ended, against what the coordinator knows of it: pure bookkeeping."""

from __future__ import annotations

from cadenza_service.snapshot import JobSnapshot

SETTLE_S = 5.0
"""How long after a worker's end its last words may travel before it counts as lost."""


class WorkerEnds:
    """The ends of one attempt's workers. All times are seconds on one monotonic clock."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._ended_at_s: dict[int, float] = {}
        self.lost: dict[int, str] = {}
        """Why, by worker: what the coordinator is told."""

    def ended(self, worker: int, now_s: float) -> None:
        """A worker's run is over; the first time counts."""
        self._ended_at_s.setdefault(worker, now_s)

    def lose(self, worker: int, why: str, snapshot: JobSnapshot | None, now_s: float) -> None:
        """A worker's process is gone."""
        self.ended(worker, now_s)
        if not _accounted_for(worker, snapshot):
            self.lost.setdefault(worker, why)

    def give_up(self, snapshot: JobSnapshot | None, now_s: float) -> None:
        """Count workers as lost whose end the coordinator should have heard of by now."""
        for worker, ended_at_s in self._ended_at_s.items():
            if now_s >= ended_at_s + SETTLE_S and not _accounted_for(worker, snapshot):
                self.lost.setdefault(worker, "its function ended, but its session had not finished")

    def all_ended_at_s(self) -> float | None:
        """When the last one ended; none while some run."""
        if len(self._ended_at_s) < self._workers:
            return None
        return max(self._ended_at_s.values())


def _accounted_for(worker: int, snapshot: JobSnapshot | None) -> bool:
    """Whether the coordinator knows how this worker ended."""
    if snapshot is None:
        return False
    states = {status.worker: status.state for status in snapshot.progress.workers}
    return states.get(worker) in ("finished", "failed", "lost")
