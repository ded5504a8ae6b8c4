"""Workers, shards and coordinator over real sockets, with arrays instead of models."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cadenza.plane.link import LinkError
from cadenza.plane.messages import Answer, Exhausted, Lease, Request, Span
from cadenza.plane.network import NetworkLink
from tests.harness import LocalCluster, job_spec
from tests.memory import VECTOR, vector_layout

LENGTH = 7


def start(link: NetworkLink, first: NDArray[Any]) -> NDArray[Any]:
    """Join, and return the job's first weights."""
    joined = link.join(vector_layout(LENGTH), node="test", device="cpu")
    weights = np.zeros(LENGTH)
    if joined.publish:
        link.publish((VECTOR,), {VECTOR: first})
        link.ready()
        return first.copy()
    link.begin(Request("fetch", 1, -1, (VECTOR,)), {}, {VECTOR: weights}).result()
    return weights


def push(
    link: NetworkLink, seq: int, base: int, values: NDArray[Any], into: NDArray[Any], **fields: Any
) -> Answer:
    request = Request(
        "update", seq, base, (VECTOR,), samples=fields.pop("samples", 1), steps=1, loss=1.0, **fields
    )
    return link.begin(request, {VECTOR: values}, {VECTOR: into}).result()


@pytest.mark.parametrize("shards", [1, 2, 9])
def test_local_rounds_average_deltas_weighted_by_samples(shards: int) -> None:
    first = np.arange(LENGTH, dtype=np.float64)

    def body(worker: int, link: NetworkLink) -> NDArray[Any]:
        weights = start(link, first + worker)
        for round_number in range(5):
            delta = np.full(LENGTH, float(worker + 1))
            answer = push(link, round_number + 2, round_number, delta, weights, samples=worker + 1)
            assert answer.content == "weights"
            assert answer.note.version == round_number + 1
        link.finish()
        return weights

    with LocalCluster(job_spec(sync={"mode": "local"}), workers=3, shards=shards) as cluster:
        results = cluster.run(body)
        committed = cluster.state()[VECTOR]
    mean = (1 * 1 + 2 * 2 + 3 * 3) / 6
    for weights in results:
        assert np.allclose(weights, first + 5 * mean, rtol=0, atol=1e-12)
        assert np.array_equal(weights, committed)


def test_sync_rounds_answer_the_mean_gradient() -> None:
    def body(worker: int, link: NetworkLink) -> list[float]:
        into = start(link, np.zeros(LENGTH))
        means = []
        for step in range(3):
            answer = push(
                link, step + 2, step, np.full(LENGTH, float(worker * 10 + step)), into, present=b"\x01"
            )
            assert answer.content == "gradient"
            assert answer.present == (b"\x01",)
            means.append(float(into[0]))
        link.finish()
        return means

    with LocalCluster(job_spec(sync={"mode": "sync"}), workers=2) as cluster:
        assert cluster.run(body) == [[5.0, 6.0, 7.0]] * 2


def test_async_answers_at_once_and_tells_the_staleness() -> None:
    def body(worker: int, link: NetworkLink) -> int:
        weights = start(link, np.zeros(LENGTH))
        worst = 0
        version = 0
        for step in range(50):
            answer = push(link, step + 2, version, np.ones(LENGTH), weights)
            worst = max(worst, answer.note.staleness)
            version = answer.note.version
        link.finish()
        return worst

    with LocalCluster(job_spec(sync={"mode": "async"}), workers=3) as cluster:
        worst = cluster.run(body)
        assert np.array_equal(cluster.state()[VECTOR], np.full(LENGTH, 150.0))
        staleness = cluster.snapshot().telemetry.staleness
    assert staleness is not None
    assert staleness.counts[-1] == 150
    assert max(worst) >= 1


def test_a_nan_contribution_is_dropped_counted_and_reported() -> None:
    def body(worker: int, link: NetworkLink) -> tuple[NDArray[Any], str]:
        weights = start(link, np.zeros(LENGTH))
        delta = np.full(LENGTH, 2.0)
        if worker == 1:
            delta[3] = np.nan
        answer = push(link, 2, 0, delta, weights)
        link.finish()
        return weights, answer.note.dropped

    with LocalCluster(job_spec(sync={"mode": "local"}), workers=2, shards=2) as cluster:
        (first, kept), (second, dropped) = cluster.run(body)
        snapshot = cluster.snapshot()
    assert (kept, dropped) == ("", "non_finite")
    assert np.array_equal(first, np.full(LENGTH, 2.0))
    assert np.array_equal(second, first)
    assert snapshot.telemetry.dropped == {"non_finite": 1}
    assert [event.data["worker"] for event in snapshot.events if event.kind == "contribution_dropped"] == [1]


def test_workers_with_different_models_are_refused() -> None:
    def body(worker: int, link: NetworkLink) -> None:
        link.join(vector_layout(LENGTH + worker), node="test", device="cpu")

    with LocalCluster(job_spec(), workers=2) as cluster:
        with pytest.raises(LinkError, match=r"model differs .* w float64\[\d\] instead of w float64\[\d\]"):
            cluster.run(body)
        assert cluster.snapshot().phase == "failed"


def test_a_worker_that_never_joins_is_named() -> None:
    with LocalCluster(job_spec(), workers=2, join_timeout_s=0.2) as cluster:
        control = cluster.connect(0)
        link = NetworkLink(control)
        with pytest.raises(LinkError, match="worker 1 had not joined"):
            link.join(vector_layout(LENGTH), node="test", device="cpu")
        control.close()


def test_a_round_that_waits_too_long_names_who_is_missing() -> None:
    given_up = threading.Event()

    def body(worker: int, link: NetworkLink) -> None:
        weights = start(link, np.zeros(LENGTH))
        if worker == 1:
            assert given_up.wait(20)
            return
        with pytest.raises(LinkError):
            push(link, 2, 0, weights, weights.copy())
        given_up.set()

    with LocalCluster(job_spec(), workers=2, round_timeout_s=0.3) as cluster:
        cluster.run(body)
        failure = cluster.snapshot().failure
    assert failure is not None
    assert (failure.kind, failure.worker) == ("timeout", 1)
    assert "worker 1" in failure.message


def test_every_sample_is_leased_once_per_epoch_and_accounted_for() -> None:
    size, epochs, batch = 103, 2, 4

    def body(worker: int, link: NetworkLink) -> list[tuple[int, int]]:
        weights = start(link, np.zeros(LENGTH))
        seen = []
        version = 0
        seq = 1
        while not isinstance(lease := link.lease(Lease(size, batch, False, epochs)), Exhausted):
            for begin in range(lease.start, lease.stop, batch):
                end = min(begin + batch, lease.stop)
                seen += [(lease.epoch, position) for position in range(begin, end)]
                seq += 1
                spans = (Span(lease.lease, begin, end),)
                version = push(
                    link, seq, version, np.ones(LENGTH), weights, samples=end - begin, spans=spans
                ).note.version
        link.finish()
        return seen

    spec = job_spec(sync={"mode": "local", "local_steps": 1}, data={"epochs": epochs})
    with LocalCluster(spec, workers=3) as cluster:
        seen = [pair for pairs in cluster.run(body) for pair in pairs]
        progress = cluster.snapshot().progress
    assert sorted(seen) == [(epoch, position) for epoch in range(epochs) for position in range(size)]
    assert progress.samples == size * epochs == progress.total_samples
