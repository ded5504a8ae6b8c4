"""One transfer after another over a link that they would share.

In a round with a barrier every host sends to every other. If worker k sends to shard k + 1 first, then to k + 2 and so
on, and shard k answers workers in the same order, then at any time each link carries one transfer in each direction:
nobody has to share a queue, in which whoever has more under way would get more, and the others be waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from cadenza.plane.connection import Connection, Frame

LOOK_S = 0.25
"""How often a transfer that waits for its turn looks whether the one before will never end."""

T = TypeVar("T")


def rotation(items: Sequence[T], first: int) -> list[T]:
    """The items in order, beginning with the one at ``first`` modulo their number."""
    start = first % len(items) if items else 0
    return [*items[start:], *items[:start]]


class Turns:
    """Chains transfers; each begins once all of the one before has been handed to its connection."""

    def __init__(self) -> None:
        self._before: tuple[Connection, threading.Event] | None = None

    def chain(self, connection: Connection, frames: Iterable[Frame]) -> Iterator[Frame]:
        """The same frames, after those that were chained before."""
        before, done = self._before, threading.Event()
        self._before = (connection, done)
        return _in_turn(before, frames, done)


def _in_turn(
    before: tuple[Connection, threading.Event] | None, frames: Iterable[Frame], done: threading.Event
) -> Iterator[Frame]:
    try:
        if before is not None:
            connection, ended = before
            while not ended.wait(LOOK_S) and not connection.closed:
                pass
        yield from frames
    finally:
        done.set()
