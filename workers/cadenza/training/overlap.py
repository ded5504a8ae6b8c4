"""When an answer is merged: waited for at once, or while the worker goes on stepping. A pure decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cadenza.plane.messages import Overlap

DELAY_SHARE = 4
"""A contribution is merged after a quarter of the interval by default: a delay up to that cost no accuracy that could be
seen, whereas a delay of the whole interval made two workers train as badly as one alone."""


@dataclass(frozen=True)
class OverlapPlan:
    """How one contribution is followed."""

    merge_after: int
    """At the latest so many steps after sending, where the answer is waited for; 0: at once."""
    early: bool
    """Merge after an earlier step too, if the answer is there. Then two runs of one job differ."""

    @property
    def overlaps(self) -> bool:
        """Whether the worker goes on before the answer is there."""
        return self.merge_after > 0

    def lands(self, steps: int, arrived: bool) -> bool:
        """Whether to merge now, ``steps`` after sending."""
        return steps >= self.merge_after or (self.early and arrived)


AT_ONCE = OverlapPlan(merge_after=0, early=False)


def plan_overlap(mode: str, overlap: Overlap, local_steps: int) -> OverlapPlan:
    """Decide how the contributions of an interval are followed.

    Args:
        mode: the job's; sync mode has nothing to overlap with here, it streams (:mod:`cadenza.training.streaming`).
        overlap: what the job's spec wants.
        local_steps: steps from one contribution to the next.
    """
    if mode == "sync" or overlap == "off":
        return AT_ONCE
    if overlap == "on":
        return OverlapPlan(merge_after=local_steps, early=True)
    # auto: in ssp and async mode what is merged late has become staler already.
    return OverlapPlan(local_steps // DELAY_SHARE, early=False) if mode == "local" else AT_ONCE


class Pace:
    """Counts steps between contributions, and says when one is due and when an answer is to be merged."""

    def __init__(self, mode: str, overlap: Overlap, local_steps: int) -> None:
        self.sent_steps: int | None = None
        """In the contribution that is under way; none where none is."""
        self._mode = mode
        self._overlap = overlap
        self.follow(local_steps)

    def follow(self, local_steps: int) -> None:
        """The interval is ``local_steps`` from now on. Nothing is under way."""
        self.interval = local_steps
        self.plan = plan_overlap(self._mode, self._overlap, local_steps)

    def sends(self, steps: int) -> bool:
        """Whether a contribution is due, ``steps`` after the latest."""
        return self.sent_steps is None and steps >= self.interval

    def lands(self, steps: int, arrived: Callable[[], bool]) -> bool:
        """Whether to merge the answer to what is under way, ``steps`` after it was sent."""
        return self.sent_steps is not None and self.plan.lands(steps, self.plan.early and arrived())

    def position(self, committed: int, steps: int) -> int:
        """The schedule's: committed steps, those under way, and those since."""
        return committed + (self.sent_steps or 0) + steps
