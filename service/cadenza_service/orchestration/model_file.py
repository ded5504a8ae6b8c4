"""A trained model as a safetensors file, from the flat vectors that the shards held."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from cadenza.plane.layout import Layout, Tensor

_SAVED_AS: dict[str, tuple[np.dtype, int]] = {
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), 1),
    "float8_e4m3fn": (np.dtype(ml_dtypes.float8_e4m3fn), 1),
    "float8_e5m2": (np.dtype(ml_dtypes.float8_e5m2), 1),
    "complex128": (np.dtype(np.float64), 2),
}
"""Element type in the file, and elements for each of the tensor's, where that differs from numpy's type of the same
name. safetensors has no complex128: it is saved as pairs (real, imaginary) in a last dimension of 2."""


def write_model(
    path: Path, layout: Layout, vectors: Mapping[str, NDArray[np.generic]], metadata: Mapping[str, str]
) -> None:
    """Write every tensor of ``layout`` under its name, and tied ones under each of their names.

    Args:
        path: the file to write.
        vectors: each vector of the layout by name: one-dimensional, in the vector's own type.
        metadata: text for the file's header, beside ``format: pt``.

    Raises:
        ValueError: a vector is missing or too short, or a tensor's type is one that safetensors does not have.
    """
    tensors = {tensor.name: _array(tensor, vectors) for tensor in layout.tensors}
    tensors |= {other: tensors[name] for other, name in layout.aliases}
    save_file(tensors, path, metadata={"format": "pt", **metadata})


def _array(tensor: Tensor, vectors: Mapping[str, NDArray[np.generic]]) -> NDArray[np.generic]:
    """The tensor's values as a view of its vector."""
    if tensor.vector not in vectors:
        raise ValueError(
            f"tensor {tensor.name!r} lies in vector {tensor.vector!r}, but there are only {sorted(vectors)}"
        )
    vector = vectors[tensor.vector]
    dtype, per_element = _saved_as(tensor)
    size_bytes = math.prod(tensor.shape) * per_element * dtype.itemsize
    start_bytes = tensor.offset * vector.itemsize
    data = np.ascontiguousarray(vector).view(np.uint8)[start_bytes : start_bytes + size_bytes]
    if len(data) < size_bytes:
        raise ValueError(
            f"tensor {tensor.name!r} ends at byte {start_bytes + size_bytes} of {tensor.vector}, which has {vector.nbytes}"
        )
    shape = tensor.shape if per_element == 1 else (*tensor.shape, per_element)
    return data.view(dtype).reshape(shape)


def _saved_as(tensor: Tensor) -> tuple[np.dtype, int]:
    if tensor.dtype in _SAVED_AS:
        return _SAVED_AS[tensor.dtype]
    try:
        return np.dtype(tensor.dtype), 1
    except TypeError:
        raise ValueError(
            f"tensor {tensor.name!r} has type {tensor.dtype}, which a safetensors file cannot hold"
        ) from None
