"""Over real sockets: groups, codecs, packed and streamed updates; all workers end with the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cadenza.plane.layout import NUMPY_TYPES, Layout, Tensor, Vector
from cadenza.plane.messages import Answer, Request
from cadenza.plane.network import NetworkLink
from tests.harness import LocalCluster, job_spec

Array = NDArray[Any]
WORKERS, ROUNDS, RATE = 3, 6, 0.3
LENGTH = 70_000
PARAMETERS, BUFFERS = "parameters.float32", "buffers.float32"
LAYOUT = Layout(
    (Vector("parameters", "float32", LENGTH), Vector("buffers", "float32", 9)),
    (Tensor("w", "float32", (LENGTH,), PARAMETERS, 0), Tensor("m", "float32", (9,), BUFFERS, 0)),
    ("w",),
)


class Learner:
    """Steps of gradient descent on 0.5 |w - target|², each worker with a target of its own."""

    def __init__(self, worker: int, link: NetworkLink, *, streams: bool = False) -> None:
        self.link = link
        self.streams = streams
        self.target = np.random.default_rng(worker).normal(size=LENGTH).astype(np.float32)
        self.held = {v.name: np.zeros(v.length, NUMPY_TYPES[v.dtype]) for v in LAYOUT.vectors}
        """The committed values; in sync mode, of parameters, the mean gradient."""
        self.weights = self.held[PARAMETERS].copy()
        self.version = 0
        self.seq = 0
        joined = link.join(LAYOUT, node="n", device="cpu")
        self.sync = joined.mode == "sync"
        if joined.publish:
            link.publish(LAYOUT.every(), self.held)
            link.ready()

    def round(self) -> Answer:
        gradient = self.weights - self.target
        update = gradient if self.sync else -RATE * gradient
        answer = self._send({PARAMETERS: update, BUFFERS: np.full(9, 0.5, np.float32)})
        if answer.content == "gradient":
            self.weights = self.weights - np.float32(RATE) * self.held[PARAMETERS]
        else:
            self.weights = self.held[PARAMETERS].copy()
        self.version = answer.note.version
        return answer

    def finish(self) -> None:
        if self.link.finish():
            self.link.published()

    def _send(self, values: dict[str, Array]) -> Answer:
        self.seq += 1
        names = LAYOUT.travelling()
        request = Request(
            "update", self.seq, self.version, names, samples=4, steps=1, loss=1.0, present=b"\x01"
        )
        if not self.streams:
            return self.link.begin(request, values, self.held).result()
        stream = self.link.stream(self.seq, self.version, values, self.held)
        for unit in reversed(self.link.units(PARAMETERS)):
            stream.send(PARAMETERS, unit.number)
        return stream.close(request).result()


def train(*, streams: bool = False, shards: int = 2, **sync: Any) -> tuple[list[Learner], LocalCluster]:
    """All rounds of a job; how its workers ended."""

    def body(worker: int, link: NetworkLink) -> Learner:
        learner = Learner(worker, link, streams=streams)
        for _ in range(ROUNDS):
            learner.round()
        learner.finish()
        return learner

    with LocalCluster(job_spec(sync=sync), workers=WORKERS, shards=shards) as cluster:
        learners = cluster.run(body)
        committed = cluster.state()
    for learner in learners:
        assert learner.weights.tobytes() == learners[0].weights.tobytes()
        assert learner.held[BUFFERS].tobytes() == committed[BUFFERS].tobytes()
        if not learner.sync:
            assert learner.weights.tobytes() == committed[PARAMETERS].tobytes()
    return learners, cluster


@pytest.fixture(scope="module")
def plain() -> Array:
    """The weights after the same rounds of plain averaging, in float64."""
    target = np.mean([np.random.default_rng(worker).normal(size=LENGTH) for worker in range(WORKERS)], axis=0)
    weights = np.zeros(LENGTH)
    for _ in range(ROUNDS):
        weights -= RATE * (weights - target)
    return weights


@pytest.mark.parametrize("streams", [False, True], ids=["at_once", "streamed"])
@pytest.mark.parametrize("groups", [1, 4])
def test_groups_and_streams_change_no_bit_of_sync(plain: Array, groups: int, streams: bool) -> None:
    learners, cluster = train(mode="sync", groups=groups, streams=streams)
    assert np.abs(learners[0].weights - plain).max() < 1e-5
    reference, _ = train(mode="sync", shards=1)
    assert learners[0].weights.tobytes() == reference[0].weights.tobytes()
    entries = [shard.core()._index for shard in cluster.shards]
    assert entries == [entries[0]] * 2
    assert (entries[0] > ROUNDS) == (groups > 1), "some groups are answered before the decision"


@pytest.mark.parametrize("mode", ["local", "sync"])
@pytest.mark.parametrize(("codec", "bound"), [("int8", 0.02), ("topk:0.2", 1.0)])
@pytest.mark.parametrize("groups", [1, 4])
def test_codecs_leave_all_workers_alike_and_close_to_fp32(
    plain: Array, mode: str, codec: str, bound: float, groups: int
) -> None:
    learners, _ = train(mode=mode, codec=codec, groups=groups)
    off = np.abs(learners[0].weights - plain)
    assert 0 < float(np.sqrt(np.mean(off**2))) < bound * float(np.std(plain))
    link = learners[1].link  # Worker 0 has published the first state, too.
    assert link.push_bytes < 0.4 * link.raw_push_bytes
    assert link.pull_bytes < 0.4 * link.raw_pull_bytes


@pytest.mark.parametrize("groups", [1, 4])
def test_units_that_are_mostly_zero_travel_packed_and_lose_nothing(groups: int) -> None:
    def body(worker: int, link: NetworkLink) -> tuple[bytes, int, int]:
        learner = Learner(worker, link)
        for turn in range(3):
            gradient = np.zeros(LENGTH, np.float32)
            gradient[1_000 * turn : 1_000 * turn + 10] = 1 + worker
            link.sparse(PARAMETERS, [unit.number for unit in link.units(PARAMETERS)])
            learner._send({PARAMETERS: gradient, BUFFERS: np.zeros(9, np.float32)})
            mean = np.zeros(LENGTH, np.float32)
            mean[gradient != 0] = 2
            assert learner.held[PARAMETERS].tobytes() == mean.tobytes()
        learner.finish()
        return learner.held[PARAMETERS].tobytes(), link.push_bytes, link.pull_bytes

    with LocalCluster(job_spec(sync={"mode": "sync", "groups": groups}), workers=WORKERS) as cluster:
        ends = cluster.run(body)
    assert len({values for values, _, _ in ends}) == 1
    # Worker 0 has published the first state, too.
    assert all(pushed < 10_000 and pulled < 10_000 for _, pushed, pulled in ends[1:])


@pytest.mark.parametrize("groups", [1, 4])
def test_a_contribution_that_is_not_finite_at_its_end_spoils_nothing(groups: int) -> None:
    def body(worker: int, link: NetworkLink) -> bytes:
        learner = Learner(worker, link)
        for turn in range(4):
            update = np.full(LENGTH, 1.0 + worker, np.float32)
            if (worker, turn) == (1, 2):
                update[-1] = np.nan
            answer = learner._send({PARAMETERS: update, BUFFERS: np.zeros(9, np.float32)})
            assert answer.note.dropped == ("non_finite" if (worker, turn) == (1, 2) else "")
        learner.finish()
        return learner.held[PARAMETERS].tobytes()

    with LocalCluster(job_spec(sync={"mode": "local", "groups": groups}), workers=WORKERS) as cluster:
        ends = cluster.run(body)
        state = cluster.state()[PARAMETERS]
    assert set(ends) == {state.tobytes()}
    assert np.abs(np.asarray(state, np.float32) - 8.0).max() < 1e-5
