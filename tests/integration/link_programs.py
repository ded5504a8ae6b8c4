"""What the workers of jobs on bad links run: rounds whose right result is known to the bit."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from benchmarks.sync.programs import VECTOR, connect, vector_layout

from cadenza.plane.link import LinkError
from cadenza.plane.messages import Request
from cadenza.plane.network import NetworkLink


class KnownValues:
    """A worker that pushes 2 (k + 1) times small integers of the round's own, k being its number.

    Their mean over two workers is exact in float32.
    """

    def __init__(self, seat: dict[str, Any], length: int) -> None:
        self._link = NetworkLink(connect(seat))
        self._joined = self._link.join(vector_layout(length), node="test", device="cpu")
        self._weights = np.zeros(length, np.float32)
        if self._joined.publish:
            self._link.publish((VECTOR,), {VECTOR: self._weights})
            self._link.ready()
        else:
            self._link.begin(Request("fetch", 1, -1, (VECTOR,)), {}, {VECTOR: self._weights}).result()

    def push(self, rounds: int) -> dict[str, Any]:
        """Rounds of local mode: seconds of each, whether all weights were right after it, and why rounds ended early
        if they did, with the seconds since the latest round had begun."""
        right = np.zeros_like(self._weights)
        seconds: list[float] = []
        begun_at = time.monotonic()
        try:
            for number in range(rounds):
                pattern = _pattern(len(right), number)
                values = np.float32(2 * (self._link.worker + 1)) * pattern
                request = Request("update", number + 2, number, (VECTOR,), samples=1, steps=1)
                begun_at = time.monotonic()
                answer = self._link.begin(request, {VECTOR: values}, {VECTOR: self._weights}).result()
                seconds.append(time.monotonic() - begun_at)
                right += np.float32(self._joined.workers + 1) * pattern
                if not np.array_equal(self._weights, right) or answer.note.version != number + 1:
                    return {"seconds": seconds, "right": False}
            if self._link.finish():
                self._link.published()
        except LinkError as error:
            after_s = time.monotonic() - begun_at
            return {"seconds": seconds, "right": True, "error": str(error), "after_s": after_s}
        return {"seconds": seconds, "right": True}


def _pattern(length: int, number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(number).integers(-64, 64, length).astype(np.float32)
