"""From leases to batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from cadenza.plane.messages import Leased, Span
from cadenza.training.data import Feed, Source, Used, permutation, source_of
from tests.unit.fake_link import FakeLink

GIVEN: dict[str, Any] = {"batch_size": None, "shuffle": None, "drop_last": None, "options": {}}


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def source(size: int, batch_size: int, **changes: Any) -> Source:
    return source_of(numbers(size), **(GIVEN | {"batch_size": batch_size, "shuffle": False} | changes))


def read(runs: list[Leased], source: Source) -> list[tuple[list[int], Used]]:
    link = FakeLink()
    link.runs.extend(runs)
    return [(batch[0].tolist(), used) for batch, used in Feed(link, source, 1)]


# --- order ---


def test_an_epochs_order_is_a_permutation_that_seed_and_epoch_fix() -> None:
    order = permutation(3, 1, 50)
    assert sorted(order) == list(range(50))
    assert np.array_equal(order, permutation(3, 1, 50))
    assert not np.array_equal(order, permutation(3, 2, 50))
    assert not np.array_equal(order, permutation(4, 1, 50))


def test_an_epochs_order_never_changes_between_releases() -> None:
    assert permutation(0, 0, 8).tolist() == [2, 4, 3, 6, 5, 0, 1, 7]
    assert permutation(2**63 - 1, 5, 4).tolist() == [3, 1, 0, 2]


# --- batches ---


def test_batches_follow_the_leases_and_never_mix_two() -> None:
    runs = [Leased(1, 0, 0, 5, 0), Leased(2, 0, 8, 10, 0)]
    assert read(runs, source(10, 4)) == [
        ([0, 1, 2, 3], Used(Span(1, 0, 4), 4)),
        ([4], Used(Span(1, 4, 5), 1)),
        ([8, 9], Used(Span(2, 8, 10), 2)),
    ]


def test_shuffled_positions_are_looked_up_in_their_epochs_order() -> None:
    runs = [Leased(1, 0, 0, 4, 9), Leased(2, 1, 4, 8, 9), Leased(3, 0, 4, 8, 9)]
    got = [batch for batch, _ in read(runs, source(8, 4, shuffle=True))]
    first, second = permutation(9, 0, 8), permutation(9, 1, 8)
    assert got == [first[:4].tolist(), second[4:].tolist(), first[4:].tolist()]


def test_short_tails_are_skipped_but_told_of_with_drop_last() -> None:
    link = FakeLink()
    link.runs.extend([Leased(1, 0, 0, 5, 0), Leased(2, 0, 5, 8, 0)])
    feed = Feed(link, source(8, 4, drop_last=True), 1)
    assert [used.span for _, used in feed] == [Span(1, 0, 4)]
    assert feed.skipped() == [Span(1, 4, 5), Span(2, 5, 8)]
    assert feed.skipped() == []


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_is_used_stays_exact_when_workers_read_ahead(num_workers: int) -> None:
    runs = [Leased(number, 0, 3 * number, 3 * number + 3, 0) for number in range(8)]
    got = read(runs, source(24, 2, options={"num_workers": num_workers}))
    assert [batch for batch, _ in got] == [list(range(used.span.start, used.span.stop)) for _, used in got]
    assert len(got) == 16


def test_collate_fn_and_the_loaders_other_settings_are_passed_on() -> None:
    link = FakeLink()
    link.runs.append(Leased(1, 0, 0, 2, 0))
    feed = Feed(link, source(2, 2, options={"collate_fn": lambda items: len(items), "num_workers": None}), 1)
    assert [batch for batch, _ in feed] == [2]


# --- what may be given ---


def test_a_ready_loader_is_taken_over() -> None:
    data = numbers(6)
    loader = DataLoader(data, batch_size=3, shuffle=True, drop_last=True, num_workers=1, collate_fn=len)
    taken = source_of(loader, **GIVEN)
    assert (taken.dataset, taken.size, taken.batch_size, taken.shuffle, taken.drop_last) == (
        data,
        6,
        3,
        True,
        True,
    )
    assert taken.options["collate_fn"] is len
    assert taken.options["num_workers"] == 1
    assert not source_of(DataLoader(data, batch_size=3), **GIVEN).shuffle


def test_nothing_may_be_given_beside_a_ready_loader() -> None:
    with pytest.raises(ValueError, match="shuffle was given beside a ready DataLoader"):
        source_of(DataLoader(numbers(4)), **(GIVEN | {"shuffle": True}))


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 4, 4),
        RandomSampler(numbers(4), replacement=True),
        RandomSampler(numbers(4), num_samples=2),
        DistributedSampler(numbers(4), num_replicas=2, rank=0),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_that_leases_cannot_follow_is_refused(sampler: Any) -> None:
    with pytest.raises(ValueError, match=f"sampler, a {type(sampler).__name__}, .*shuffle=True or False"):
        source_of(DataLoader(numbers(4), sampler=sampler), **GIVEN)


def test_a_loader_without_batches_of_one_size_is_refused() -> None:
    for loader in (
        DataLoader(numbers(4), batch_size=None),
        DataLoader(numbers(4), batch_sampler=[[0, 1], [2]]),
    ):
        with pytest.raises(
            ValueError, match=r"batch_sampler of its own or none; give session.batches the dataset"
        ):
            source_of(loader, **GIVEN)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(1)])


class Unsized(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)


@pytest.mark.parametrize(
    "data", [Stream(), Unsized(), DataLoader(Stream())], ids=["stream", "unsized", "loader"]
)
def test_data_without_positions_is_refused_with_the_way_out(data: Any) -> None:
    given = GIVEN if isinstance(data, DataLoader) else GIVEN | {"batch_size": 1}
    with pytest.raises(TypeError, match=r"cannot be leased.*session.step\(loss, samples=n\)"):
        source_of(data, **given)


def test_an_empty_dataset_and_a_missing_batch_size_are_refused() -> None:
    with pytest.raises(ValueError, match="the dataset is empty"):
        source(0, 1)
    with pytest.raises(ValueError, match="batch_size is None"):
        source_of(numbers(3), **GIVEN)
    with pytest.raises(ValueError, match="batch_size is 0"):
        source(3, 0)
