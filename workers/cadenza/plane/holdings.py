"""What one shard holds: its part of every vector, and the units in which that part travels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cadenza.plane.codecs import Codec, codec_named
from cadenza.plane.layout import NUMPY_TYPES, Cut, Layout, Slice, accumulator
from cadenza.plane.messages import Units
from cadenza.plane.units import Unit
from cadenza.plane.wire import ProtocolError

NATIVE = "fp32"
"""The codec that is none: each value in its vector's own type."""

MOST_RUN_ELEMENTS = 1 << 18
"""In one frame of several units: what a receiver must be ready to buffer, 1 MiB of float32."""


class Place(NamedTuple):
    """One unit that the shard owns, and where it lies in the shard's slice of the vector, in elements."""

    vector: str
    number: int
    """Among the shard's units of this vector."""
    unit: Unit
    start: int
    stop: int


class Holdings:
    """The fixed facts of one shard of one job: what both ends of its connections compute sizes from."""

    def __init__(self, layout: Layout, cut: Cut, shard: int, groups: int = 1) -> None:
        self.slices: dict[str, Slice] = {
            part.vector: part for part in layout.slices(cut, shard, layout.every())
        }
        self.roles = {vector.name: vector.role for vector in layout.vectors}
        self.travelling = layout.travelling()
        self.places: list[Place] = []
        """All units that travel, in layout order; a unit's index here is its position."""
        self._first: dict[str, int] = {}
        for name in self.travelling:
            self._first[name] = len(self.places)
            self.places += _places(self.slices[name])
        self.groups = groups
        count = len(self.places)
        self._edges = [count * group // self.groups for group in range(self.groups + 1)]

    def positions(self, message: Units) -> range:
        """The positions that a frame speaks of; raises ProtocolError where the shard does not have them."""
        first = self._first.get(message.vector)
        if first is None or message.first + message.count > len(self.slices[message.vector].units):
            raise ProtocolError(
                f"units {message.first} to {message.first + message.count} of {message.vector}, which are not here"
            )
        positions = range(first + message.first, first + message.first + message.count)
        if message.count > 1 and self.length(positions) > MOST_RUN_ELEMENTS:
            raise ProtocolError(
                f"{self.length(positions)} values in one frame; at most {MOST_RUN_ELEMENTS} are allowed"
            )
        return positions

    def position(self, vector: str, number: int) -> int:
        """The position of one of the shard's units of a vector."""
        return self._first[vector] + number

    def length(self, positions: range) -> int:
        """Elements in consecutive units of one vector."""
        return self.places[positions[-1]].stop - self.places[positions[0]].start

    def group(self, group: int) -> range:
        """The positions of one group."""
        return range(self._edges[group], self._edges[group + 1])

    def group_of(self, position: int) -> int:
        """The group that a position belongs to."""
        return next(group for group in range(self.groups) if position < self._edges[group + 1])

    def runs(self, positions: Iterable[int], most_elements: int) -> Iterable[range]:
        """The same positions in runs of consecutive units of one vector, of so many elements at most each."""
        run: range | None = None
        for position in positions:
            if run is not None and self._joins(run, position, most_elements):
                run = range(run.start, position + 1)
                continue
            if run is not None:
                yield run
            run = range(position, position + 1)
        if run is not None:
            yield run

    def wire_type(self, vector: str) -> np.dtype:
        """The vector's own element type."""
        return NUMPY_TYPES[self.slices[vector].dtype]

    def sum_type(self, vector: str) -> np.dtype:
        """The type in which its values are kept and summed; bytes stay bytes."""
        dtype = self.slices[vector].dtype
        return NUMPY_TYPES[dtype] if dtype == "uint8" else accumulator(dtype)

    def size_bytes(self, message: Units, positions: range) -> int:
        """What a frame that is not packed must carry; raises ProtocolError for a codec that there is not."""
        if message.codec == NATIVE:
            return self.length(positions) * self.wire_type(message.vector).itemsize
        codec = self.codec(message)
        return sum(codec.size_bytes(self.places[position].unit, message.turn) for position in positions)

    def codec(self, message: Units) -> Codec:
        """The codec of a frame; raises ProtocolError where there is none of this name, or the vector never has one."""
        try:
            codec = codec_named(message.codec)
        except ValueError as error:
            raise ProtocolError(f"units in an unknown codec: {error}") from None
        if self.roles[message.vector] != "parameters":
            raise ProtocolError(f"{message.vector} in codec {message.codec}; only parameters are encoded")
        return codec

    def check_packed(self, message: Units, positions: range, length: int) -> None:
        """Raises ProtocolError unless a packed frame is of one unit, and no longer than if it were not packed."""
        dense = self.length(positions) * self.wire_type(message.vector).itemsize
        if message.count != 1 or message.codec != NATIVE or length > dense:
            raise ProtocolError(f"{length} packed bytes for {message.count} units of {message.vector}")

    def encoded(self, vector: str, codec: str) -> bool:
        """Whether updates of a vector travel in a codec: parameters do, and averaged buffers exactly."""
        return codec != NATIVE and self.roles[vector] == "parameters"

    def answered_encoded(self, vector: str, codec: str) -> bool:
        """Whether answers do.

        A 16-bit vector cannot hold what many small changes add up to, so that its committed values are sent, in two
        bytes each.
        """
        return self.encoded(vector, codec) and self.wire_type(vector).itemsize >= 4

    def _joins(self, run: range, position: int, most_elements: int) -> bool:
        first, last, place = self.places[run.start], self.places[run[-1]], self.places[position]
        return (
            place.vector == last.vector
            and place.number == last.number + 1
            and place.stop - first.start <= most_elements
        )


def _places(part: Slice) -> list[Place]:
    places = []
    start = 0
    for number, unit in enumerate(part.units):
        places.append(Place(part.vector, number, unit, start, start + unit.length))
        start += unit.length
    return places
