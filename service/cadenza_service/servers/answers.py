"""Answers on their way to workers, while they are still being computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cadenza.plane.connection import Frame
from cadenza.plane.holdings import MOST_RUN_ELEMENTS, NATIVE, Holdings
from cadenza.plane.messages import Answer, Key, Units

Bodies = Callable[[range], list[memoryview]]
"""The bytes of consecutive units."""


class Watermark:
    """How many of some units are computed, in order, and whether all is done; senders wait for what they send."""

    def __init__(self) -> None:
        self._passed = 0
        self._done = False
        self._broken = False
        self._retracted = False
        self._moved = threading.Condition()

    def advance(self, to: int) -> None:
        """So many are computed."""
        with self._moved:
            self._passed = to
            self._moved.notify_all()

    def finish(self) -> None:
        """All is computed, and committed."""
        with self._moved:
            self._done = True
            self._moved.notify_all()

    def abandon(self) -> None:
        """Nothing more will be computed: whoever waits gets an error."""
        with self._moved:
            self._broken = True
            self._moved.notify_all()

    def retract(self) -> None:
        """What was computed turned out wrong: no more of it is to be sent."""
        with self._moved:
            self._retracted = True

    def unless_retracted(self, frames: Callable[[], list[Frame]]) -> list[Frame]:
        """What ``frames`` makes, from memory that is not written to before :meth:`retract` returns; else nothing."""
        with self._moved:
            return [] if self._retracted else frames()

    def wait_for(self, count: int) -> None:
        """Wait until ``count`` units are computed.

        The computation has no input to wait for, so this needs no deadline.

        Raises:
            RuntimeError: they never will be.
        """
        self._wait(lambda: self._done or self._passed >= count)

    def wait_done(self) -> None:
        """Wait until all is computed and committed; raises RuntimeError as :meth:`wait_for` does."""
        self._wait(lambda: self._done)

    def _wait(self, reached: Callable[[], bool]) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._broken or reached())
            if self._broken:
                raise RuntimeError("the answer was abandoned while it was computed")


@dataclass(frozen=True)
class Values:
    """The values of an answer: units that are sent as they are computed."""

    holdings: Holdings
    seq: int
    codec: str
    turn: int
    positions: Sequence[int]
    """In the order of computation."""
    awaited: int
    """So many of them are being computed; the others were before."""
    bodies: Bodies
    packed: Callable[[int], bool]
    watermark: Watermark

    def frames(self, most_elements: int = MOST_RUN_ELEMENTS) -> Iterator[Frame]:
        """Frames of at most so many values (or one unit) each, as soon as their values are there."""
        sent = 0
        for run in self.holdings.runs(self.positions, min(most_elements, MOST_RUN_ELEMENTS)):
            sent += len(run)
            self.watermark.wait_for(min(sent, self.awaited))
            yield from self.watermark.unless_retracted(partial(self._run, run))
        self.watermark.wait_done()

    def _run(self, run: range) -> list[Frame]:
        if any(self.packed(position) for position in run):
            return [
                self._frame(range(position, position + 1), packed=self.packed(position)) for position in run
            ]
        return [self._frame(run, packed=False)]

    def _frame(self, run: range, *, packed: bool) -> Frame:
        place = self.holdings.places[run.start]
        codec = self.codec if self.holdings.answered_encoded(place.vector, self.codec) else NATIVE
        message = Units(self.seq, place.vector, place.number, len(run), codec, self.turn, packed)
        return Frame(message, self.bodies(run))


@dataclass(frozen=True)
class Outgoing:
    """What goes to the worker that sent one request."""

    key: Key
    values: Values | None = None
    answer: Answer | None = None
    """Follows the values; none where the round is still open."""
    bodies: tuple[memoryview, ...] = ()
    """The answer's own bytes, of a fetch."""


@dataclass
class Work:
    """What an entry of the log asks of a shard: answers to send, and the computation that makes them."""

    outgoing: list[Outgoing] = field(default_factory=list)
    compute: list[Callable[[], None]] = field(default_factory=list)
    commit: list[Callable[[], None]] = field(default_factory=list)
    """Changes what others read, so it needs the lock."""
    prepare: list[Callable[[], None]] = field(default_factory=list)
    """Makes answers out of what was committed."""
    watermark: Watermark = field(default_factory=Watermark)

    def run(self, lock: AbstractContextManager[Any] | None = None) -> None:
        """Compute and commit; answers may be on their way meanwhile."""
        try:
            for step in self.compute:
                step()
            with lock or nullcontext():
                for step in self.commit:
                    step()
            for step in self.prepare:
                step()
        except BaseException:
            self.watermark.abandon()
            raise
        self.watermark.finish()
