"""What a codec is, and what all of them share: fields of fixed type and count, and seeded randomness."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.codecs.scratch import scratch
from cadenza.plane.units import Unit
from cadenza.plane.wire import ProtocolError

Floats = NDArray[np.floating[Any]]
"""A contiguous vector of float32 or float64."""

Singles = NDArray[np.float32]
Fields = list[NDArray[Any]]
FieldTypes = Sequence[tuple[np.dtype[Any], int]]
"""(type, count) of the arrays that follow each other on the wire, little-endian and without gaps."""

F4 = np.dtype("<f4")
U1 = np.dtype("u1")

TINY = np.float32(2.0**-100)
"""A scale or norm below it is sent as zero: its reciprocal would leave the range of float32."""


class Turn(NamedTuple):
    """Who encodes when. All that is random follows from it, so that runs repeat to the bit."""

    seed: int
    """The job's."""
    round: int
    worker: int
    """-1 for a server."""


class Codec(Protocol):
    """A wire format. Stateless; safe to use from any thread."""

    @property
    def name(self) -> str:
        """Canonical, with its parameter: ``int8``, ``topk:0.01``."""

    @property
    def exact(self) -> bool:
        """decode(encode(v)) has the bits of v in the vector's own type."""

    @property
    def biased(self) -> bool:
        """E[decode(encode(v))] differs from v: convergence needs error feedback."""

    def size_bytes(self, unit: Unit, round: int) -> int:
        """Exactly what ``encode`` writes for ``unit`` in ``round``; follows from both and nothing else."""

    def encode(self, values: Floats, unit: Unit, turn: Turn, out: memoryview) -> None:
        """Write ``values`` (``unit.length`` of them) into ``out``, which has ``size_bytes`` bytes.

        Never fails for what the values are. What is not finite remains visible to the receiver: at least
        one decoded value is then not finite.
        """

    def decode(self, data: memoryview, unit: Unit, turn: Turn, out: Floats) -> None:
        """Fill ``out`` (``unit.length`` values) from ``data``.

        Raises:
            ProtocolError: ``data`` has another size than ``size_bytes``, or holds what ``encode`` never writes.
        """


class Format(ABC):
    """A codec whose bytes are a few arrays: subclasses say which, and fill and read them."""

    name: str
    exact = False
    biased = True

    @abstractmethod
    def fields(self, unit: Unit, round: int) -> FieldTypes:
        """The arrays on the wire."""

    @abstractmethod
    def write(self, values: Floats, fields: Fields, unit: Unit, turn: Turn) -> None:
        """Fill all of ``fields``."""

    @abstractmethod
    def read(self, fields: Fields, unit: Unit, turn: Turn, out: Floats) -> None:
        """Fill all of ``out``; raises ProtocolError on what ``write`` never writes."""

    def size_bytes(self, unit: Unit, round: int) -> int:
        """See ``Codec``."""
        return sum(dtype.itemsize * count for dtype, count in self.fields(unit, round))

    def encode(self, values: Floats, unit: Unit, turn: Turn, out: memoryview) -> None:
        """See ``Codec``. Raises ValueError where ``out`` has another size."""
        fields = self.fields(unit, turn.round)
        expected = sum(dtype.itemsize * count for dtype, count in fields)
        if out.nbytes != expected:
            raise ValueError(f"out has {out.nbytes} bytes; {self.name} writes {expected} for {_told(unit)}")
        with np.errstate(all="ignore"):
            self.write(values, _cut(out, fields), unit, turn)

    def decode(self, data: memoryview, unit: Unit, turn: Turn, out: Floats) -> None:
        """See ``Codec``."""
        fields = self.fields(unit, turn.round)
        expected = sum(dtype.itemsize * count for dtype, count in fields)
        if data.nbytes != expected:
            raise ProtocolError(
                f"{data.nbytes} bytes of {self.name} for {_told(unit)}; {expected} are expected"
            )
        with np.errstate(all="ignore"):
            self.read(_cut(data, fields), unit, turn, out)

    def never(self, unit: Unit, what: str) -> ProtocolError:
        """The error for bytes that hold what ``write`` never writes."""
        return ProtocolError(f"{self.name} for {_told(unit)} holds {what}, which no sender writes")


def single(values: Floats) -> Singles:
    """``values`` in float32: themselves if they are, else a copy that lives until this thread's next call."""
    if values.dtype == np.float32:
        return values
    copy = scratch("single", values.size)
    np.copyto(copy, values, casting="same_kind")
    return copy


def generator(*names: object) -> np.random.Generator:
    """Random numbers that follow from ``names`` alone, on every machine."""
    digest = hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))


def own_generator(label: str, unit: Unit, turn: Turn) -> np.random.Generator:
    """The sender's own random numbers for ``unit`` in ``turn``: no two workers, rounds or units share any."""
    return generator(label, turn.seed, turn.round, turn.worker, unit.vector, unit.number)


def check_scales(codec: Format, scales: Singles, unit: Unit) -> None:
    """Raise ProtocolError unless each of ``scales`` is finite and not negative, or NaN."""
    if bool((np.signbit(scales) & ~np.isnan(scales)).any()) or bool(np.isinf(scales).any()):
        raise codec.never(unit, "a negative or infinite scale")


def _cut(data: memoryview, fields: FieldTypes) -> Fields:
    whole = np.frombuffer(data, np.uint8)
    cut, start = [], 0
    for dtype, count in fields:
        stop = start + dtype.itemsize * count
        cut.append(whole[start:stop].view(dtype))
        start = stop
    return cut


def _told(unit: Unit) -> str:
    return f"{unit.vector}[{unit.start}:{unit.stop}]"
