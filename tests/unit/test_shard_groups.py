"""Groups of a round that are answered before it is decided: with the decision, all is as if they never had been."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cadenza.plane.layout import Layout, as_bytes
from cadenza.plane.messages import Decision, Key, Note, Part, Publish, Reply, Tentative
from cadenza_service.servers.answers import Work
from cadenza_service.servers.shard_core import ShardCore
from tests.unit.shards import BUFFERS, PARAMETERS, Peer, carry_out, core_of, layout_of

Array = NDArray[Any]
LAYOUT = layout_of(50, 7, 0)
UNIT = 4
OUTER: list[dict[str, Any]] = [
    {"name": "average"},
    {"name": "sgd", "lr": 0.6, "momentum": 0.8},
    {"name": "nesterov", "lr": 0.6, "momentum": 0.8},
]
ROUNDS = 4


class Job:
    """Workers beside one shard; rounds are decided by the test."""

    def __init__(
        self,
        mode: str = "local",
        *,
        workers: int = 3,
        groups: int = 3,
        codec: str = "fp32",
        layout: Layout = LAYOUT,
        outer: dict[str, Any] | None = None,
    ) -> None:
        self.core: ShardCore = core_of(layout, mode, unit=UNIT, groups=groups, codec=codec, **(outer or {}))
        self.peers = [Peer(self.core, worker) for worker in range(workers)]
        self.computed: Counter[int] = Counter()
        """How often each unit was computed."""
        self.index = self.version = self.round = 0
        rng = np.random.default_rng(3)
        first = {
            part.vector: rng.normal(size=part.length).astype(self.core.holdings.wire_type(part.vector))
            for part in self.core.slices(layout.every())
        }
        for name, values in first.items():
            self.core.publish(0, Publish((name,)), [as_bytes(values)])
            for peer in self.peers:
                peer.into[name][:] = values
        compute = self.core.weights.compute

        def counted(run: range, *arguments: Any) -> None:
            self.computed.update(run)
            compute(run, *arguments)

        self.core.weights.compute = counted  # type: ignore[method-assign, assignment]

    def parts(self, *workers: int) -> tuple[Part, ...]:
        return tuple(
            Part(Key(worker, 1, self.round + 1), 1 / len(workers), 1 / len(workers)) for worker in workers
        )

    def push(self, seed: int) -> None:
        for peer in self.peers:
            rng = np.random.default_rng([seed, peer.worker])
            values = {name: rng.normal(size=into.size).astype(into.dtype) for name, into in peer.into.items()}
            peer.push(self.round + 1, values, turn=self.round)

    def tentative(self, group: int, parts: tuple[Part, ...]) -> None:
        self.index += 1
        self._tell(carry_out(self.core, Tentative(self.index, 1, group, parts)))

    def decide(self, parts: tuple[Part, ...]) -> None:
        self.index += 1
        self.round += 1
        self.version += bool(parts)
        note = Note(self.version, self.round, self.round)
        replies = tuple(Reply(Key(peer.worker, 1, self.round), note) for peer in self.peers)
        self._tell(carry_out(self.core, Decision(self.index, 1, self.round, self.version, parts, replies)))

    def _tell(self, work: Work) -> None:
        for outgoing in work.outgoing:
            self.peers[outgoing.key.worker].pull(outgoing)

    def outcome(self) -> list[bytes]:
        """Everything that a round leaves behind, on the shard and at the workers."""
        weights = self.core.weights
        states = [array for optimizer in weights._optimizers.values() for array in optimizer.state().values()]
        arrays = [*weights.committed.values(), *states, *weights._residual.values()]
        arrays += [values for peer in self.peers for values in peer.into.values()]
        return [array.tobytes() for array in arrays]


def plain(mode: str, chosen: list[tuple[int, ...]], **fields: Any) -> Job:
    """The same rounds without any tentative answer, in one group."""
    job = Job(mode, groups=1, **fields)
    for seed, workers in enumerate(chosen):
        job.push(seed)
        job.decide(job.parts(*workers) if workers else ())
    return job


variants = pytest.mark.parametrize(
    ("mode", "codec", "outer"),
    [
        ("sync", "fp32", OUTER[0]),
        ("sync", "int8", OUTER[0]),
        ("sync", "topk:0.3", OUTER[0]),
        *(("local", "fp32", outer) for outer in OUTER),
        ("local", "int8", OUTER[1]),
        ("local", "topk:0.3", OUTER[2]),
        ("local", "qsgd", OUTER[0]),
    ],
)


@variants
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_tentative_answers_that_turn_out_right_are_the_answer(
    mode: str, codec: str, outer: dict[str, Any], order: tuple[int, ...]
) -> None:
    job = Job(mode, codec=codec, outer=outer)
    for seed in range(ROUNDS):
        job.push(seed)
        parts = job.parts(0, 1, 2)
        for group in order[: seed % 4]:
            job.tentative(group, parts)
        job.decide(parts)
    assert set(job.computed.values()) == {ROUNDS}, "nothing is computed twice"
    assert job.outcome() == plain(mode, [(0, 1, 2)] * ROUNDS, codec=codec, outer=outer).outcome()


@variants
def test_tentative_answers_that_turn_out_wrong_leave_no_trace(
    mode: str, codec: str, outer: dict[str, Any]
) -> None:
    job = Job(mode, codec=codec, outer=outer)
    chosen: list[tuple[int, ...]] = [(0, 2), (0, 1, 2), (1,), (0, 1)]
    for seed, workers in enumerate(chosen):
        job.push(seed)
        for group in range(seed % 3 + 1):
            job.tentative(group, job.parts(0, 1, 2))
        job.decide(job.parts(*workers))
    assert job.outcome() == plain(mode, chosen, codec=codec, outer=outer).outcome()


@pytest.mark.parametrize("outer", OUTER[1:], ids=["sgd", "nesterov"])
def test_nothing_is_advanced_by_a_tentative_entry(outer: dict[str, Any]) -> None:
    job = Job(outer=outer, codec="topk:0.3")
    job.push(0)
    job.decide(job.parts(0, 1, 2))
    weights = job.core.weights

    def kept() -> list[bytes]:
        states = [array for each in weights._optimizers.values() for array in each.state().values()]
        arrays = [*weights.committed.values(), *states, *weights._residual.values()]
        return [array.tobytes() for array in arrays]

    before = kept()
    job.push(1)
    for group in range(3):
        job.tentative(group, job.parts(0, 1, 2))
        assert kept() == before
        assert (job.core.version, job.core.round) == (1, 1)


def test_a_skipped_round_after_tentative_answers_changes_nothing() -> None:
    for codec in ("fp32", "int8"):
        job = Job(codec=codec, outer=OUTER[1])
        chosen: list[tuple[int, ...]] = [(0, 1, 2), (), (0, 1, 2)]
        for seed, workers in enumerate(chosen):
            job.push(seed)
            job.tentative(1, job.parts(0, 1, 2))
            job.decide(job.parts(*workers) if workers else ())
        assert [answer.content for answer in job.peers[0].answers][1] == "weights"
        assert job.outcome() == plain("local", chosen, codec=codec, outer=OUTER[1]).outcome()


def test_in_sync_mode_buffers_of_a_skipped_round_are_as_they_were() -> None:
    job = Job("sync")
    job.push(0)
    job.tentative(2, job.parts(0, 1, 2))
    job.decide(())
    for peer in job.peers:
        assert np.array_equal(peer.into[BUFFERS], job.core.weights.committed[BUFFERS])


def test_whoever_is_not_merged_gets_everything_with_the_decision() -> None:
    job = Job()
    job.push(0)
    before = [peer.into[PARAMETERS].copy() for peer in job.peers]
    job.tentative(0, job.parts(0, 1))
    assert [
        np.array_equal(peer.into[PARAMETERS], then) for peer, then in zip(job.peers, before, strict=True)
    ] == [
        False,
        False,
        True,
    ]
    job.decide(job.parts(0, 1))
    held = [peer.slice(PARAMETERS).tobytes() for peer in job.peers]
    assert held == [job.core.weights.committed[PARAMETERS].tobytes()] * 3


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    order=st.permutations(range(3)),
    mode=st.sampled_from(["sync", "local"]),
    codec=st.sampled_from(["fp32", "int8"]),
    groups=st.integers(1, 9),
)
def test_who_comes_first_does_not_change_a_bit(
    seed: int, order: list[int], mode: str, codec: str, groups: int
) -> None:
    outcomes = []
    for workers in (range(3), order):
        job = Job(mode, groups=groups, codec=codec)
        job.peers = [job.peers[worker] for worker in workers]
        job.push(seed)
        job.peers.sort(key=lambda peer: peer.worker)
        job.decide(job.parts(0, 1, 2))
        outcomes.append(job.outcome())
    assert outcomes[0] == outcomes[1]


def test_packed_updates_come_back_packed_where_all_are_and_with_the_same_values() -> None:
    outcomes = []
    for packed in ((), (0, 2, 5), range(13)):
        job = Job("sync", workers=2)
        for peer in job.peers:
            sparse = np.zeros(50, np.float32)
            sparse[[1, 21 + peer.worker]] = 1 + peer.worker
            values = {PARAMETERS: sparse, BUFFERS: np.full(7, 0.5, np.float32)}
            peer.push(1, values, packed=packed)
        for group in (0, 1):
            job.tentative(group, job.parts(0, 1))
        job.decide(job.parts(0, 1))
        marked = [number for number, is_packed in enumerate(job.core.weights.packed) if is_packed]
        assert marked == list(packed)
        outcomes.append(job.outcome())
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_unit_that_one_worker_sent_in_full_comes_back_in_full() -> None:
    job = Job("sync", workers=2)
    for peer, packed in zip(job.peers, ((0,), ()), strict=True):
        peer.push(
            1,
            {PARAMETERS: np.eye(1, 50, 2, dtype=np.float32)[0], BUFFERS: np.zeros(7, np.float32)},
            packed=packed,
        )
    job.decide(job.parts(0, 1))
    assert not any(job.core.weights.packed)
    assert job.peers[0].into[PARAMETERS].tolist() == np.eye(1, 50, 2)[0].tolist()


@pytest.mark.parametrize(("mode", "codec"), [("local", "fp32"), ("local", "int8"), ("sync", "fp32")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frame_of_a_tentative_answer_is_not_changed_under_the_sender(
    mode: str, codec: str, dtype: str
) -> None:
    job = Job(mode, codec=codec, layout=layout_of(50, 7, 0, dtype))
    job.push(0)
    work = carry_out(job.core, Tentative(1, 1, 0, job.parts(0, 1, 2)))
    values = work.outgoing[0].values
    assert values is not None
    frames = values.frames(most_elements=UNIT)
    bodies = next(frames).bodies  # Its checksum is taken now, its bytes leave one after another.
    then = b"".join(bodies)
    job.index = 1
    job.decide(job.parts(0, 1))
    assert b"".join(bodies) == then
    assert list(frames) == [], "the rest is not sent before the right values"
    committed = {name: job.core.weights.wire(name).tobytes() for name in job.core.holdings.travelling}
    for peer in job.peers:
        assert all(peer.slice(n).tobytes() == held for n, held in committed.items() if mode == "local")
