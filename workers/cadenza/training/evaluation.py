"""Whether this worker is asked to evaluate the committed weights, and whether it is away from the rounds for that."""

from __future__ import annotations

import enum

from cadenza.plane.link import Link


class Asked(enum.Enum):
    """Where this worker stands."""

    NO = enum.auto()
    YES = enum.auto()
    """The model holds committed weights, and the user's code has not taken notice yet."""
    AWAY = enum.auto()
    """The user's code evaluates, and the rounds go on without this worker."""


class Evaluation:
    """``state`` is public because a session compares it at every step."""

    def __init__(self, link: Link) -> None:
        self.state = Asked.NO
        self._link = link

    def ask(self, wanted: bool) -> None:
        """An answer says whether the committed weights that the model holds now should be evaluated."""
        self.state = Asked.YES if wanted else Asked.NO

    def due(self, *, leave: bool) -> bool:
        """Whether to evaluate now: true once for each time that this worker is asked.

        Args:
            leave: let the rounds go on meanwhile; else they wait.
        """
        if self.state is not Asked.YES:
            return False
        self.state = Asked.NO
        if leave:
            self._link.evaluating()
            self.state = Asked.AWAY
        return True
