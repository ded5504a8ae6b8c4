"""A learning-rate scheduler that follows the job: committed global steps plus own local steps since."""

from __future__ import annotations

from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

UNEQUAL_MODES = ("ssp", "async")
"""Modes in which workers take unequal numbers of steps."""


class Scheduler(Protocol):
    """Anything like torch's schedulers."""

    def step(self) -> Any:
        """Go on by one step."""


class Schedule:
    """Steps the scheduler that was given to join, if any.

    Args:
        optimizer: the one that the session steps.
        scheduler: one of ``torch.optim.lr_scheduler``, at its beginning; none where there is none or the user steps it.

    Raises:
        ValueError: the scheduler needs a metric, or belongs to another optimizer.
    """

    def __init__(self, optimizer: Optimizer, scheduler: Scheduler | None) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "scheduler is a ReduceLROnPlateau, which needs a metric that only the evaluating worker has; "
                "use a schedule over steps, such as CosineAnnealingLR"
            )
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError(
                "scheduler belongs to another optimizer than the one that joins; build it on that one"
            )
        self._scheduler = scheduler
        self._position = 0
        # torch's schedulers wrap the optimizer's step method; there is no public sign of them.
        self.users = scheduler is None and hasattr(optimizer.step, "_wrapped_by_lr_sched")
        """Whether there is a scheduler that the user's own code steps."""

    def check_mode(self, mode: str) -> None:
        """Raises ValueError where a scheduler that the user steps would run differently on each worker."""
        if self.users and mode in UNEQUAL_MODES:
            raise ValueError(
                f"the optimizer has a scheduler that cadenza.join was not given; in mode {mode!r} workers take unequal "
                "numbers of steps, so give it as cadenza.join(..., scheduler=scheduler) and do not step it yourself"
            )

    def advance(self, steps: int) -> None:
        """Bring the scheduler to ``steps``; it never goes back."""
        if self._scheduler is None:
            return
        while self._position < steps:
            self._scheduler.step()
            self._position += 1

    def advance_by_one(self) -> None:
        """One step of the job is made up for."""
        self.advance(self._position + 1)
