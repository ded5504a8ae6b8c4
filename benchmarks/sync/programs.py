"""What measured workers run. Each function gets a link to its job and returns plain data."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from cadenza.plane.layout import Layout, Tensor, Vector
from cadenza.plane.messages import Request
from cadenza.plane.network import NetworkLink

VECTOR = "parameters.float32"


def vector_layout(length: int) -> Layout:
    """A model of one float32 parameter."""
    return Layout(
        vectors=(Vector("parameters", "float32", length),),
        tensors=(Tensor("w", "float32", (length,), VECTOR, 0),),
        trainable=("w",),
    )


class Pusher:
    """A worker without a model: contributes the same values again and again."""

    def __init__(self, link: NetworkLink, length: int) -> None:
        joined = link.join(vector_layout(length), node="benchmark", device="cpu")
        self.link = link
        self.values = np.random.default_rng(link.worker).normal(size=length).astype(np.float32)
        self.into = np.zeros(length, np.float32)
        self._seq = 1
        self._version = 0
        if joined.publish:
            link.publish((VECTOR,), {VECTOR: self.into})
            link.ready()
        else:
            link.begin(Request("fetch", 1, -1, (VECTOR,)), {}, {VECTOR: self.into}).result()

    def round(self) -> float:
        """One exchange; how many seconds it took."""
        self._seq += 1
        request = Request("update", self._seq, self._version, (VECTOR,), samples=1, steps=1, present=b"\x01")
        begun_at = time.perf_counter()
        answer = self.link.begin(request, {VECTOR: self.values}, {VECTOR: self.into}).result()
        took_s = time.perf_counter() - begun_at
        self._version = answer.note.version
        return took_s

    def finish(self) -> None:
        """Leave the job in peace: the others are still in their last round."""
        if self.link.finish():
            self.link.published()


def rounds(link: NetworkLink, *, length: int, count: int, warm_up: int = 2) -> dict[str, Any]:
    """``count`` rounds without pause; seconds of each, and how the last was spent."""
    pusher = Pusher(link, length)
    for _ in range(warm_up):
        pusher.round()
    cpu = time.process_time()
    seconds = [pusher.round() for _ in range(count)]
    cpu = time.process_time() - cpu
    timings = link.timings
    pusher.finish()
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "send": timings.send,
        "wait": timings.wait,
        "receive": timings.receive,
    }
