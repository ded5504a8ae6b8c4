"""Data leases: whatever happens, each position of each epoch is used up once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cadenza.plane.messages import Span
from cadenza_service.coordination.ledger import MOST_BATCHES, Dataset, DatasetMismatch, Grant, Ledger

WORKERS = 3


def ledger_of(size: int, batch_size: int = 4, epochs: int = 1, *, drop_last: bool = False) -> Ledger:
    ledger = Ledger()
    ledger.declare(Dataset(size, batch_size, True, epochs, drop_last), worker=0)
    return ledger


def granted(ledger: Ledger, worker: int = 0, workers: int = 1) -> Grant:
    grant = ledger.lease(worker, workers)
    assert grant is not None
    return grant


class Leasing(RuleBasedStateMachine):
    """Workers lease, contribute, abstain and vanish in any order; a model keeps the books."""

    @initialize(
        size=st.integers(0, 90), batch=st.integers(1, 9), epochs=st.integers(1, 3), in_step=st.booleans()
    )
    def begin(self, size: int, batch: int, epochs: int, in_step: bool) -> None:
        self.in_step = in_step
        self.ledger = ledger_of(size, batch, epochs)
        self.batch = batch
        self.everything = {(epoch, position) for epoch in range(epochs) for position in range(size)}
        self.held: dict[int, tuple[int, Grant, int]] = {}
        """By lease: worker, the grant, and the first position that is not used."""
        self.merged: Counter[tuple[int, int]] = Counter()
        self.dropped: Counter[tuple[int, int]] = Counter()

    @rule(worker=st.integers(0, WORKERS - 1), others=st.sets(st.integers(0, WORKERS - 1)))
    def lease(self, worker: int, others: set[int]) -> None:
        in_step = sorted(others) if self.in_step else []
        grant = self.ledger.lease(worker, WORKERS, in_step=in_step)
        if grant is None:
            # In step, others may have been given some of it without having asked for it yet.
            assert self.in_step or self.used() | self.leased() == self.everything
            return
        positions = {(grant.epoch, position) for position in range(grant.start, grant.stop)}
        assert positions
        assert positions <= self.everything
        assert not positions & (self.used() | self.leased())
        self.held[grant.lease] = (worker, grant, grant.start)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), merged=st.booleans())
    def contribute(self, data: st.DataObject, merged: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held)))
        worker, grant, begin = self.held[lease]
        end = data.draw(st.integers(begin, min(grant.stop, begin + 2 * self.batch)))
        spans = (Span(lease, begin, end),)
        self.ledger.check(worker, spans)
        (self.ledger.commit if merged else self.ledger.drop)(spans)
        (self.merged if merged else self.dropped).update((grant.epoch, p) for p in range(begin, end))
        self.held[lease] = (worker, grant, end)
        if end == grant.stop:
            del self.held[lease]

    @rule(worker=st.integers(0, WORKERS - 1))
    def vanish(self, worker: int) -> None:
        mine = {lease: entry for lease, entry in self.held.items() if entry[0] == worker}
        unused = sum(grant.stop - begin for _, grant, begin in mine.values())
        assert self.ledger.release(worker) == unused
        for lease in mine:
            del self.held[lease]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), before=st.integers(0, 5), after=st.integers(0, 5))
    def overreach(self, data: st.DataObject, before: int, after: int) -> None:
        lease = data.draw(st.sampled_from(sorted(self.held)))
        worker, grant, _ = self.held[lease]
        spans = (Span(lease, grant.start - before, grant.stop + after),)
        if before or after:
            with pytest.raises(ValueError, match="not part of an open lease"):
                self.ledger.check(worker, spans)
        with pytest.raises(ValueError, match="not part of an open lease"):
            self.ledger.check(worker + 1, (Span(lease, grant.start, grant.stop),))

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.committed == self.merged.total()
        assert self.ledger.dropped == self.dropped.total()
        assert self.ledger.outstanding() == len(self.leased())
        assert self.ledger.unused() == len(self.everything - self.used())

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for worker in range(WORKERS):
            self.vanish(worker)
        while (grant := self.ledger.lease(0, 1)) is not None:
            self.ledger.commit((Span(grant.lease, grant.start, grant.stop),))
            self.merged.update((grant.epoch, position) for position in range(grant.start, grant.stop))
        assert self.merged + self.dropped == Counter(self.everything)
        assert self.ledger.unused() == self.ledger.outstanding() == 0

    def used(self) -> set[tuple[int, int]]:
        return set(self.merged) | set(self.dropped)

    def leased(self) -> set[tuple[int, int]]:
        return {
            (grant.epoch, position)
            for _, grant, begin in self.held.values()
            for position in range(begin, grant.stop)
        }


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@settings(deadline=None)
@given(size=st.integers(1, 5_000), batch=st.integers(1, 64), workers=st.integers(1, 40))
def test_runs_are_whole_batches_that_never_grow_and_end_small(size: int, batch: int, workers: int) -> None:
    ledger = ledger_of(size, batch)
    lengths = []
    while (grant := ledger.lease(0, workers)) is not None:
        lengths.append(grant.stop - grant.start)
    assert sum(lengths) == size
    assert all(length % batch == 0 for length in lengths[:-1])
    assert max(lengths) <= MOST_BATCHES * batch
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] <= batch


def test_a_span_used_twice_counts_once() -> None:
    ledger = ledger_of(100)
    grant = granted(ledger)
    ledger.commit((Span(grant.lease, 0, 8), Span(grant.lease, 4, 12)))
    ledger.drop((Span(grant.lease, 0, 16),))
    assert (ledger.committed, ledger.dropped) == (12, 4)


def test_one_contribution_may_use_a_lease_up_and_name_it_again() -> None:
    ledger = ledger_of(8, 8)
    grant = granted(ledger)
    ledger.commit((Span(grant.lease, 0, 8), Span(grant.lease, 0, 8)))
    assert ledger.committed == 8


def test_a_lease_is_closed_once_it_is_used_up_or_given_back() -> None:
    ledger = ledger_of(100)
    first, second = granted(ledger, worker=0), granted(ledger, worker=1)
    ledger.commit((Span(first.lease, first.start, first.stop),))
    ledger.release(1)
    for worker, lease in enumerate((first, second)):
        with pytest.raises(ValueError, match=f"open lease {lease.lease} of worker {worker}"):
            ledger.check(worker, (Span(lease.lease, lease.start, lease.start + 1),))


def test_what_was_given_back_is_leased_before_anything_new() -> None:
    ledger = ledger_of(100)
    lost = granted(ledger, worker=0)
    ledger.commit((Span(lost.lease, lost.start, lost.start + 4),))
    ledger.release(0)
    again = granted(ledger, worker=1)
    assert (again.epoch, again.start, again.stop) == (lost.epoch, lost.start + 4, lost.stop)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Dataset(9, 4, True, 2, False), "size 9 instead of 8"),
        (Dataset(8, 5, True, 2, False), "batch_size 5 instead of 4"),
        (Dataset(8, 4, False, 2, False), "shuffle False instead of True"),
        (Dataset(8, 4, True, 3, False), "epochs 3 instead of 2"),
        (Dataset(8, 4, True, 2, True), "drop_last True instead of False"),
    ],
)
def test_a_dataset_that_differs_is_refused_naming_worker_and_field(other: Dataset, says: str) -> None:
    ledger = ledger_of(8, 4, 2)
    ledger.declare(Dataset(8, 4, True, 2, False), worker=1)
    with pytest.raises(DatasetMismatch, match=f"worker 2 .* {says}"):
        ledger.declare(other, worker=2)


def test_an_empty_dataset_has_nothing_to_lease() -> None:
    ledger = ledger_of(0, epochs=3)
    assert ledger.lease(0, 1) is None
    assert ledger.unused() == 0


# --- in step ---

Piece = tuple[int, int, int]


def dealt(
    order: list[int], in_step: list[int], size: int, batch_size: int = 4, epochs: int = 1
) -> dict[int, list[Piece]]:
    """What each worker gets if they ask in this order, again and again until all is handed out."""
    ledger = ledger_of(size, batch_size, epochs)
    got: dict[int, list[Piece]] = {worker: [] for worker in order}
    asking = list(order)
    while asking:
        for worker in list(asking):
            grant = ledger.lease(worker, len(got), in_step=in_step)
            if grant is None:
                asking.remove(worker)
            else:
                got[worker].append((grant.epoch, grant.start, grant.stop))
    return got


def batches(pieces: list[Piece], batch_size: int) -> int:
    return sum(-(-(stop - start) // batch_size) for _, start, stop in pieces)


@settings(deadline=None)
@given(
    order=st.permutations(range(4)),
    size=st.integers(1, 600),
    batch=st.integers(1, 9),
    epochs=st.integers(1, 4),
)
def test_in_step_it_does_not_matter_who_asks_first(
    order: list[int], size: int, batch: int, epochs: int
) -> None:
    everyone = [0, 1, 2, 3]
    expected = dealt(everyone, everyone, size=size, batch_size=batch, epochs=epochs)
    assert dealt(order, everyone, size=size, batch_size=batch, epochs=epochs) == expected
    took = [batches(pieces, batch) for pieces in expected.values()]
    assert max(took) - min(took) <= MOST_BATCHES
    assert sum(stop - start for pieces in expected.values() for _, start, stop in pieces) == size * epochs


def test_out_of_step_who_asks_first_is_served_first() -> None:
    assert dealt([1, 0], [], size=64)[1][0] == dealt([0, 1], [], size=64)[0][0] == (0, 0, 16)


def test_one_that_was_away_is_not_given_all_the_next_runs() -> None:
    ledger = ledger_of(4_000)
    for worker in [0, 1] * 20:
        assert ledger.lease(worker, 3, in_step=[0, 1]) is not None
    got: Counter[int] = Counter()
    while (grant := ledger.lease(0, 3, in_step=[0, 1, 2])) is not None:
        got[0] += grant.stop - grant.start
    while (grant := ledger.lease(2, 3, in_step=[0, 1, 2])) is not None:
        got[2] += grant.stop - grant.start
    assert abs(got[0] - got[2]) <= 2 * MOST_BATCHES * 4


def test_what_was_meant_for_a_worker_that_ends_goes_to_the_others() -> None:
    ledger = ledger_of(8)
    first = ledger.lease(1, 2, in_step=[0, 1])
    assert first is not None
    assert (first.start, first.stop) == (4, 8)
    assert ledger.release(0) == 0
    rest = ledger.lease(1, 1, in_step=[1])
    assert rest is not None
    assert (rest.start, rest.stop) == (0, 4)
