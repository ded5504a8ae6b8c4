"""How a model's tensors lie in flat vectors, and which part of each vector a shard owns.

A model is one vector per role and element type. *parameters* are trainable and travel in every update;
*buffers* are averaged floating-point buffers, which travel along but never meet the server optimizer;
*static* is everything else that belongs to the state dict (frozen parameters, integer buffers, buffers
that stay local), raw bytes that travel only when a model is published or fetched.

This module imports neither ray nor torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

import ml_dtypes
import msgspec
import numpy as np

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


class Slice(msgspec.Struct, frozen=True):
    """A shard's part of one vector: elements ``start`` to ``stop``."""

    vector: str
    dtype: str
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def size_bytes(self) -> int:
        return self.length * NUMPY_TYPES[self.dtype].itemsize


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

    def slices(self, shard: int, shards: int, names: Iterable[str]) -> list[Slice]:
        """The part of each named vector that shard ``shard`` of ``shards`` owns, in layout order."""
        return [
            Slice(vector.name, vector.dtype, *cut(vector.length, shard, shards))
            for vector in self.named(names)
        ]

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


def cut(length: int, part: int, parts: int) -> tuple[int, int]:
    """Start and stop of the ``part``-th of ``parts`` near-equal contiguous pieces of ``length`` elements."""
    return length * part // parts, length * (part + 1) // parts
