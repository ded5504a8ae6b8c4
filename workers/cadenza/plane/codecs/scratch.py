"""Arrays for intermediate results, kept by each thread so that nothing is allocated per unit."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.named: dict[tuple[str, type], NDArray[Any]] = {}


_buffers = _Buffers()


def scratch(name: str, length: int, dtype: type = np.float32) -> NDArray[Any]:
    """This thread's array called ``name``, with any content. Only one user of a name may be active at a time."""
    kept = _buffers.named.get((name, dtype))
    if kept is None or kept.size < length:
        kept = _buffers.named[name, dtype] = np.empty(length, dtype)
    return kept[:length]
