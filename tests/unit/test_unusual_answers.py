"""Answers that are not the usual ones: of a round in which nothing could be merged, and for who was away."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cadenza.plane.layout import Layout, Tensor, Vector
from cadenza.plane.messages import Answer, Request
from cadenza.plane.network import NetworkLink
from tests.harness import LocalCluster, job_spec

VECTOR = "parameters.float32"
LENGTH = 40_000
LAYOUT = Layout(
    vectors=(Vector("parameters", "float32", LENGTH),),
    tensors=(Tensor("w", "float32", (LENGTH,), VECTOR, 0),),
    trainable=("w",),
)


class Worker:
    """A worker that contributes what it is told to."""

    def __init__(self, link: NetworkLink) -> None:
        self.link = link
        self.into = np.zeros(LENGTH, np.float32)
        self.version = 0
        self._seq = 0
        if link.join(LAYOUT, node="test", device="cpu").publish:
            link.publish((VECTOR,), {VECTOR: self.into})
            link.ready()
        else:
            self._send("fetch", {}, base=-1)

    def contribute(self, values: NDArray[Any]) -> Answer:
        """One update from the version that the worker holds."""
        return self._send("update", {VECTOR: values}, base=self.version)

    def _send(self, kind: Any, values: dict[str, NDArray[Any]], base: int) -> Answer:
        self._seq += 1
        request = Request(kind, self._seq, base, (VECTOR,), samples=len(values), steps=1, loss=1.0)
        answer = self.link.begin(request, values, {VECTOR: self.into}).result()
        self.version = answer.note.version
        return answer


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_round_in_which_nothing_is_finite_leaves_the_committed_weights(codec: str) -> None:
    def body(_: int, link: NetworkLink) -> tuple[Answer, NDArray[Any], Answer]:
        worker = Worker(link)
        worker.contribute(np.ones(LENGTH, np.float32))
        held = worker.into.copy()
        worker.into[:] = 7
        skipped = worker.contribute(np.full(LENGTH, np.nan, np.float32))
        assert np.array_equal(worker.into, held)
        merged = worker.contribute(np.ones(LENGTH, np.float32))
        return skipped, worker.into, merged

    with LocalCluster(job_spec(sync={"mode": "local", "codec": codec}), workers=1) as cluster:
        ((skipped, into, merged),) = cluster.run(body)
        assert (skipped.content, skipped.note.dropped) == ("weights", "non_finite")
        assert not merged.note.dropped
        assert np.array_equal(into, cluster.state()[VECTOR])
        assert np.abs(into - 2).max() < 0.1


@pytest.mark.parametrize("codec", ["fp32", "int8", "topk:0.1"])
def test_who_contributes_without_having_come_back_gets_all_of_the_weights(codec: str) -> None:
    away, gone_on = threading.Event(), threading.Event()

    def body(number: int, link: NetworkLink) -> tuple[NDArray[Any], int]:
        worker = Worker(link)
        random = np.random.default_rng(number)

        def contribute() -> None:
            worker.contribute(random.normal(size=LENGTH).astype(np.float32))

        contribute()
        if number == 0:
            link.evaluating()
            away.set()
            assert gone_on.wait(20)
        else:
            assert away.wait(20)
            contribute()
            gone_on.set()
            while cluster.snapshot().progress.workers[0].state != "active":
                time.sleep(0.001)
        contribute()
        if link.finish():
            link.published()
        return worker.into, worker.version

    with LocalCluster(job_spec(sync={"mode": "local", "codec": codec}), workers=2, shards=1) as cluster:
        (one, first), (other, second) = cluster.run(body)
        assert first == second
        assert np.array_equal(one, other)
        assert np.array_equal(one, cluster.state()[VECTOR])
