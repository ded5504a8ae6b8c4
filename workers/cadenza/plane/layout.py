"""How a model's tensors lie in flat vectors, and which part of each vector a shard owns.

A model is one vector per role and element type. *parameters* are trainable and travel in every update;
*buffers* are averaged floating-point buffers, which travel along but never meet the server optimizer;
*static* is everything else that belongs to the state dict (frozen parameters, integer buffers, buffers
that stay local), raw bytes that travel only when a model is published or fetched.

This module imports neither ray nor torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from cadenza.plane.units import Unit

Role = Literal["parameters", "buffers", "static"]

NUMPY_TYPES: dict[str, np.dtype] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "uint8": np.dtype(np.uint8),
}
"""Element types that a vector can have, by their torch name."""


def accumulator(dtype: str) -> np.dtype:
    """The type in which values of ``dtype`` are summed and kept: float64 for float64, else float32."""
    return np.dtype(np.float64) if dtype == "float64" else np.dtype(np.float32)


class Vector(msgspec.Struct, frozen=True):
    """One flat vector of a model."""

    role: Role
    dtype: str
    """A key of NUMPY_TYPES; static vectors are uint8."""
    length: int
    """Elements."""

    def __post_init__(self) -> None:
        if self.dtype not in NUMPY_TYPES or (self.role == "static") != (self.dtype == "uint8"):
            raise ValueError(f"a vector of {self.role} cannot have type {self.dtype!r}")
        if self.length < 0:
            raise ValueError(f"vector {self.name} has length {self.length}")

    @property
    def name(self) -> str:
        return f"{self.role}.{self.dtype}"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return NUMPY_TYPES[self.dtype].itemsize


class Tensor(msgspec.Struct, frozen=True):
    """Where one tensor of the state dict lies."""

    name: str
    """Normalised: without ``module.`` and ``_orig_mod.``."""
    dtype: str
    """The tensor's own torch type, such as ``int64``."""
    shape: tuple[int, ...]
    vector: str
    offset: int
    """In elements of the vector; for static tensors in bytes."""


UNIT_ELEMENTS = 16_384
"""64 KiB of float32: small enough to fill the pipeline of a slow link, large enough to cost little each."""


class Cut(msgspec.Struct, frozen=True):
    """How each vector is cut into units, and which shard owns which.

    A vector of n elements is cut into ``shards * ceil(n / (shards * unit))`` units of equal length, but for the last
    ones, which may be short or empty. So shards differ by less than one element per unit.
    """

    shards: int
    unit: int = UNIT_ELEMENTS
    """The most elements of a unit."""
    striped: bool = False
    """Unit i belongs to shard i mod ``shards``, so that values that become known in order of the vector concern all
    shards alike; else each shard owns consecutive units, as always of static vectors."""
    rows: bool = False
    """Whether units know the matrix rows that lie in them, which only codecs of low rank need."""

    def units(self, vector: Vector, matrices: Sequence[Matrix] = ()) -> list[Unit]:
        """All units of a vector, in order, without the empty ones; each with the rows of ``matrices`` that lie in it."""
        size = self._size(vector.length)
        edges = [(start, min(start + size, vector.length)) for start in range(0, vector.length, max(size, 1))]
        return [
            Unit(vector.name, number, start, stop, rows_between(matrices, start, stop))
            for number, (start, stop) in enumerate(edges)
        ]

    def owned(self, shard: int, vector: Vector, matrices: Sequence[Matrix] = ()) -> list[Unit]:
        """The units of a vector that shard ``shard`` owns, in order."""
        units = self.units(vector, matrices)
        if self._stripes(vector):
            return units[shard :: self.shards]
        each = self._each(vector.length)
        return units[shard * each : (shard + 1) * each]

    def owner(self, vector: Vector, number: int) -> tuple[int, int]:
        """Which shard owns the ``number``-th unit of a vector, and its number among the shard's own."""
        if self._stripes(vector):
            return number % self.shards, number // self.shards
        each = self._each(vector.length)
        return number // each, number % each

    def _stripes(self, vector: Vector) -> bool:
        return self.striped and vector.role != "static"

    def _each(self, length: int) -> int:
        """Units per shard."""
        return -(-length // (self.shards * self.unit))

    def _size(self, length: int) -> int:
        """Elements per unit."""
        return -(-length // (self.shards * self._each(length))) if length else 0


@dataclass(frozen=True)
class Slice:
    """A shard's part of one vector: the values of some of its units, one after another."""

    vector: str
    dtype: str
    units: tuple[Unit, ...]

    @property
    def length(self) -> int:
        return sum(unit.stop - unit.start for unit in self.units)

    @property
    def size_bytes(self) -> int:
        return self.length * NUMPY_TYPES[self.dtype].itemsize

    def pieces(self, vector: NDArray[Any]) -> list[NDArray[Any]]:
        """Views of the slice's values in the whole ``vector``, in order; units that lie side by side are one piece."""
        edges: list[list[int]] = []
        for unit in self.units:
            if edges and edges[-1][1] == unit.start:
                edges[-1][1] = unit.stop
            else:
                edges.append([unit.start, unit.stop])
        return [vector[start:stop] for start, stop in edges]


class Matrix(NamedTuple):
    """A tensor with rows and columns, by where it lies in its vector, in elements."""

    offset: int
    rows: int
    columns: int


class Layout(msgspec.Struct, frozen=True):
    """All vectors and tensors of a model; equal on every worker of a job."""

    vectors: tuple[Vector, ...]
    tensors: tuple[Tensor, ...]
    trainable: tuple[str, ...]
    """Names of the trainable parameters in order: bit i of a presence mask speaks of the i-th."""
    aliases: tuple[tuple[str, str], ...] = ()
    """(other name, name) of tied tensors, which travel once."""

    def digest(self) -> str:
        """SHA-256 over all of it: equal exactly where the models agree."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()

    def named(self, names: Iterable[str]) -> list[Vector]:
        """The vectors called ``names``, in this layout's order."""
        wanted = set(names)
        return [vector for vector in self.vectors if vector.name in wanted]

    def travelling(self) -> tuple[str, ...]:
        """Names of the vectors that every update carries."""
        return tuple(vector.name for vector in self.vectors if vector.role != "static")

    def every(self) -> tuple[str, ...]:
        """Names of all vectors."""
        return tuple(vector.name for vector in self.vectors)

    def slices(self, cut: Cut, shard: int, names: Iterable[str]) -> list[Slice]:
        """The part of each named vector that shard ``shard`` owns, in layout order."""
        return [
            Slice(vector.name, vector.dtype, tuple(cut.owned(shard, vector, self._rows(cut, vector))))
            for vector in self.named(names)
        ]

    def units(self, cut: Cut, name: str) -> list[Unit]:
        """All units of one vector, in order."""
        (vector,) = self.named([name])
        return cut.units(vector, self._rows(cut, vector))

    def _rows(self, cut: Cut, vector: Vector) -> list[Matrix]:
        """The tensors of a vector that have rows and columns; what has more dimensions is a matrix of its first by the rest."""
        found: list[Matrix] = []
        for tensor in self.tensors if cut.rows else ():
            if tensor.vector == vector.name and len(tensor.shape) > 1 and 0 not in tensor.shape:
                columns = int(np.prod(tensor.shape[1:])) * (2 if tensor.dtype.startswith("complex") else 1)
                found.append(Matrix(tensor.offset, tensor.shape[0], columns))
        return found

    def difference(self, other: Layout) -> str:
        """A sentence on the first thing in which ``other`` differs, for an error text."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=False):
            if mine != theirs and (mine.name, mine.dtype, mine.shape) == (
                theirs.name,
                theirs.dtype,
                theirs.shape,
            ):
                return f"{theirs.name} is at {theirs.offset} of {theirs.vector} instead of {mine.offset} of {mine.vector}"
            if mine != theirs:
                return f"{theirs.name} {theirs.dtype}{list(theirs.shape)} instead of {mine.name} {mine.dtype}{list(mine.shape)}"
        if len(self.tensors) != len(other.tensors):
            return f"{len(other.tensors)} tensors instead of {len(self.tensors)}"
        if self.trainable != other.trainable:
            changed = sorted(set(self.trainable) ^ set(other.trainable))
            return f"another set of trainable parameters ({', '.join(changed[:3])})"
        return "other ties between tensors"


def rows_between(matrices: Sequence[Matrix], start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
    """The whole rows of ``matrices`` that lie between two elements of their vector: (offset from start, rows, columns)."""
    found = []
    for matrix in matrices:
        first = max(-(-(start - matrix.offset) // matrix.columns), 0)
        last = min((stop - matrix.offset) // matrix.columns, matrix.rows)
        if last > first:
            found.append((matrix.offset + first * matrix.columns - start, last - first, matrix.columns))
    return tuple(found)


def as_bytes(values: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return values.view(np.uint8).data if values.size else memoryview(b"")
