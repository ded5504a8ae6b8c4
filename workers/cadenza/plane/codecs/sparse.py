"""Lossless packing of runs in which most values are zero, such as gradients of embeddings.

On the wire: the indices of the values whose bits are not all zero, increasing, in 2 bytes each (4 in runs of more than 65,536
values); then these values in their own type. How many there are follows from the size. -0.0 is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.codecs.sparsified import index_type
from cadenza.plane.wire import ProtocolError

_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def packed_entry_bytes(length: int, dtype: np.dtype[Any]) -> int:
    """Bytes for each value that is not zero, in a run of ``length``."""
    return index_type(length).itemsize + dtype.itemsize


def pack(values: NDArray[Any]) -> memoryview | None:
    """The contiguous vector ``values`` packed, or None where its own bytes are not more.

    Empty if all are zero.
    """
    bits = values.view(_BITS[values.itemsize])
    count = int(np.count_nonzero(bits))
    if count * packed_entry_bytes(values.size, values.dtype) >= values.nbytes:
        return None
    places = np.flatnonzero(bits)
    return memoryview(places.astype(index_type(values.size)).tobytes() + values[places].tobytes())


def unpack(data: memoryview, length: int, out: NDArray[Any], dtype: np.dtype[Any] | None = None) -> None:
    """Fill ``out`` with the ``length`` values that ``data`` holds.

    Args:
        dtype: type of the values in ``data``; that of ``out`` unless given.

    Raises:
        ProtocolError: ``data`` is nothing that ``pack`` writes for ``length`` values of this type.
    """
    dtype = out.dtype if dtype is None else dtype
    entry = packed_entry_bytes(length, dtype)
    count, rest = divmod(data.nbytes, entry)
    if rest or data.nbytes >= length * dtype.itemsize:
        raise ProtocolError(
            f"{data.nbytes} bytes of sparse values; a multiple of {entry} below {length * dtype.itemsize} is expected"
        )
    split = count * index_type(length).itemsize
    whole = np.frombuffer(data, np.uint8)
    places = whole[:split].view(index_type(length))
    if count and (places[-1] >= length or bool((places[1:] <= places[:-1]).any())):
        raise ProtocolError(f"sparse values for {length} places hold indices out of range or order")
    out.fill(0)
    out[places] = whole[split:].view(dtype)
