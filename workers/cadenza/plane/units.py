"""What is encoded, sent and decoded at a time: a short run of one vector's elements.

This module imports neither ray nor torch.
"""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """Elements ``start`` to ``stop`` of one vector. Both ends know it; it never travels."""

    vector: str
    """Name of the vector, role and element type, such as ``parameters.float32``."""
    number: int
    """Counts the units of the whole vector, from 0."""
    start: int
    stop: int
    matrices: tuple[tuple[int, int, int], ...] = ()
    """(offset in the unit, rows, columns) of whole matrix rows that lie inside the unit, in order."""

    @property
    def length(self) -> int:
        """Elements."""
        return self.stop - self.start

    @property
    def dtype(self) -> str:
        """The vector's element type, a key of ``layout.NUMPY_TYPES``."""
        return self.vector.rpartition(".")[2]
