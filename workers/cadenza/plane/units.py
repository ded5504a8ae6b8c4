"""The pieces in which vectors travel."""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """Consecutive elements of a vector: what is encoded, sent, summed and answered at a time."""

    vector: str
    number: int
    """In the whole vector, from 0."""
    start: int
    """Elements of the whole vector."""
    stop: int
    matrices: tuple[tuple[int, int, int], ...] = ()
    """Whole matrix rows that lie inside: offset in the unit, rows, columns."""

    @property
    def length(self) -> int:
        """Elements."""
        return self.stop - self.start
