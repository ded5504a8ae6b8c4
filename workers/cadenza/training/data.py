"""From leases to batches: which samples this worker trains on, through torch's DataLoader.

The job's coordinator hands out runs of positions in each epoch's order; this module turns them into batches
and remembers which positions each batch used, however far a DataLoader's workers read ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from cadenza.plane.link import Link
from cadenza.plane.messages import Lease, Leased, Span


def permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """The order of an epoch's samples: the same on every worker and machine. Shape [size]."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size)


@dataclass(frozen=True)
class Source:
    """A dataset and how to make batches of it."""

    dataset: Dataset[Any]
    size: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    options: dict[str, Any]
    """What else DataLoader is given."""


@dataclass(frozen=True)
class Used:
    """What one batch used up."""

    span: Span
    samples: int


def source_of(
    data: Dataset[Any] | DataLoader[Any],
    *,
    batch_size: int | None,
    shuffle: bool | None,
    drop_last: bool | None,
    options: dict[str, Any],
) -> Source:
    """Check what ``session.batches`` was given. ``None`` means not given.

    Raises:
        TypeError: the data has no length or no positions.
        ValueError: arguments contradict each other, or a ready loader samples in a way that leases cannot follow.
    """
    if isinstance(data, DataLoader):
        given = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last, **options}
        return _source_of_loader(data, [name for name, value in given.items() if value is not None])
    size = _size(data)
    if batch_size is None or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give session.batches the samples per batch, 1 or more")
    given = {name: value for name, value in options.items() if value is not None}
    return Source(data, size, batch_size, shuffle is not False, bool(drop_last), given)


def _source_of_loader(loader: DataLoader[Any], given: list[str]) -> Source:
    if given:
        raise ValueError(
            f"{given[0]} was given beside a ready DataLoader, which has its own; give it to the DataLoader"
        )
    size = _size(loader.dataset)
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            "the DataLoader makes its batches by a batch_sampler of its own or none; give session.batches the dataset "
            "and a batch_size instead"
        )
    options: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "prefetch_factor": loader.prefetch_factor,
        "multiprocessing_context": loader.multiprocessing_context,
    }
    return Source(loader.dataset, size, loader.batch_size, _shuffles(loader), loader.drop_last, options)


def _shuffles(loader: DataLoader[Any]) -> bool:
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler and not sampler.replacement:
        size = len(cast(Sized, loader.dataset))
        if sampler.num_samples == size:
            return True
    raise ValueError(
        f"the DataLoader's sampler, a {type(sampler).__name__}, chooses samples in a way that leases cannot follow; leases "
        "already share the samples out among the workers: use shuffle=True or False, or your own loop with "
        "session.step(loss, samples=n)"
    )


def _size(dataset: Any) -> int:
    countable = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not countable:
        raise TypeError(
            f"{type(dataset).__name__} has no length or no positions, so its samples cannot be leased; write your own "
            "loop over it and call session.step(loss, samples=n), n being the samples in the batch"
        )
    if not len(dataset):
        raise ValueError("the dataset is empty")
    return len(dataset)


class Feed:
    """The batches of this worker, one after another, each with what it used up."""

    def __init__(self, link: Link, source: Source, epochs: int) -> None:
        self._sampler = LeasedBatches(link, source, epochs)
        self._loader: DataLoader[Any] = DataLoader(
            source.dataset, batch_sampler=cast(Any, self._sampler), **source.options
        )

    def __iter__(self) -> Iterator[tuple[Any, Used]]:
        for batch in self._loader:
            yield batch, self._sampler.used.popleft()

    def skipped(self) -> list[Span]:
        """Spans that no batch will use, since the latest call: short tails where ``drop_last`` asked for that."""
        skipped, self._sampler.skipped = self._sampler.skipped, []
        return skipped


class LeasedBatches:
    """A batch sampler that asks for leases as they are needed. A batch never mixes two leases."""

    def __init__(self, link: Link, source: Source, epochs: int) -> None:
        self.used: deque[Used] = deque()
        """For each batch that was handed to the loader and not yet taken from it, oldest first."""
        self.skipped: list[Span] = []
        self._link = link
        self._source = source
        self._request = Lease(source.size, source.batch_size, source.shuffle, epochs, source.drop_last)
        self._order: tuple[tuple[int, int], NDArray[np.int64]] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        # Called by the loader on the training thread, also where its workers load the samples.
        while isinstance(lease := self._link.lease(self._request), Leased):
            yield from self._batches(lease)

    def _batches(self, lease: Leased) -> Iterator[list[int]]:
        step = self._source.batch_size
        for start in range(lease.start, lease.stop, step):
            stop = min(start + step, lease.stop)
            span = Span(lease.lease, start, stop)
            if self._source.drop_last and stop - start < step:
                self.skipped.append(span)
                continue
            self.used.append(Used(span, stop - start))
            yield self._samples(lease, start, stop)

    def _samples(self, lease: Leased, start: int, stop: int) -> list[int]:
        if not self._source.shuffle:
            return list(range(start, stop))
        epoch = (lease.seed, lease.epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(*epoch, self._source.size))
        return cast(list[int], self._order[1][start:stop].tolist())
