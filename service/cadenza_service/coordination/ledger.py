"""The ledger of data leases: who may train on which samples, and what became of them. Pure: no clock, no socket.

A job's dataset is gone through ``epochs`` times, each in an order that seed and epoch fix. Workers lease
runs of positions in that order; the positions that a committed contribution used up count once. Runs are
large at first and shrink to one batch at an epoch's end (guided self-scheduling), so that the workers finish
at about the same time whatever their speeds.

Behind a barrier all workers take equally many batches, so it is known beforehand who will need the next run:
the one that was given least. There runs are dealt in that order, not in the order in which the workers happen
to ask, and the same job trains on the same batches again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cadenza.plane.messages import Span

MOST_BATCHES = 8
"""Batches in one lease at most: a lease is a round trip to the coordinator, and what a lost worker may hold."""


class DatasetMismatch(Exception):
    """A worker's dataset differs from what the others gave."""


_Piece = tuple[int, int, int]
"""Epoch, start, stop."""


@dataclass
class _Run:
    """A leased run of positions of one epoch, and the parts of it that were used up."""

    worker: int
    epoch: int
    start: int
    stop: int
    used: list[tuple[int, int]] = field(default_factory=list)

    def unused(self) -> list[tuple[int, int]]:
        """The rest, in order."""
        rest, at = [], self.start
        for start, stop in sorted(self.used):
            if start > at:
                rest.append((at, start))
            at = max(at, stop)
        if at < self.stop:
            rest.append((at, self.stop))
        return rest

    def left(self) -> int:
        """How many positions were not used up."""
        return sum(stop - start for start, stop in self.unused())


@dataclass(frozen=True)
class Dataset:
    """What every worker must say alike."""

    size: int
    batch_size: int
    shuffle: bool
    epochs: int
    drop_last: bool

    def difference(self, other: Dataset) -> str:
        """The first field in which ``other`` differs, for an error text."""
        for name in ("size", "batch_size", "shuffle", "epochs", "drop_last"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} {theirs} instead of {mine}"
        return ""


@dataclass(frozen=True)
class Grant:
    """A new lease."""

    lease: int
    epoch: int
    start: int
    stop: int


class Ledger:
    """All leases of one attempt of a job."""

    def __init__(self) -> None:
        self.dataset: Dataset | None = None
        self.epoch = 0
        """The epoch that is being handed out."""
        self.committed = 0
        """Positions that committed contributions used up, over all epochs."""
        self.dropped = 0
        """Positions of contributions that were dropped; they are never leased again."""
        self._next = 0
        self._runs: dict[int, _Run] = {}
        self._count = 0
        self._returned: list[_Piece] = []
        self._dealt: defaultdict[int, deque[_Piece]] = defaultdict(deque)
        """Runs that are meant for a worker which has not asked for them yet; by worker."""
        self._batches: defaultdict[int, int] = defaultdict(int)
        """How many batches each worker in step was given."""
        self._in_step: frozenset[int] = frozenset()

    def declare(self, dataset: Dataset, worker: int) -> None:
        """A worker names its dataset; raises DatasetMismatch if another gave a different one."""
        if self.dataset is None:
            self.dataset = dataset
        elif self.dataset != dataset:
            raise DatasetMismatch(
                f"worker {worker} asks for batches of a dataset with {self.dataset.difference(dataset)}; "
                "every worker must give session.batches the same dataset and arguments"
            )

    def lease(self, worker: int, workers: int, *, in_step: Sequence[int] = ()) -> Grant | None:
        """The next run for ``worker`` of ``workers``; none when all epochs are handed out.

        Args:
            worker: who asks.
            workers: how many still train, which sets how large runs are.
            in_step: those that take equally many batches; none where whoever asks first is served first.
        """
        assert self.dataset is not None, "declare comes first"
        own = self._dealt[worker]
        while not own:
            piece = self._next_piece(workers)
            if piece is None:
                return None
            self._dealt[self._taker(in_step, piece) if worker in in_step else worker].append(piece)
        return self._grant(worker, *own.popleft())

    def check(self, worker: int, spans: tuple[Span, ...]) -> None:
        """Raises ValueError unless all of ``spans`` are part of leases that ``worker`` holds."""
        for span in spans:
            run = self._runs.get(span.lease)
            if run is None or run.worker != worker or not run.start <= span.start <= span.stop <= run.stop:
                raise ValueError(
                    f"positions {span.start} to {span.stop} are not part of an open lease {span.lease} of worker {worker}"
                )

    def commit(self, spans: tuple[Span, ...]) -> None:
        """Contributions with these spans, which :meth:`check` let pass, were merged."""
        self.committed += self._use(spans)

    def drop(self, spans: tuple[Span, ...]) -> None:
        """Contributions with these spans were dropped for good."""
        self.dropped += self._use(spans)

    def release(self, worker: int) -> int:
        """Take back what ``worker`` holds unused; returns how many positions that is."""
        back = 0
        self._returned += self._dealt.pop(worker, ())
        for lease in [lease for lease, run in self._runs.items() if run.worker == worker]:
            run = self._runs.pop(lease)
            for start, stop in run.unused():
                self._returned.append((run.epoch, start, stop))
                back += stop - start
        return back

    def outstanding(self) -> int:
        """Positions that are leased and neither committed nor dropped."""
        return sum(run.left() for run in self._runs.values())

    def unused(self) -> int:
        """Positions that were never used, over all epochs."""
        if self.dataset is None:
            return 0
        return self.dataset.size * self.dataset.epochs - self.committed - self.dropped

    def _next_piece(self, workers: int) -> _Piece | None:
        assert self.dataset is not None
        if self._returned:
            return self._returned.pop(0)
        if self._next >= self.dataset.size:
            self.epoch, self._next = self.epoch + 1, 0
        if self.epoch >= self.dataset.epochs or self.dataset.size == 0:
            self.epoch = min(self.epoch, max(self.dataset.epochs - 1, 0))
            self._next = self.dataset.size
            return None
        start = self._next
        self._next = min(start + self._run_length(workers), self.dataset.size)
        return self.epoch, start, self._next

    def _taker(self, workers: Sequence[int], piece: _Piece) -> int:
        """Who of the workers in step gets the piece: the one that was given least, and of equals the first."""
        assert self.dataset is not None
        given = self._batches
        least = min((given[worker] for worker in workers if worker in self._in_step), default=0)
        for worker in workers:
            # One that was away meanwhile is not behind the others: it takes as much as they do from now on.
            if worker not in self._in_step:
                given[worker] = max(given[worker], least)
        self._in_step = frozenset(workers)
        taker = min(workers, key=lambda worker: (given[worker], worker))
        _, start, stop = piece
        given[taker] += -(-(stop - start) // self.dataset.batch_size)
        return taker

    def _run_length(self, workers: int) -> int:
        assert self.dataset is not None
        batch = self.dataset.batch_size
        fair = (self.dataset.size - self._next) // (2 * max(workers, 1) * batch)
        return batch * max(1, min(fair, MOST_BATCHES))

    def _grant(self, worker: int, epoch: int, start: int, stop: int) -> Grant:
        self._count += 1
        self._runs[self._count] = _Run(worker, epoch, start, stop)
        return Grant(self._count, epoch, start, stop)

    def _use(self, spans: tuple[Span, ...]) -> int:
        runs = {span.lease: self._runs[span.lease] for span in spans}
        before = sum(run.left() for run in runs.values())
        for span in spans:
            runs[span.lease].used.append((span.start, span.stop))
        for lease, run in runs.items():
            if not run.left():
                del self._runs[lease]
        return before - sum(run.left() for run in runs.values())
