"""Rounds: random interleavings of everything that workers, shards and the network may do, and each rule by itself."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cadenza.plane.layout import Cut, as_bytes
from cadenza.plane.messages import (
    Answer,
    Assign,
    Decision,
    Key,
    Note,
    Publish,
    Received,
    Request,
    RequestKind,
    Span,
    Tentative,
    Units,
)
from cadenza.spec import Mode
from cadenza_service.coordination.progress import TrainingProgress
from cadenza_service.coordination.rounds import (
    LEGAL_MOVES,
    MOST_NON_FINITE_IN_A_ROW,
    Dropped,
    Happened,
    JobFails,
    Member,
    MemberState,
    Output,
    RoundRules,
    Rounds,
    Stale,
    Used,
)
from cadenza_service.servers.answers import Outgoing
from cadenza_service.servers.shard_core import ShardCore
from tests.harness import job_spec
from tests.memory import VECTOR, vector_layout

Array = NDArray[Any]
PIECE = 3
"""Elements of each shard, each a unit of its own; every shard is given the same values, so that all have to end with the same bits."""


# --- random interleavings ---


class Simulation:
    """A job whose every message may be overtaken by those on other connections, checked against a model."""

    def __init__(
        self, mode: Mode, seed: int, *, workers: int, shards: int, staleness: int, groups: int = 1
    ) -> None:
        self.chance = Random(seed)
        self.numbers = np.random.default_rng(seed)
        groups = groups if mode in ("sync", "local") else 1
        self.rules = RoundRules(
            mode, 1, staleness, 1, shards, 60.0, groups, history_rounds=self.chance.randint(1, 4)
        )
        self.progress = TrainingProgress(job_spec(evaluation={"every_samples": 40}))
        self.rounds = Rounds(self.rules, self.progress)
        layout = vector_layout(PIECE * shards)
        self.shards = [
            ShardCore(
                Assign(layout, number, shards, mode, {"name": "average"}, Cut(shards, unit=1), groups=groups)
            )
            for number in range(shards)
        ]
        places = [(shard, worker) for shard in range(shards) for worker in range(workers)]
        self.inboxes: dict[tuple[int, int], deque[tuple[Request | Units, memoryview]]] = {
            place: deque() for place in places
        }
        self.outboxes: dict[tuple[int, int], deque[Outgoing]] = {place: deque() for place in places}
        self.pulled: dict[Key, Array] = {}
        """What the shards sent in units, shape [shards, PIECE]."""
        self.receipts: list[deque[Received]] = [deque() for _ in range(shards)]
        self.not_finite: set[Key] = set()
        """Of which the coordinator knows it."""
        self.logs: list[deque[Decision | Tentative]] = [deque() for _ in range(shards)]
        self.entries = 0
        self.early: list[Tentative] = []
        """Of the open round."""
        self.rounds_ended: list[list[bool]] = []
        """Of each round, whether its tentative entries turned out to be right."""
        self.requests: dict[Key, tuple[Request, Array]] = {}
        self.arrived: dict[Key, dict[int, tuple[Answer, bytes]]] = {}
        self.committed = [self.numbers.normal(size=PIECE)]
        """By version, from the decisions alone."""
        self.models = dict.fromkeys(range(workers), (0, self.committed[0]))
        self.idle = set(range(workers))
        self.evaluating: set[int] = set()
        self.seq = dict.fromkeys(range(workers), 0)
        self.decisions: list[Decision] = []
        self.answered: Counter[Key] = Counter()
        self.merged: Counter[Key] = Counter()
        self.streak: Counter[int] = Counter()
        self.failure: JobFails | None = None
        for shard in self.shards:
            shard.publish(0, Publish((VECTOR,)), [as_bytes(self.committed[0])])
        for worker in range(workers):
            self.rounds.join(worker, 1)
        self.rounds.start()

    # what may happen

    def run(self, steps: int) -> None:
        for _ in range(steps):
            events = [*self.deliveries(), *((self.act, worker) for worker in sorted(self.idle))]
            if not events or self.failure:
                break
            event, *arguments = self.chance.choice(events)
            event(*arguments)
        self.settle()

    def settle(self) -> None:
        """Deliver everything that is under way."""
        while not self.failure and (events := self.deliveries()):
            event, *arguments = self.chance.choice(events)
            event(*arguments)

    def deliveries(self) -> list[tuple[Any, ...]]:
        return [
            *((self.take, *place) for place, inbox in self.inboxes.items() if inbox),
            *((self.hear, shard) for shard, receipts in enumerate(self.receipts) if receipts),
            *((self.decide, shard) for shard, log in enumerate(self.logs) if log),
            *((self.pull, *place) for place, outbox in self.outboxes.items() if outbox),
        ]

    def act(self, worker: int) -> None:
        """A worker that waits for nothing does what its training loop may do next."""
        if self.chance.random() < 0.02:
            self.finish(worker)
        elif worker in self.evaluating:
            if self.chance.random() < 0.1:
                self.send(worker, "fetch")
                self.evaluating.discard(worker)
        elif self.chance.random() < 0.05:
            self.evaluating.add(worker)
            self.carry_out(self.rounds.evaluating(worker, 0.0))
        else:
            self.send(worker, self.chance.choices(["update", "abstain"], [9, 1])[0])

    def finish(self, worker: int) -> None:
        self.idle.discard(worker)
        self.evaluating.discard(worker)
        del self.models[worker]
        self.carry_out(self.rounds.finish(worker, 0.0))

    def send(self, worker: int, kind: str) -> None:
        self.seq[worker] += 1
        values = self.numbers.normal(size=PIECE) * 10.0 ** self.chance.randint(-9, 9)
        if self.chance.random() < 0.1:
            values[self.chance.randrange(PIECE)] = self.chance.choice([math.nan, math.inf])
        request = Request(
            kind,  # type: ignore[arg-type]
            self.seq[worker],
            self.models[worker][0],
            (VECTOR,),
            samples=0 if kind == "fetch" else self.chance.choice([0, 1, 2, 7]),
            steps=1,
            present=b"\x01",
        )
        self.idle.discard(worker)
        self.requests[Key(worker, 1, request.seq)] = (request, values)
        for shard in range(len(self.shards)):
            frames: list[tuple[Request | Units, memoryview]] = [(request, memoryview(b""))]
            if kind == "update":
                frames += self.units(shard, request, values)
                self.chance.shuffle(frames)
            self.inboxes[shard, worker] += frames

    def units(self, shard: int, request: Request, values: Array) -> list[tuple[Request | Units, memoryview]]:
        # Only the last shard sees the value that is not finite.
        if not np.isfinite(values).all() and shard < len(self.shards) - 1:
            values = np.ones(PIECE)
        return [
            (Units(request.seq, VECTOR, number, 1, "fp32", 0), as_bytes(values[number : number + 1].copy()))
            for number in range(PIECE)
        ]

    # what follows

    def take(self, shard: int, worker: int) -> None:
        message, body = self.inboxes[shard, worker].popleft()
        core = self.shards[shard]
        if isinstance(message, Request):
            self.receipts[shard] += core.request(worker, 1, message)
            return
        slot = core.slot(worker, 1)
        (target,) = slot.destination(message, body.nbytes, lambda size: memoryview(bytearray(size)))
        target[:] = body
        slot.accept(message, [target])
        self.receipts[shard] += core.news(slot)

    def hear(self, shard: int) -> None:
        received = self.receipts[shard].popleft()
        if not received.finite:
            self.not_finite.add(received.key)
        if self.chance.random() < 0.05:
            self.receipts[shard].append(received)
        self.carry_out(self.rounds.received(received, 0.0))

    def carry_out(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, JobFails):
                self.failure = output
            if isinstance(output, Tentative):
                self.check_tentative(output)
            if isinstance(output, Decision):
                self.check_decision(output)
            if isinstance(output, Decision | Tentative):
                for log in self.logs:
                    log.append(output)

    def decide(self, shard: int) -> None:
        core, entry = self.shards[shard], self.logs[shard].popleft()
        work = core.decide(entry) if isinstance(entry, Decision) else core.tentative(entry)
        work.run()
        assert len(core._history) <= self.rules.history_rounds
        for outgoing in work.outgoing:
            self.outboxes[shard, outgoing.key.worker].append(outgoing)

    def pull(self, shard: int, worker: int) -> None:
        """A shard's answer, or a part of it, leaves, maybe long after it was computed."""
        outgoing = self.outboxes[shard, worker].popleft()
        pulled = self.pulled.setdefault(outgoing.key, np.full((len(self.shards), PIECE), np.nan))[shard]
        for message, bodies, _ in outgoing.values.frames() if outgoing.values is not None else ():
            assert isinstance(message, Units)
            assert message.seq == outgoing.key.seq
            pulled[message.first : message.first + message.count] = np.frombuffer(
                b"".join(bodies), np.float64
            )
        if outgoing.answer is None:
            return
        body = b"".join(outgoing.bodies)
        # With "unchanged" come only buffers that tentative answers had changed, which this model has not.
        if outgoing.values is not None and outgoing.answer.content != "unchanged":
            assert not body
            body = pulled.tobytes()
        answers = self.arrived.setdefault(outgoing.key, {})
        assert shard not in answers
        answers[shard] = (outgoing.answer, body)
        if len(answers) == len(self.shards):
            self.receive(outgoing.key, answers)

    # what has to hold

    def check_tentative(self, entry: Tentative) -> None:
        self.entries += 1
        assert entry.index == self.entries
        assert self.rules.groups > 1
        assert entry.group not in {earlier.group for earlier in self.early}
        assert {entry.parts} == {earlier.parts for earlier in [*self.early, entry]}
        assert not self.not_finite & {part.key for part in entry.parts}
        self.early.append(entry)

    def check_decision(self, decision: Decision) -> None:
        version = len(self.committed) - 1
        self.entries += 1
        assert decision.index == self.entries
        if decision.round > len(self.rounds_ended):
            self.rounds_ended.append([entry.parts == decision.parts for entry in self.early])
            self.early = []
        assert decision.version == version + bool(decision.parts)
        members = [part.key.worker for part in decision.parts]
        assert members == sorted(set(members))
        weights = [part.weight for part in decision.parts]
        if decision.parts:
            if self.rules.barrier:
                assert math.isclose(sum(weights), 1.0)
            elif self.rules.mode == "ssp":
                assert 0 < weights[0] <= 1
            else:
                assert weights == [1.0]
        for part in decision.parts:
            self.merged[part.key] += 1
            request, values = self.requests[part.key]
            assert request.kind == "update"
            assert np.isfinite(values).all()
            assert request.samples > 0
        self.check_replies(decision)
        self.decisions.append(decision)
        if decision.parts:
            total = sum(self.requests[part.key][1] * part.weight for part in decision.parts)
            sign = -1 if self.rules.mode == "sync" else 1
            self.committed.append(self.committed[-1] + sign * total)

    def check_replies(self, decision: Decision) -> None:
        for reply in decision.replies:
            self.answered[reply.key] += 1
            request, values = self.requests[reply.key]
            assert reply.note.version == decision.version
            dropped = {"fetch": "", "abstain": "abstained"}.get(request.kind)
            if dropped is None:
                dropped = "no_samples" if not request.samples else ""
                dropped = dropped if np.isfinite(values).all() else "non_finite"
            assert reply.note.dropped == dropped
            if self.rules.mode == "ssp" and request.kind != "fetch":
                clocks = {member.worker: member.clock for member in self.rounds.active()}
                assert clocks[reply.key.worker] - min(clocks.values()) <= self.rules.staleness

    def receive(self, key: Key, answers: dict[int, tuple[Answer, bytes]]) -> None:
        """A worker has its answer from every shard."""
        first, body = answers[0]
        # Every shard was given the same values: one answer, to the bit.
        assert all(other == (first, body) for other in answers.values())
        pieces = np.frombuffer(body, np.float64).reshape(-1, PIECE)
        version, model = self.models[key.worker]
        match first.content:
            case "weights":
                model = pieces[0]
            case "gradient" | "gradients":
                assert len(pieces) == first.note.version - version <= max(1, self.rules.history_rounds)
                for gradient in pieces:
                    model = model - gradient
            case "unchanged":
                assert first.note.version == version
        assert np.array_equal(model, self.committed[first.note.version])
        self.models[key.worker] = (first.note.version, model)
        self.idle.add(key.worker)

    def check_nobody_is_stuck(self) -> None:
        """With nothing under way, whoever waits waits for a worker that can act."""
        if self.failure:
            return
        waiting = set(self.models) - self.idle
        members = self.rounds.members
        active = {worker for worker in self.models if members[worker].state is MemberState.ACTIVE}
        if not waiting:
            return
        assert self.rules.mode != "async"
        behind = [
            worker
            for worker in self.evaluating
            if self.rules.mode == "sync"
            and self.rounds.version - members[worker].version >= self.rules.history_rounds
        ]
        assert active & self.idle or behind
        slowest = min(members[worker].clock for worker in active)
        if self.rules.mode == "ssp" and not self.rules.barrier:
            assert all(members[worker].clock - slowest > self.rules.staleness for worker in waiting)
        else:
            assert set(self.rounds.missing()) == (active & self.idle) | set(behind)

    def end(self) -> None:
        """Everyone finishes in turn; all that was asked is answered once."""
        while self.models and not self.failure:
            assert self.idle
            self.finish(self.chance.choice(sorted(self.idle)))
            self.settle()
            self.check_nobody_is_stuck()

    def check_totals(self) -> None:
        if self.failure:
            assert self.failure.kind == "non_finite"
            return
        assert self.answered == Counter(self.requests.keys())
        assert set(self.merged.values()) <= {1}
        used = {key: request for key, (request, _) in self.requests.items() if request.kind != "fetch"}
        assert self.progress.samples == sum(used[key].samples for key in self.merged)
        assert self.progress.dropped_samples == sum(used[key].samples for key in set(used) - set(self.merged))
        for shard in self.shards:
            state = np.frombuffer(b"".join(shard.read((VECTOR,))), np.float64)
            expected = self.committed[0] if self.rules.mode == "sync" else self.committed[-1]
            assert np.array_equal(state, expected)
            assert shard.version == len(self.committed) - 1
            assert all(slot.answered and slot.request is None for slot in shard._slots.values())


@pytest.mark.parametrize("mode", ["sync", "local", "ssp", "async"])
@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1),
    workers=st.integers(1, 4),
    shards=st.integers(1, 3),
    staleness=st.integers(0, 3),
    groups=st.integers(1, PIECE + 1),
)
def test_whatever_overtakes_whatever(
    mode: Mode, seed: int, workers: int, shards: int, staleness: int, groups: int
) -> None:
    job = Simulation(mode, seed, workers=workers, shards=shards, staleness=staleness, groups=groups)
    job.run(steps=500)
    job.check_nobody_is_stuck()
    job.end()
    job.check_totals()


def test_the_simulation_reaches_every_kind_of_answer() -> None:
    kinds: Counter[str] = Counter()
    replayed = 0
    for seed in range(15):
        job = Simulation("sync", seed, workers=3, shards=2, staleness=0)
        receive = job.receive

        def count(
            key: Key,
            answers: dict[int, tuple[Answer, bytes]],
            receive: Callable[[Key, Any], None] = receive,
        ) -> None:
            nonlocal replayed
            kinds[answers[0][0].content] += 1
            replayed = max(replayed, len(answers[0][0].present))
            receive(key, answers)

        job.receive = count  # type: ignore[method-assign]
        job.run(steps=1_000)
    assert min(kinds[kind] for kind in ("gradient", "gradients", "unchanged")) > 3
    assert replayed > 1


def test_the_simulation_answers_early_and_is_sometimes_wrong() -> None:
    told: Counter[bool] = Counter()
    for seed in range(10):
        job = Simulation("local", seed, workers=3, shards=2, staleness=0, groups=3)
        job.run(steps=1_000)
        told += Counter(right for ended in job.rounds_ended for right in ended)
    assert told[True] > 100
    assert told[False] > 3


# --- one rule at a time ---


class Coordinator:
    """The core with one shard that is always in time; outputs are kept by kind."""

    def __init__(self, mode: Mode, workers: int, **rules: Any) -> None:
        fields: dict[str, Any] = {
            "local_steps": 1,
            "staleness": 0,
            "epoch": 1,
            "shards": 1,
            "round_timeout_s": 10.0,
            **rules,
        }
        self.progress = TrainingProgress(job_spec())
        self.rounds = Rounds(RoundRules(mode, **fields), self.progress)
        self.outputs: list[Output] = []
        self.seq = itertools.count(1)
        for worker in range(workers):
            self.rounds.join(worker, 1)
        self.rounds.start()

    def send(
        self, worker: int, kind: RequestKind = "update", *, now: float = 0.0, **fields: Any
    ) -> list[Output]:
        return self.hear(receipt(Key(worker, 1, next(self.seq)), kind, **fields), now=now)

    def hear(self, message: Received, now: float = 0.0) -> list[Output]:
        outputs = self.rounds.received(message, now)
        self.outputs += outputs
        return outputs

    def all(self, kind: type[Any]) -> Iterator[Any]:
        return (output for output in self.outputs if isinstance(output, kind))


def receipt(key: Key, kind: RequestKind = "update", **fields: Any) -> Received:
    defaults: dict[str, Any] = {
        "shard": 0,
        "group": 0,
        "base_version": 0,
        "samples": 1,
        "steps": 1,
        "loss": 1.0,
        "finite": True,
        "present": b"",
        "spans": (),
        "reason": "",
    }
    return Received(key=key, kind=kind, **{**defaults, **fields})


def decisions(outputs: list[Output]) -> list[Decision]:
    return [output for output in outputs if isinstance(output, Decision)]


def notes(outputs: list[Output]) -> dict[int, Note]:
    return {reply.key.worker: reply.note for entry in decisions(outputs) for reply in entry.replies}


@pytest.mark.parametrize(("source", "target"), list(itertools.product(MemberState, MemberState)))
def test_a_member_moves_as_the_table_says_and_not_otherwise(source: MemberState, target: MemberState) -> None:
    member = Member(5, 1, source)
    if (source, target) in LEGAL_MOVES:
        member.move(target)
        assert member.state is target
        return
    with pytest.raises(ValueError, match=f"worker 5 cannot go from {source.value} to {target.value}"):
        member.move(target)
    assert member.state is source


def test_the_legal_moves_are_these() -> None:
    joining, active, evaluating, finished = MemberState
    assert {
        (joining, active),
        (joining, finished),
        (active, evaluating),
        (evaluating, active),
        (active, finished),
        (evaluating, finished),
    } == LEGAL_MOVES


@pytest.mark.parametrize("mode", ["sync", "local"])
def test_a_round_without_weight_is_skipped(mode: Mode) -> None:
    job = Coordinator(mode, 2)
    job.send(0, samples=0)
    outputs = job.send(1, samples=0)
    (decision,) = decisions(outputs)
    assert (decision.parts, decision.version, decision.round) == ((), 0, 1)
    assert {worker: note.dropped for worker, note in notes(outputs).items()} == dict.fromkeys(
        (0, 1), "no_samples"
    )


@pytest.mark.parametrize("mode", ["sync", "local", "ssp", "async"])
def test_samples_of_an_abstaining_worker_count_as_dropped(mode: Mode) -> None:
    job = Coordinator(mode, 2, staleness=1 if mode == "ssp" else 0)
    outputs = job.send(0, "abstain", samples=5, reason="amp_overflow")
    outputs += job.send(1, samples=3)
    assert notes(outputs)[0].dropped == "amp_overflow"
    assert [dropped.reason for dropped in job.all(Dropped)] == ["amp_overflow"]
    assert (job.progress.samples, job.progress.dropped_samples) == (3, 5)
    merged = [part.key.worker for decision in decisions(outputs) for part in decision.parts]
    assert merged == [1], "an abstention has no values"


def test_weights_are_shares_of_the_samples_behind_a_barrier() -> None:
    job = Coordinator("local", 3)
    job.send(2, samples=5)
    job.send(0, samples=1)
    (decision,) = decisions(job.send(1, samples=2))
    assert [(part.key.worker, part.weight) for part in decision.parts] == [(0, 1 / 8), (1, 2 / 8), (2, 5 / 8)]


def test_weights_in_ssp_are_shares_of_the_latest_samples_of_all_members() -> None:
    job = Coordinator("ssp", 3, staleness=9)
    weights = [
        decisions(job.send(worker, samples=samples))[0].parts[0].weight
        for worker, samples in ((0, 2), (1, 6), (2, 4), (0, 10))
    ]
    assert weights == [2 / 6, 6 / (2 + 6 + 6), 4 / (2 + 6 + 4), 10 / (10 + 6 + 4)]


def test_async_gives_weight_1_but_buffers_a_share() -> None:
    job = Coordinator("async", 4)
    (decision,) = decisions(job.send(2, samples=9))
    assert (decision.parts[0].weight, decision.parts[0].buffer_weight) == (1.0, 0.25)


def test_one_shard_that_finds_a_value_not_finite_is_enough() -> None:
    for order in itertools.permutations(range(3)):
        job = Coordinator("local", 1, shards=3)
        outputs: list[Output] = []
        for shard in order:
            outputs += job.hear(receipt(Key(0, 1, 1), shard=shard, finite=shard != 1))
        (decision,) = decisions(outputs)
        assert decision.parts == ()
        assert [(reply.key, reply.note.dropped) for reply in decision.replies] == [
            (Key(0, 1, 1), "non_finite")
        ]


@pytest.mark.parametrize("mode", ["sync", "local", "ssp", "async"])
def test_a_worker_that_is_never_finite_fails_the_job_by_name(mode: Mode) -> None:
    job = Coordinator(mode, 2, staleness=1 if mode == "ssp" else 0)
    for turn in range(1, MOST_NON_FINITE_IN_A_ROW + 1):
        assert not list(job.all(JobFails))
        job.send(0)
        job.send(1, finite=False)
        told = list(job.all(Happened))[-1]
        assert (told.kind, told.data["in_a_row"], told.data["worker"]) == ("contribution_dropped", turn, 1)
    (failure,) = job.all(JobFails)
    assert (failure.kind, failure.worker) == ("non_finite", 1)
    assert f"worker 1 sent {MOST_NON_FINITE_IN_A_ROW} contributions in a row" in failure.message
    assert job.progress.dropped_samples == MOST_NON_FINITE_IN_A_ROW


def test_one_finite_contribution_ends_the_streak() -> None:
    job = Coordinator("local", 1)
    for _ in range(3):
        for _ in range(MOST_NON_FINITE_IN_A_ROW - 1):
            job.send(0, finite=False)
        job.send(0)
    assert not list(job.all(JobFails))


def test_what_comes_twice_or_from_another_life_is_counted_and_nothing_else() -> None:
    job = Coordinator("async", 1, shards=2)
    for shard in (0, 0, 1):
        job.hear(receipt(Key(0, 1, 1), shard=shard))
    assert len(decisions(job.outputs)) == 1
    for shard in (0, 1):
        assert not decisions(job.hear(receipt(Key(0, 1, 1), shard=shard)))
    for key in (Key(0, 0, 2), Key(0, 2, 2), Key(7, 1, 2)):
        assert not job.rounds.expects(key)
        assert job.hear(receipt(key)) == [Dropped(key.worker, "stale_incarnation")]
    assert [dropped.reason for dropped in job.all(Dropped)] == ["duplicate", *["stale_incarnation"] * 3]
    assert job.rounds.expects(Key(0, 1, 2))
    assert not job.rounds.expects(Key(0, 1, 1))


def test_a_lost_receipt_is_a_timeout_that_names_its_worker() -> None:
    job = Coordinator("local", 2, shards=2)
    for shard in (0, 1):
        job.hear(receipt(Key(0, 1, 1), shard=shard), now=5.0)
    job.hear(receipt(Key(1, 1, 1), shard=0), now=6.0)
    assert job.rounds.tick(now=15.0) == []
    (failure,) = job.rounds.tick(now=15.1)
    assert isinstance(failure, JobFails)
    assert (failure.kind, failure.worker) == ("timeout", 1)
    assert failure.message == "round 1 waited 10 s for worker 1 (not yet on parameter server 1)"


@pytest.mark.parametrize("mode", ["local", "sync", "async", "ssp"])
def test_a_shard_that_nothing_reaches_is_a_timeout_that_names_it(mode: Mode) -> None:
    """No contribution is ever complete, so that nobody waits for another one's."""
    job = Coordinator(mode, 3, shards=2, staleness=4)
    job.hear(receipt(Key(1, 1, 1), shard=0), now=5.0)
    job.hear(receipt(Key(0, 1, 1), shard=0), now=6.0)
    assert job.rounds.tick(now=15.0) == []
    (failure,) = job.rounds.tick(now=15.1)
    assert isinstance(failure, JobFails)
    partial = "worker 0 (not yet on parameter server 1), worker 1 (not yet on parameter server 1)"
    silent = "worker 2, " if mode in ("local", "sync") else ""
    assert failure.message == f"round 1 waited 10 s for {silent}{partial}"
    assert failure.worker == (2 if silent else 0)


def test_a_worker_held_too_long_in_ssp_names_the_slowest() -> None:
    job = Coordinator("ssp", 3, staleness=1)
    job.send(0, now=0.0)
    job.send(1, now=0.0)
    assert not notes(job.send(0, now=1.0))
    (failure,) = job.rounds.tick(now=20.0)
    assert isinstance(failure, JobFails)
    assert failure.worker == 2


def test_nobody_is_missed_while_nobody_waits() -> None:
    assert Coordinator("local", 3).rounds.tick(now=1e9) == []


def test_an_evaluating_worker_is_waited_for_once_it_would_miss_too_much() -> None:
    job = Coordinator("sync", 2, history_rounds=3)
    job.rounds.evaluating(1, 0.0)
    for round_number in range(3):
        (decision,) = decisions(job.send(0))
        assert decision.version == round_number + 1
        assert decision.keep_after == 0
    assert not decisions(job.send(0))
    assert job.rounds.missing() == [1]
    (fetched,) = decisions(job.send(1, "fetch"))
    assert fetched.keep_after is None
    assert not fetched.parts
    (decision,) = decisions(job.send(1, base_version=3))
    assert [part.key.worker for part in decision.parts] == [0, 1]


@pytest.mark.parametrize("mode", ["local", "ssp", "async"])
def test_an_evaluating_worker_is_never_waited_for_outside_sync_mode(mode: Mode) -> None:
    job = Coordinator(mode, 2, history_rounds=1)
    job.rounds.evaluating(1, 0.0)
    for _ in range(20):
        assert 0 in notes(job.send(0))


def test_a_worker_that_evaluated_comes_back_as_one_of_the_slowest() -> None:
    job = Coordinator("ssp", 3, staleness=2)
    job.rounds.evaluating(2, 0.0)
    for worker in (0, 1) * 5:
        assert worker in notes(job.send(worker))
    job.send(0)
    job.send(2, "fetch")
    assert job.rounds.members[2].clock == 5
    assert 0 in notes(job.send(0))
    assert 0 not in notes(job.send(0)), "three ahead of workers 1 and 2"
    assert 0 not in notes(job.send(1))
    assert notes(job.send(2)).keys() == {0, 2}


def test_the_last_one_out_is_known() -> None:
    job = Coordinator("local", 3)
    job.send(0)
    job.send(2)
    (decision,) = decisions(job.rounds.finish(1, 0.0))
    assert {reply.key.worker for reply in decision.replies} == {0, 2}
    job.rounds.finish(2, 0.0)
    assert job.rounds.training()
    job.rounds.finish(0, 0.0)
    assert not job.rounds.training()
    assert job.rounds.last_finished == 0
    assert notes(job.send(0, "fetch")).keys() == {0}


def test_staleness_counts_versions_between_base_and_merge() -> None:
    job = Coordinator("async", 3)
    for worker in (0, 1, 2):
        assert notes(job.send(worker))[worker].staleness == worker
    job.send(0, base_version=1)
    assert [stale.versions for stale in job.all(Stale)] == [0, 1, 2, 2]


def test_presence_is_whoever_has_a_gradient() -> None:
    job = Coordinator("sync", 3)
    job.send(0, present=b"\x01\x00")
    job.send(1, present=b"\x00\x80")
    (decision,) = decisions(job.send(2, present=b"\xff\xff", finite=False))
    assert decision.present == b"\x01\x80"


def test_spans_are_used_where_merged_and_lost_where_dropped() -> None:
    job = Coordinator("local", 2)
    kept, lost = ((Span(1, 0, 4),), (Span(2, 4, 8),))
    job.send(0, spans=kept)
    job.send(1, spans=lost, finite=False)
    assert list(job.all(Used)) == [Used(kept, lost)]
    assert decisions(job.outputs)[0].spans == kept


def test_steps_grow_by_the_longest_member_or_by_shares() -> None:
    job = Coordinator("local", 2)
    job.send(0, steps=8)
    assert notes(job.send(1, steps=3))[0].steps == 8
    job = Coordinator("async", 3)
    told = [notes(job.send(worker, steps=1))[worker].steps for worker in (0, 1, 2, 0, 1, 2)]
    assert told == [0, 0, 1, 1, 1, 2]


def test_a_stop_reaches_every_worker_with_its_answer() -> None:
    job = Coordinator("local", 2)
    job.progress.spec = job_spec(stop={"samples": 4})
    job.send(0, samples=2)
    assert {note.stop for note in notes(job.send(1, samples=1)).values()} == {""}
    job.send(0, samples=1)
    assert all("stop.samples" in note.stop for note in notes(job.send(1, samples=1)).values())


def test_one_worker_is_asked_to_evaluate_at_each_line() -> None:
    job = Coordinator("local", 3)
    job.progress.dataset_size = 10
    asked = []
    for _ in range(8):
        job.send(0, samples=1)
        job.send(1, samples=1)
        asked.append([w for w, note in notes(job.send(2, samples=1)).items() if note.evaluate])
    assert asked == [[], [], [], [0], [], [], [0], []]


def test_nobody_else_is_asked_while_one_evaluates() -> None:
    job = Coordinator("async", 2)
    job.progress.dataset_size = 1
    assert notes(job.send(0))[0].evaluate
    job.rounds.evaluating(0, 0.0)
    assert not notes(job.send(1))[1].evaluate
    job.send(0, "fetch")
    assert notes(job.send(1))[1].evaluate


def test_a_decision_is_the_same_after_the_wire() -> None:
    job = Coordinator("sync", 1)
    (decision,) = decisions(job.send(0, present=b"\x01", spans=(Span(1, 0, 4),)))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(decision), type=Decision)
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(decision)
