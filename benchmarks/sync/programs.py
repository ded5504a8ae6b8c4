"""What measured workers run where no model is needed. Methods return plain data."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from cadenza.plane.control import Control
from cadenza.plane.layout import Layout, Tensor, Vector
from cadenza.plane.messages import Request
from cadenza.plane.network import NetworkLink

VECTOR = "parameters.float32"


def connect(seat: dict[str, Any]) -> Control:
    """A seat's connection to the coordinator of its job. It lasts as long as the process."""
    host, port = seat["coordinator"]
    return Control.connect(host, port, bytes.fromhex(seat["key"]), worker=seat["worker"], incarnation=1)


def vector_layout(length: int) -> Layout:
    """A model of one float32 parameter."""
    return Layout(
        vectors=(Vector("parameters", "float32", length),),
        tensors=(Tensor("w", "float32", (length,), VECTOR, 0),),
        trainable=("w",),
    )


class Pusher:
    """A worker without a model: contributes the same values again and again."""

    def __init__(self, seat: dict[str, Any], length: int) -> None:
        self._link = NetworkLink(connect(seat))
        joined = self._link.join(vector_layout(length), node="benchmark", device="cpu")
        self._values = np.random.default_rng(self._link.worker).normal(size=length).astype(np.float32)
        self._into = np.zeros(length, np.float32)
        self._seq = 1
        self._version = 0
        if joined.publish:
            self._link.publish((VECTOR,), {VECTOR: self._into})
            self._link.ready()
        else:
            self._link.begin(Request("fetch", 1, -1, (VECTOR,)), {}, {VECTOR: self._into}).result()

    def rounds(self, count: int) -> dict[str, Any]:
        """``count`` rounds without pause; of each, monotonic seconds and what the shard told."""
        moments = [self._round() for _ in range(count)]
        return {
            "begun_at": [begun_at for begun_at, _, _, _ in moments],
            "answered_at": [answered_at for _, answered_at, _, _ in moments],
            "ended_at": [ended_at for _, _, ended_at, _ in moments],
            "served_s": [served_s for _, _, _, served_s in moments],
        }

    def _round(self) -> tuple[float, float, float, float]:
        """When it began, when the answer began, when it was there, and how long the shard took to begin it."""
        self._seq += 1
        request = Request("update", self._seq, self._version, (VECTOR,), samples=1, steps=1, present=b"\x01")
        begun_at = time.monotonic()
        answer = self._link.begin(request, {VECTOR: self._values}, {VECTOR: self._into}).result()
        ended_at = time.monotonic()
        self._version = answer.note.version
        answered_at = begun_at + self._link.timings.send + self._link.timings.wait
        return begun_at, answered_at, ended_at, answer.served_s
