"""Rounds that are answered group by group: random arrivals, against what has to hold whatever comes first."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.plane.messages import Decision, Key, Received, RequestKind, Tentative
from cadenza.spec import Mode
from cadenza_service.coordination.progress import TrainingProgress
from cadenza_service.coordination.rounds import Dropped, JobFails, Output, RoundRules, Rounds
from tests.harness import job_spec


def receipt(key: Key, kind: RequestKind = "update", **fields: Any) -> Received:
    values: dict[str, Any] = {"shard": 0, "group": 0, "samples": 1, "finite": True, **fields}
    return Received(
        key=key,
        kind=kind,
        base_version=0,
        steps=1,
        loss=None,
        present=b"",
        spans=(),
        reason="",
        **values,
    )


def rounds_of(mode: Mode, workers: int, *, shards: int = 1, groups: int = 2, staleness: int = 0) -> Rounds:
    rules = RoundRules(mode, 1, staleness, 1, shards, 60.0, groups)
    rounds = Rounds(rules, TrainingProgress(job_spec()))
    for worker in range(workers):
        rounds.join(worker, 1)
    rounds.start()
    return rounds


class Watch:
    """Hears a job's receipts in random order and keeps what the entries of the log have to obey."""

    def __init__(self, mode: Mode, seed: int, workers: int, shards: int, groups: int) -> None:
        self.chance = Random(seed)
        self.workers = workers
        self.rounds = rounds_of(mode, workers, shards=shards, groups=groups)
        self.index = 0
        self.bad: set[Key] = set()
        """Contributions of which a value that is not finite is known to be in."""
        self.mergeable: set[Key] = set()
        self.early: dict[int, tuple[Any, ...]] = {}
        self.tentatives = 0

    def requests(self, number: int) -> list[Received]:
        """One request of each worker, as receipts of all shards."""
        receipts = []
        for worker in range(self.workers):
            key = Key(worker, 1, number)
            kind: RequestKind = self.chance.choices(["update", "abstain"], [8, 1])[0]  # type: ignore[assignment]
            samples = self.chance.choice([0, 1, 1, 2, 5])
            groups = self.rounds.rules.groups if kind == "update" else 1
            finite = {
                (shard, group): kind != "update" or self.chance.random() > 0.05
                for shard in range(self.rounds.rules.shards)
                for group in range(groups)
            }
            if kind == "update" and samples and all(finite.values()):
                self.mergeable.add(key)
            receipts += [
                receipt(key, kind, shard=shard, group=group, samples=samples, finite=good)
                for (shard, group), good in finite.items()
            ]
        self.chance.shuffle(receipts)
        return receipts

    def hear(self, message: Received) -> list[Decision]:
        if not message.finite:
            self.bad.add(message.key)
        return self.check(self.rounds.received(message, 0.0))

    def check(self, outputs: list[Output]) -> list[Decision]:
        decisions = []
        for entry in outputs:
            assert not isinstance(entry, JobFails)
            if isinstance(entry, Tentative):
                self.index += 1
                assert entry.index == self.index
                assert entry.group not in self.early
                assert not self.early or set(self.early.values()) == {entry.parts}
                assert not self.bad & {part.key for part in entry.parts}
                self.early[entry.group] = entry.parts
                self.tentatives += 1
            if isinstance(entry, Decision):
                self.index += 1
                assert entry.index == self.index
                assert {part.key for part in entry.parts} == {
                    reply.key for reply in entry.replies
                } & self.mergeable
                self.early = {}
                decisions.append(entry)
        return decisions


@pytest.mark.parametrize("mode", ["sync", "local"])
@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    workers=st.integers(1, 4),
    shards=st.integers(1, 3),
    groups=st.integers(1, 5),
)
def test_every_round_is_answered_once_and_decided_once_whatever_comes_first(
    mode: Mode, seed: int, workers: int, shards: int, groups: int
) -> None:
    watch = Watch(mode, seed, workers, shards, groups)
    for number in range(1, 6):
        decisions = []
        heard: list[Received] = []
        for message in watch.requests(number):
            heard.append(message)
            decisions += watch.hear(message)
            if watch.chance.random() < 0.1:
                decisions += watch.hear(watch.chance.choice(heard))  # It comes again.
        (decision,) = decisions
        assert [reply.key for reply in decision.replies] == [
            Key(worker, 1, number) for worker in range(workers)
        ]
        assert decision.round == number
        if groups == 1:
            assert not watch.tentatives


def test_most_groups_are_answered_early_when_updates_come_in_order() -> None:
    rounds = rounds_of("local", 2, shards=2, groups=4)
    told = []
    for group in range(4):
        for shard in range(2):
            for worker in range(2):
                outputs = rounds.received(receipt(Key(worker, 1, 1), shard=shard, group=group), 0.0)
                told += [
                    (entry.group, (group, shard, worker)) for entry in outputs if isinstance(entry, Tentative)
                ]
    assert told == [(group, (group, 1, 1)) for group in range(3)]


@pytest.mark.parametrize(("mode", "staleness"), [("ssp", 2), ("async", 0)])
def test_without_a_barrier_nothing_is_answered_early(mode: Mode, staleness: int) -> None:
    rounds = rounds_of(mode, 1, groups=2, staleness=staleness)
    assert rounds.received(receipt(Key(0, 1, 1)), 0.0) == []
    outputs = rounds.received(receipt(Key(0, 1, 1), group=1), 0.0)
    assert any(isinstance(entry, Decision) for entry in outputs)


def test_after_something_not_finite_no_group_is_answered_early_and_the_decision_is_without_it() -> None:
    rounds = rounds_of("local", 2, groups=4)
    outputs: list[Output] = []
    for group in range(4):
        outputs += rounds.received(receipt(Key(0, 1, 1), group=group, samples=3), 0.0)
    outputs += rounds.received(receipt(Key(1, 1, 1), group=0), 0.0)
    outputs += rounds.received(receipt(Key(1, 1, 1), group=1, finite=False), 0.0)
    outputs += rounds.received(receipt(Key(1, 1, 1), group=2), 0.0)
    (early,) = [entry for entry in outputs if isinstance(entry, Tentative)]
    assert (early.group, [part.weight for part in early.parts]) == (0, [0.75, 0.25])
    outputs = rounds.received(receipt(Key(1, 1, 1), group=3), 0.0)
    (decision,) = [entry for entry in outputs if isinstance(entry, Decision)]
    assert [(part.key.worker, part.weight) for part in decision.parts] == [(0, 1.0)]
    assert Dropped(1, "non_finite") in outputs


def test_a_worker_that_finishes_in_the_middle_leaves_the_rest_to_the_decision() -> None:
    rounds = rounds_of("local", 3, groups=2)
    outputs: list[Output] = []
    for worker in range(2):
        outputs += rounds.received(receipt(Key(worker, 1, 1)), 0.0)
    assert outputs == []
    assert rounds.finish(2, 0.0) == []
    outputs = rounds.received(receipt(Key(0, 1, 1), group=1), 0.0)
    outputs += rounds.received(receipt(Key(1, 1, 1), group=1), 0.0)
    kinds = Counter(type(entry).__name__ for entry in outputs)
    assert kinds["Decision"] == 1
    (decision,) = [entry for entry in outputs if isinstance(entry, Decision)]
    assert [part.key.worker for part in decision.parts] == [0, 1]


def test_an_evaluating_worker_that_comes_back_changes_the_parts_and_stops_early_answers() -> None:
    rounds = rounds_of("local", 2, groups=3)
    rounds.evaluating(1, 0.0)
    early = rounds.received(receipt(Key(0, 1, 1), group=0), 0.0)
    assert [type(entry).__name__ for entry in early] == ["Tentative"]
    outputs: list[Output] = []
    for group in range(3):
        outputs += rounds.received(receipt(Key(1, 1, 1), group=group), 0.0)
    assert not [entry for entry in outputs if isinstance(entry, Tentative)]
    outputs = rounds.received(receipt(Key(0, 1, 1), group=1), 0.0)
    outputs += rounds.received(receipt(Key(0, 1, 1), group=2), 0.0)
    (decision,) = [entry for entry in outputs if isinstance(entry, Decision)]
    assert [part.key.worker for part in decision.parts] == [0, 1]
    assert not [entry for entry in outputs if isinstance(entry, Tentative)]
