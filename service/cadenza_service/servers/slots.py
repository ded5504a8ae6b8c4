"""One worker's contribution on one shard: where its units are received, decoded and kept until they are merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.codecs import Turn, sparse
from cadenza.plane.holdings import NATIVE, Holdings
from cadenza.plane.layout import as_bytes
from cadenza.plane.messages import Request, Units
from cadenza.plane.wire import ProtocolError

Array = NDArray[Any]

Scratch = Callable[[int], memoryview]
"""Gives memory of so many bytes, which one connection uses for one frame after another."""


class Slot:
    """A worker's memory on this shard, allocated once and used for one contribution after another.

    It is filled by the worker's connection and read when a decision merges it; in between nobody writes to it.
    """

    def __init__(self, holdings: Holdings, worker: int, incarnation: int, seed: int) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.seq = 0
        """Of the contribution that it holds, or that was merged last."""
        self.request: Request | None = None
        """Once it is there; none again when it was answered."""
        self.answered = True
        """Whether there is nothing in it that still counts."""
        self.values: dict[str, Array] = {
            name: np.zeros(holdings.slices[name].length, holdings.sum_type(name))
            for name in holdings.travelling
        }
        self.packed = np.zeros(len(holdings.places), np.bool_)
        """Units that came packed."""
        self._holdings = holdings
        self._seed = seed
        self._received = np.zeros(len(holdings.places), np.bool_)
        self._finite = np.zeros(len(holdings.places), np.bool_)
        self._told: set[int] = set()

    def begin(self, seq: int) -> None:
        """Make room for a new contribution; raises ProtocolError while the latest one is not answered."""
        if self.request is not None:
            raise ProtocolError(f"request {seq} before request {self.seq} was answered")
        self.seq = seq
        self.answered = False
        self.packed[:] = False
        self._received[:] = False
        self._finite[:] = False
        self._told.clear()

    def finish(self) -> Request:
        """The request is being answered: nothing of it counts any more."""
        request, self.request = self.request, None
        assert request is not None, "only what was received is answered"
        self.answered = True
        return request

    # --- receiving ---

    def destination(self, message: Units, length: int, scratch: Scratch) -> Sequence[memoryview]:
        """Where a frame's ``length`` bytes go; raises ProtocolError if it is not what the layout asks for."""
        positions = self._holdings.positions(message)
        if message.packed:
            self._holdings.check_packed(message, positions, length)
        elif length != (size := self._holdings.size_bytes(message, positions)):
            raise ProtocolError(
                f"{length} bytes for {message.count} units of {message.vector}; {size} are expected"
            )
        if message.seq > self.seq:
            self.begin(message.seq)
        if not self._wanted(message, positions) or not self._received_in_place(message):
            return [scratch(length)]
        return [as_bytes(self._span(positions))]

    def accept(self, message: Units, data: Sequence[memoryview]) -> None:
        """A frame is there, whole and undamaged, at what :meth:`destination` gave: decode it, and look for infinities."""
        positions = self._holdings.positions(message)
        if not self._wanted(message, positions):
            return
        (body,) = data
        if message.packed:
            self._unpack(positions, body)
        elif not self._received_in_place(message):
            self._decode(message, positions, body)
        finite = bool(np.isfinite(self._span(positions)).all())
        for position in positions:
            self._finite[position] = finite
            self._received[position] = True
            self.packed[position] = message.packed

    def _wanted(self, message: Units, positions: range) -> bool:
        """Whether the values count: not where the contribution is older, or complete in these units."""
        if message.seq != self.seq or self.answered:
            return False
        return self.request is None or not all(self._received[position] for position in positions)

    def _received_in_place(self, message: Units) -> bool:
        holdings = self._holdings
        exact = message.codec == NATIVE and not message.packed
        return exact and holdings.wire_type(message.vector) == holdings.sum_type(message.vector)

    def _unpack(self, positions: range, body: memoryview) -> None:
        vector = self._holdings.places[positions[0]].vector
        span = self._span(positions)
        sparse.unpack(body, len(span), span, self._holdings.wire_type(vector))

    def _decode(self, message: Units, positions: range, body: memoryview) -> None:
        if message.codec == NATIVE:
            self._span(positions)[:] = np.frombuffer(body, self._holdings.wire_type(message.vector))
            return
        codec = self._holdings.codec(message)
        turn = Turn(self._seed, message.turn, self.worker)
        values = self.values[message.vector]
        for position in positions:
            place = self._holdings.places[position]
            size = codec.size_bytes(place.unit, message.turn)
            codec.decode(body[:size], place.unit, turn, values[place.start : place.stop])
            body = body[size:]

    def _span(self, positions: range) -> Array:
        first, last = self._holdings.places[positions[0]], self._holdings.places[positions[-1]]
        return self.values[first.vector][first.start : last.stop]

    # --- telling ---

    def news(self) -> list[tuple[int, bool]]:
        """The groups that have become complete, each once, and whether all values in it are finite."""
        if self.request is None:
            return []
        if self.request.kind != "update":
            groups = [0]
        else:
            groups = [group for group in range(self._holdings.groups) if self._complete(group)]
        told = [(group, self._all_finite(group)) for group in groups if group not in self._told]
        self._told.update(groups)
        return told

    def _complete(self, group: int) -> bool:
        positions = self._holdings.group(group)
        return bool(self._received[positions.start : positions.stop].all())

    def _all_finite(self, group: int) -> bool:
        assert self.request is not None
        positions = self._holdings.group(group)
        return self.request.kind != "update" or bool(self._finite[positions.start : positions.stop].all())
