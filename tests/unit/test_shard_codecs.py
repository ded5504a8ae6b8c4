"""Codecs in both directions between workers and a shard: nothing drifts apart, and nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cadenza.plane.codecs import Turn, codec_named
from cadenza.plane.layout import Layout
from cadenza.plane.messages import Decision, Key, Note, Part, Publish, Reply
from cadenza_service.servers.shard_core import ShardCore
from tests.unit.shards import BUFFERS, PARAMETERS, Peer, carry_out, core_of, layout_of

Array = NDArray[Any]
LENGTH, UNIT, WORKERS, ROUNDS = 120, 40, 3, 50
CODECS = ["bf16", "int8", "e3m0", "qsgd", "terngrad", "sign", "topk:0.1", "randomk:0.3"]
BIASED = ["bf16", "int8", "e3m0", "sign", "topk:0.1"]


class Job:
    """Workers that hold and send whole vectors, beside the shards' cores; one entry of the log after another."""

    def __init__(self, mode: str, codec: str, *, layout: Layout | None = None, **outer: Any) -> None:
        layout = layout or layout_of(LENGTH, 20, 0)
        self.core: ShardCore = core_of(layout, mode, unit=UNIT, codec=codec, **outer)
        self.peers = [Peer(self.core, worker) for worker in range(WORKERS)]
        self.index = 0
        self.rng = np.random.default_rng(7)
        for part in self.core.slices(layout.every()):
            first = self.rng.normal(size=part.length).astype(self.core.holdings.wire_type(part.vector))
            for peer in self.peers:
                self.core.publish(peer.worker, Publish((part.vector,)), [first.view(np.uint8).data])
                peer.into[part.vector][:] = first

    def draw(self, peer: Peer) -> dict[str, Array]:
        """What a worker's local steps might have changed."""
        return {
            name: (self.rng.normal(size=values.size) * 0.1).astype(values.dtype)
            for name, values in peer.into.items()
        }

    def push(self, peer: Peer, seq: int, values: dict[str, Array]) -> None:
        (received,) = peer.push(seq, values, turn=self.index)
        assert received.finite

    def decide(self, keys: list[Key], weight: float) -> None:
        self.index += 1
        note = Note(self.index, self.index, 1)
        parts = tuple(Part(key, weight, weight) for key in keys)
        replies = tuple(Reply(key, note) for key in keys)
        for outgoing in carry_out(
            self.core, Decision(self.index, 1, self.index, self.index, parts, replies)
        ).outgoing:
            self.peers[outgoing.key.worker].pull(outgoing)

    def round(self) -> list[dict[str, Array]]:
        """A barrier's round; what the workers' updates were, exactly."""
        pushed = [self.draw(peer) for peer in self.peers]
        for peer, values in zip(self.peers, pushed, strict=True):
            self.push(peer, self.index + 1, values)
        seq = self.index + 1
        self.decide([Key(peer.worker, 1, seq) for peer in self.peers], 1 / WORKERS)
        return pushed


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "outer", [{}, {"name": "nesterov", "lr": 0.5, "momentum": 0.9}], ids=["average", "nesterov"]
)
def test_every_workers_copy_is_the_committed_state_to_the_bit(codec: str, outer: dict[str, Any]) -> None:
    job = Job("local", codec, **outer)
    for _ in range(ROUNDS):
        job.round()
        for peer in job.peers:
            assert peer.answers[-1].content == "change"
            for name, committed in job.core.weights.committed.items():
                assert peer.slice(name).tobytes() == committed.tobytes()


@pytest.mark.parametrize("codec", ["int8", "topk:0.1"])
def test_in_sync_mode_all_workers_get_the_same_gradient_to_the_bit(codec: str) -> None:
    job = Job("sync", codec)
    for _ in range(5):
        pushed = job.round()
        first = job.peers[0]
        assert first.answers[-1].content == "gradient"
        assert all(peer.into[PARAMETERS].tobytes() == first.into[PARAMETERS].tobytes() for peer in job.peers)
        exact = np.mean([values[PARAMETERS] for values in pushed], axis=0)
        assert 0 < np.abs(first.into[PARAMETERS] - exact).max() < 1
        assert first.into[BUFFERS].tobytes() == job.core.weights.committed[BUFFERS].tobytes()


@pytest.mark.parametrize("mode", ["local", "sync"])
@pytest.mark.parametrize("codec", BIASED)
def test_what_was_sent_and_what_is_owed_are_all_that_there_was(mode: str, codec: str) -> None:
    # sum of the exact means = sum of what workers applied + the shard's residual + the mean of theirs
    job = Job(mode, codec)
    first = job.peers[0].into[PARAMETERS].astype(np.float64)
    exact = np.zeros(LENGTH)
    applied = np.zeros(LENGTH)
    for _ in range(ROUNDS):
        exact += np.mean([values[PARAMETERS].astype(np.float64) for values in job.round()], axis=0)
        if mode == "sync":
            applied += job.peers[0].into[PARAMETERS]
    if mode == "local":
        applied = job.peers[0].into[PARAMETERS] - first
    owed = job.core.weights._residual[PARAMETERS].astype(np.float64)
    owed += np.mean([peer.compressor._residual[PARAMETERS] for peer in job.peers], axis=0)
    assert np.abs(owed).max() > 1e-4, "the codec leaves something out"
    assert np.abs(applied + owed - exact).max() < 1e-4


@pytest.mark.parametrize("codec", ["qsgd", "terngrad", "randomk:0.3"])
def test_an_unbiased_codec_owes_nothing_and_is_right_on_average(codec: str) -> None:
    job = Job("local", codec)
    assert job.core.weights._residual == {}
    values = {name: np.full(into.size, 0.1, into.dtype) for name, into in job.peers[0].into.items()}
    values[PARAMETERS][::2] = -0.3
    first = job.peers[0].into[PARAMETERS].copy()
    rounds = 100
    for seq in range(1, rounds + 1):
        for peer in job.peers:
            job.push(peer, seq, values)
        job.decide([Key(peer.worker, 1, seq) for peer in job.peers], 1 / WORKERS)
    mean = (job.peers[0].into[PARAMETERS] - first) / rounds
    assert abs(float(mean[::2].mean()) + 0.3) < 0.03
    assert abs(float(mean[1::2].mean()) - 0.1) < 0.01


@pytest.mark.parametrize("mode", ["ssp", "async"])
@pytest.mark.parametrize("codec", ["bf16", "int8", "qsgd", "topk:0.1"])
def test_without_a_barrier_what_a_worker_holds_follows_the_committed_state(mode: str, codec: str) -> None:
    job = Job(mode, codec)
    seqs = [0] * WORKERS
    worst = []

    def turn(values: dict[str, Array] | None = None) -> float:
        peer = job.peers[int(job.rng.integers(WORKERS))]
        seqs[peer.worker] += 1
        job.push(peer, seqs[peer.worker], job.draw(peer) if values is None else values)
        job.decide([Key(peer.worker, 1, seqs[peer.worker])], 1 / WORKERS)
        assert peer.answers[-1].content == "change"
        held = job.core._private[peer.worker]._values[PARAMETERS]
        assert peer.slice(PARAMETERS).tobytes() == held.tobytes(), "the shard knows what the worker holds"
        assert peer.slice(BUFFERS).tobytes() == job.core.weights.committed[BUFFERS].tobytes()
        return float(np.abs(held - job.core.weights.committed[PARAMETERS]).max())

    for _ in range(200):
        worst.append(turn())
    assert max(worst[100:]) <= 1.5 * max(worst[:100]), "the difference does not grow"
    assert max(worst) < 2.0
    still = {name: np.zeros_like(values) for name, values in job.peers[0].into.items()}
    for _ in range(150):
        turn(still)
    assert max(turn(still) for _ in range(10)) < 1e-4, "what one answer could not say is in the next ones"


@pytest.mark.parametrize("mode", ["local", "async"])
def test_after_a_fetch_changes_go_on_from_what_was_fetched(mode: str) -> None:
    job = Job(mode, "int8")
    weight = 1 / WORKERS
    for seq in (1, 2):
        for peer in job.peers[:2]:
            job.push(peer, seq, job.draw(peer))
            if mode == "async":
                job.decide([Key(peer.worker, 1, seq)], weight)
        if mode == "local":
            job.decide([Key(peer.worker, 1, seq) for peer in job.peers[:2]], 1 / 2)
    late = job.peers[2]
    fetch = late.fetch(1, -1)
    assert len(fetch) == 1
    job.index += 1
    reply = Reply(Key(2, 1, 1), Note(job.core.version, job.core.round, 1))
    entry = Decision(job.index, 1, job.core.round, job.core.version, (), (reply,))
    (outgoing,) = carry_out(job.core, entry).outgoing
    late.pull(outgoing)
    assert late.slice(PARAMETERS).tobytes() == job.core.weights.committed[PARAMETERS].tobytes()
    job.push(late, 2, job.draw(late))
    job.decide([Key(2, 1, 2)], weight)
    assert [answer.content for answer in late.answers] == ["weights", "change"]
    assert np.abs(late.slice(PARAMETERS) - job.core.weights.committed[PARAMETERS]).max() < 0.01


@pytest.mark.parametrize("mode", ["local", "async"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_vectors_of_16_bits_are_answered_with_their_committed_values(mode: str, dtype: str) -> None:
    job = Job(mode, "int8", layout=layout_of(LENGTH, 0, 0, dtype))
    name = f"parameters.{dtype}"
    for seq in range(1, 5):
        for peer in job.peers:
            job.push(peer, seq, job.draw(peer))
            if mode == "async":
                job.decide([Key(peer.worker, 1, seq)], 1 / WORKERS)
                assert peer.slice(name).tobytes() == job.core.weights.wire(name).tobytes()
        if mode == "local":
            job.decide([Key(peer.worker, 1, seq) for peer in job.peers], 1 / WORKERS)
            held = [peer.slice(name).tobytes() for peer in job.peers]
            assert held == [job.core.weights.wire(name).tobytes()] * WORKERS


def test_float64_parameters_keep_their_type_through_a_codec() -> None:
    job = Job("local", "topk:0.1", layout=layout_of(LENGTH, 0, 0, "float64"))
    for _ in range(5):
        job.round()
    name = "parameters.float64"
    assert {peer.into[name].dtype for peer in job.peers} == {np.dtype(np.float64)}
    assert all(peer.slice(name).tobytes() == job.core.weights.committed[name].tobytes() for peer in job.peers)


def test_an_answers_bytes_are_the_codecs_and_are_drawn_by_the_shard_alone() -> None:
    job = Job("local", "qsgd")
    anchor = job.peers[0].into[PARAMETERS].copy()
    job.round()
    place = job.core.holdings.places[1]
    (data,) = job.core.weights.bodies(range(1, 2))
    codec = codec_named("qsgd")
    assert data.nbytes == codec.size_bytes(place.unit, 1)
    change = np.empty(place.unit.length, np.float32)
    codec.decode(data, place.unit, Turn(5, 1, -1), change)
    span = slice(place.unit.start, place.unit.stop)
    assert np.array_equal(anchor[span] + change, job.peers[0].into[PARAMETERS][span])
