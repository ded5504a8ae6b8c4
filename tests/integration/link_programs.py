"""What the workers of jobs on bad links run: rounds whose right result is known to the bit."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from benchmarks.sync.programs import VECTOR, vector_layout

from cadenza.plane.link import LinkError
from cadenza.plane.messages import Request
from cadenza.plane.network import NetworkLink


def push_known_values(link: NetworkLink, *, length: int, rounds: int) -> dict[str, Any]:
    """``rounds`` rounds of local mode, worker k pushing 2 (k + 1) times small integers of the round's own.

    Their mean over two workers is exact in float32. Returns seconds of each round, whether all weights were right
    after it, and why rounds ended early if they did, with the seconds since the latest round had begun.
    """
    joined = link.join(vector_layout(length), node="test", device="cpu")
    weights = np.zeros(length, np.float32)
    right = np.zeros(length, np.float32)
    seconds: list[float] = []
    begun_at = time.monotonic()
    try:
        if joined.publish:
            link.publish((VECTOR,), {VECTOR: weights})
            link.ready()
        else:
            link.begin(Request("fetch", 1, -1, (VECTOR,)), {}, {VECTOR: weights}).result()
        for number in range(rounds):
            pattern = _pattern(length, number)
            values = np.float32(2 * (link.worker + 1)) * pattern
            request = Request("update", number + 2, number, (VECTOR,), samples=1, steps=1)
            begun_at = time.monotonic()
            answer = link.begin(request, {VECTOR: values}, {VECTOR: weights}).result()
            seconds.append(time.monotonic() - begun_at)
            right += np.float32(joined.workers + 1) * pattern
            if not np.array_equal(weights, right) or answer.note.version != number + 1:
                return {"seconds": seconds, "right": False}
        if link.finish():
            link.published()
    except LinkError as error:
        return {
            "seconds": seconds,
            "right": True,
            "error": str(error),
            "after_s": time.monotonic() - begun_at,
        }
    return {"seconds": seconds, "right": True}


def _pattern(length: int, number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(number).integers(-64, 64, length).astype(np.float32)
