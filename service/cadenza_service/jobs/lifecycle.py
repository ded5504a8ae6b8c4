"""The life of a job: its states and the only moves between them.

    QUEUED <-> UNSCHEDULABLE        waiting; the reason says for what
       |            |
       +-> STARTING <-> RECOVERING  processes come up, for the first time or again
              |             |
              +-> RUNNING <-+
                     |
           SUCCEEDED, FAILED, CANCELLED

The job store makes every move as one guarded UPDATE, so that two writers can never both win. This module
imports neither Ray nor the database.
"""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job is; the value is the name that users see."""

    QUEUED = "QUEUED"
    UNSCHEDULABLE = "UNSCHEDULABLE"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


S = JobState

_MOVES: dict[JobState, tuple[JobState, ...]] = {
    S.QUEUED: (S.UNSCHEDULABLE, S.STARTING, S.CANCELLED, S.FAILED),
    S.UNSCHEDULABLE: (S.QUEUED, S.STARTING, S.CANCELLED, S.FAILED),
    S.STARTING: (S.RUNNING, S.RECOVERING, S.QUEUED, S.FAILED, S.CANCELLED, S.SUCCEEDED),
    S.RUNNING: (S.RECOVERING, S.SUCCEEDED, S.FAILED, S.CANCELLED),
    S.RECOVERING: (S.STARTING, S.RUNNING, S.QUEUED, S.SUCCEEDED, S.FAILED, S.CANCELLED),
}

TRANSITIONS: frozenset[tuple[JobState, JobState]] = frozenset(
    (source, target) for source, targets in _MOVES.items() for target in targets
)
"""Every legal (from, to). Staying in a state is no move: a new reason for waiting goes through ``Store.explain``."""

TERMINAL: frozenset[JobState] = frozenset({S.SUCCEEDED, S.FAILED, S.CANCELLED})
"""States that nothing leaves."""

WAITING: frozenset[JobState] = frozenset({S.QUEUED, S.UNSCHEDULABLE})
"""States in which the job holds no resources, so that a cancellation needs nobody's help."""

WITHOUT_REASON: frozenset[JobState] = frozenset({S.RUNNING, S.SUCCEEDED})
"""The two states that explain themselves; a job in any other carries a reason."""


def predecessors(state: JobState) -> frozenset[JobState]:
    """The states from which ``state`` may be entered."""
    return frozenset(source for source, target in TRANSITIONS if target is state)


def successors(state: JobState) -> frozenset[JobState]:
    """The states that may follow ``state``; none for a terminal one."""
    return frozenset(target for source, target in TRANSITIONS if source is state)


class IllegalTransition(Exception):
    """A move that the table does not have; the job is left as it was."""

    def __init__(self, job_id: str, source: JobState, target: JobState) -> None:
        legal = ", ".join(sorted(successors(source))) or "nothing, it is final"
        super().__init__(
            f"job {job_id}: {source} -> {target} is not a legal move; from {source} may follow: {legal}"
        )
        self.job_id = job_id
        self.source = source
        self.target = target
