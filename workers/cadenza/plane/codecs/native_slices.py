"""How slices become bytes and back, whole and in their own type.

A slice codec works on one shard's slice of one vector. The only one so far is ``fp32``, which sends each value in
the parameters' own type (bfloat16 as two bytes, float64 as eight). Decoding never trusts a size from the
wire: the receiver computes what it expects from the slice alone.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.layout import NUMPY_TYPES, Slice, accumulator
from cadenza.plane.wire import ProtocolError


class SliceCodec(Protocol):
    """One way to encode a slice of a vector."""

    name: str

    def size_bytes(self, part: Slice) -> int:
        """Bytes on the wire for ``part``."""

    def encode(self, values: NDArray[np.generic], part: Slice) -> memoryview:
        """``values`` (the slice, any floating type) as ``size_bytes(part)`` bytes; may be a view of them."""

    def decode(self, data: memoryview, part: Slice) -> NDArray[np.generic]:
        """The slice's values in its accumulator type; may be a view of ``data``.

        Raises:
            ProtocolError: ``data`` is not exactly ``size_bytes(part)`` bytes.
        """


class Native:
    """``fp32``: each value in its vector's own type."""

    name = "fp32"

    def size_bytes(self, part: Slice) -> int:
        return part.size_bytes

    def encode(self, values: NDArray[np.generic], part: Slice) -> memoryview:
        return as_bytes(np.ascontiguousarray(values, dtype=NUMPY_TYPES[part.dtype]))

    def decode(self, data: memoryview, part: Slice) -> NDArray[np.generic]:
        if data.nbytes != part.size_bytes:
            raise ProtocolError(f"{data.nbytes} bytes for {part.vector}; {part.size_bytes} are expected")
        values = np.frombuffer(data, dtype=NUMPY_TYPES[part.dtype])
        return values.astype(accumulator(part.dtype), copy=False) if part.dtype != "uint8" else values


def as_bytes(values: NDArray[np.generic]) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return values.view(np.uint8).data if values.size else memoryview(b"")


CODECS: dict[str, SliceCodec] = {"fp32": Native()}
"""All slice codecs by the name that specs and messages use."""

AUTO = "fp32"
"""What ``codec: auto`` chooses."""
