"""What a training loop talks to: local steps, and the rounds in which workers come together.

``with cadenza.join(model, optimizer) as session:`` wraps one model and its optimizer. docs/training.md tells how
to use it, docs/protocol.md what travels.
"""

from __future__ import annotations

import enum
import operator
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from cadenza.plane.link import Link
from cadenza.plane.messages import Joined, Notice
from cadenza.training import context
from cadenza.training.data import Feed, Used, source_of
from cadenza.training.ensemble import Ensemble
from cadenza.training.flat import FlatModel
from cadenza.training.inventory import BufferPolicy
from cadenza.training.schedule import Schedule, Scheduler
from cadenza.training.solo import SoloLink, show_reports
from cadenza.training.stepping import Averaged, Stepper, check_optimizer

Style = Literal["step", "stepped"]
"""Who steps the optimizer: the session, or the user's own loop."""


class Phase(enum.Enum):
    """A session's life."""

    JOINED = enum.auto()
    OPEN = enum.auto()
    """Inside the with-block."""
    FINISHED = enum.auto()
    """No more steps; the last worker may still evaluate."""
    CLOSED = enum.auto()


def join(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scheduler: Scheduler | None = None,
    scaler: GradScaler | None = None,
    buffers: BufferPolicy = "average",
) -> Session:
    """Join the job that this code runs in, or train alone where there is none.

    Waits until all workers of the job have joined. All begin with the same weights, whatever each had.

    Args:
        model: complete and on its device; every worker builds the same one.
        optimizer: over parameters of the model.
        scheduler: stepped by the session from then on: it follows the job's steps, not only this worker's.
        scaler: the GradScaler that scales the loss, if any.
        buffers: ``average``: floating-point buffers (BatchNorm's statistics) are averaged; ``local``: each worker
            keeps its own, and the finished model has those of the worker that ends last.

    Raises:
        ValueError: model, optimizer or scheduler are of a kind that cannot be synchronised; the text says what to do.
        LinkError: another worker's model differs, or some worker did not join in time.
    """
    link = context.current()
    if link is None:
        show_reports()
        link = SoloLink()
    return Session(model, optimizer, link=link, scheduler=scheduler, scaler=scaler, buffers=buffers)


class Session:
    """One model's part in a job; see :func:`join`. A context manager, used on one thread."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        link: Link,
        scheduler: Scheduler | None = None,
        scaler: GradScaler | None = None,
        buffers: BufferPolicy = "average",
    ) -> None:
        check_optimizer(optimizer)
        flat = FlatModel(model, optimizer, buffers)
        schedule = Schedule(optimizer, scheduler)
        self._link = link
        self._joined: Joined = link.join(flat.layout, node=platform.node(), device=flat.device)
        schedule.check_mode(self._joined.mode)
        self._sync = self._joined.mode == "sync"
        self._stepper = Stepper(optimizer, scaler, flat.parameters)
        self._ensemble = Ensemble(link, self._joined, flat, optimizer, self._stepper, schedule)
        self._tally = self._ensemble.tally
        self._phase = Phase.JOINED
        self._style: Style | None = None
        self._accumulating = False
        self._averaged: tuple[Averaged, int] | None = None
        """Own loops in sync mode: the latest round, and the samples in it, until the step is told of."""
        self._batch_samples: int | None = None
        """In the batch yielded last."""
        self._read_samples = 0
        """In the batches yielded since an own loop's latest step."""
        self._thread = 0
        """The one that entered the session."""
        self._micro_batches = False
        """Whether any was counted: the data may end before the first group of them is complete."""
        self._no_data = False
        """Whether the data, or training, ended before this worker got any."""
        self._ensemble.begin()
        if flat.untrained:
            self._notice_untrained(flat.untrained)

    # --- what a loop sees ---

    @property
    def worker(self) -> int:
        """This worker's number, from 0."""
        return self._link.worker

    @property
    def workers(self) -> int:
        """How many workers the job began with."""
        return self._joined.workers

    @property
    def version(self) -> int:
        """The committed version that the latest round brought."""
        return self._ensemble.note.version

    @property
    def round(self) -> int:
        """The number of the latest round."""
        return self._ensemble.note.round

    @property
    def steps(self) -> int:
        """Optimizer steps of this worker."""
        return self._ensemble.steps

    @property
    def should_stop(self) -> bool:
        """Whether training is to end; for loops without :meth:`batches`, which ends by itself."""
        return bool(self._ensemble.note.stop)

    def batches(
        self,
        data: Dataset[Any] | DataLoader[Any],
        *,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        drop_last: bool | None = None,
        epochs: int | None = None,
    ) -> Iterator[Any]:
        """This worker's share of all epochs, batch by batch; at its end the session is finished.

        Args:
            data: a dataset with a length and positions, the same on every worker; or a ready DataLoader, whose dataset,
                batch size, order and settings are taken over (then give nothing else but ``epochs``).
            batch_size: samples per batch of this worker.
            shuffle: a new order in each epoch, the same on every worker (the default).
            collate_fn: as DataLoader's.
            num_workers: as DataLoader's.
            pin_memory: as DataLoader's.
            drop_last: leave out batches that are shorter than ``batch_size``.
            epochs: how often to go through the data; by default as often as the job's spec says, and once alone.

        Raises:
            TypeError: the data has no length, as an IterableDataset.
            ValueError: arguments contradict each other.
            RuntimeError: the session is finished.
        """
        self._check_open("session.batches")
        options = {"collate_fn": collate_fn, "num_workers": num_workers, "pin_memory": pin_memory}
        source = source_of(data, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, options=options)
        epochs = self._joined.epochs if epochs is None else epochs
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}; give 1 or more")
        return self._read(Feed(self._link, source, epochs))

    def step(
        self, loss: Tensor | float, *, samples: int | None = None, clip_norm: float | None = None
    ) -> None:
        """After ``loss.backward()``: step the optimizer and the scheduler, clear the gradients, and synchronise if due.

        Inside :meth:`accumulate` it only counts loss and samples.

        Args:
            loss: the mean over the batch, one number; it is not waited for.
            samples: what the gradients were computed from, which weighs this worker's contribution; by default the
                samples in the batch that :meth:`batches` yielded last. Tokens may be counted instead, on every worker.
            clip_norm: clip the gradients to this norm, in sync mode after averaging; the same at every step.

        Raises:
            ValueError: ``samples`` is missing and no batch was yielded, or the loss is not one number.
            RuntimeError: the session is finished, or the loop used :meth:`stepped` before.
            LinkError: the round failed.
        """
        count = self._counted(samples, self._batch_samples)
        if self._accumulating:
            self._micro_batches = True
            self._ensemble.micro_batch()
            self._tally.samples(count)
            self._tally.loss(loss, count)
            return
        self._begin_step("step")
        self._tally.samples(count)
        self._tally.loss(loss, count)
        stepped = self._tally.step()
        if self._sync:
            self._stepper.unscale()
            self._stepper.apply(self._ensemble.average(), clip_norm)
        else:
            self._stepper.step(clip_norm)
        self._stepper.clear()
        self._ensemble.end_step(stepped)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, :meth:`step` belongs to a micro-batch: gradients add up until the next step outside."""
        self._check_open("session.accumulate")
        self._ensemble.accumulate(True)
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False
            self._ensemble.accumulate(False)

    def average_gradients(self, *, samples: int | None = None) -> None:
        """For loops that step by themselves: between backward (and ``scaler.unscale_``) and clipping.

        In sync mode the gradients are the mean of all workers' afterwards; in other modes it does nothing.

        Args:
            samples: as in :meth:`step`; by default those of the batches yielded since the latest step.
        """
        self._begin_step("stepped")
        if not self._sync:
            return
        if self._averaged is not None:
            raise RuntimeError(
                "session.average_gradients was called twice for one step; call session.stepped after the optimizer"
            )
        count = self._counted(samples, self._read_samples or self._batch_samples)
        self._stepper.check_unscaled()
        self._tally.samples(count)
        self._tally.step()
        averaged = self._ensemble.average()
        if averaged is Averaged.OTHERS:
            self._stepper.hide_overflow()
        self._averaged = (averaged, count)

    def stepped(self, loss: Tensor | float, *, samples: int | None = None) -> None:
        """For loops that step by themselves: after the optimizer (and scaler). Synchronises if due.

        Args:
            loss: as in :meth:`step`.
            samples: as in :meth:`step`; by default those of the batches yielded since the latest step.

        Raises:
            RuntimeError: in sync mode, :meth:`average_gradients` was not called before the optimizer.
        """
        if self._sync:
            count = self._told_of_average(samples)
        else:
            self._ensemble.stay()
            self._begin_step("stepped")
            count = self._counted(samples, self._read_samples or self._batch_samples)
            self._tally.samples(count)
            self._tally.step()
        self._tally.loss(loss, count)
        self._read_samples = 0
        self._ensemble.end_step(count)

    def evaluation_due(self) -> bool:
        """Whether to evaluate now: true, once, on one worker at a time, when its model holds committed weights.

        The other workers go on meanwhile, and this one catches up when it reports, or takes its next batch or step.
        """
        # Own loops may clip or do anything else to a mean gradient, which a worker that missed it could not repeat.
        return self._ensemble.evaluation_due(repeatable=self._style == "step")

    def report(self, **metrics: float) -> None:
        """Pass metrics on to the job's events and to ``stop.target``.

        Raises:
            TypeError: a value is not a number.
        """
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        self._link.report(numbers, self._ensemble.steps)
        self._ensemble.come_back()

    def finish(self) -> None:
        """Contribute what is pending and leave the rounds; done by the end of :meth:`batches` and of the with-block.

        Raises:
            RuntimeError: no step was made.
        """
        if self._phase in (Phase.FINISHED, Phase.CLOSED):
            return
        if not self._ensemble.steps and not self._no_data and not self._micro_batches:
            raise RuntimeError(
                "session.step was never called: nothing was trained; call session.step(loss) after each loss.backward()"
            )
        self._ensemble.finish()
        self._phase = Phase.FINISHED

    def __enter__(self) -> Self:
        if self._phase is not Phase.JOINED:
            raise RuntimeError("a session is entered once; join again for another one")
        self._phase = Phase.OPEN
        self._thread = threading.get_ident()
        self._ensemble.open(lambda: self._style == "step")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
                self._ensemble.complete()
            else:
                self._ensemble.break_off()
        finally:
            self._ensemble.close()
            self._phase = Phase.CLOSED

    # --- a step ---

    def _begin_step(self, style: Style) -> None:
        if self._phase is not Phase.OPEN or self._style is not style:
            self._check_open(f"session.{style}")
            self._use(style)
        self._ensemble.begin_step()

    def _use(self, style: Style) -> None:
        if self._style not in (None, style):
            raise RuntimeError(
                "session.step and session.stepped were both called; use step, which steps the optimizer itself, or "
                "average_gradients and stepped around your own optimizer.step()"
            )
        self._style = style

    def _check_open(self, what: str) -> None:
        match self._phase:
            case Phase.JOINED:
                raise RuntimeError(
                    f"{what} was called outside the session; use `with cadenza.join(model, optimizer) as session:`"
                )
            case Phase.FINISHED | Phase.CLOSED:
                raise RuntimeError(
                    f"{what} was called after the session had finished; session.batches goes through all epochs by "
                    "itself (give it epochs=n) and finishes the session at its end"
                )

    def _counted(self, samples: int | None, default: int | None) -> int:
        if samples is None:
            if default is None:
                raise ValueError(
                    "samples is missing: give the number of samples in the batch, as in session.step(loss, "
                    "samples=len(x)), or take the batches from session.batches"
                )
            return default
        count = operator.index(samples)
        if count < 0:
            raise ValueError(f"samples is {count}; give how many samples the gradients were computed from")
        return count

    def _told_of_average(self, samples: int | None) -> int:
        """Own loops in sync mode: the samples of the round whose mean the optimizer has just applied."""
        self._check_open("session.stepped")
        self._use("stepped")
        if self._averaged is None:
            raise RuntimeError(
                "session.average_gradients was not called before the optimizer's step, but this job averages gradients "
                "(sync.mode is sync); call it between loss.backward() and optimizer.step()"
            )
        averaged, count = self._averaged
        self._averaged = None
        if samples is not None and samples != count:
            raise ValueError(f"samples is {samples}, but session.average_gradients was given {count}")
        if averaged is Averaged.OTHERS:
            self._stepper.lower_scale()
        return count

    # --- data ---

    def _read(self, feed: Feed) -> Iterator[Any]:
        source = iter(feed)
        while self._read_on_here() and self._ensemble.goes_on():
            item = next(source, None)
            self._tally.skipped(feed.skipped())
            if item is None:
                break
            batch, used = item
            self._take(used)
            yield batch
        self._no_data = self._batch_samples is None
        self.finish()

    def _read_on_here(self) -> Literal[True]:
        # A thread that reads ahead would overwrite the weights in the middle of an evaluation.
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "session.batches is read on another thread than the one that entered the session; to read ahead, give it "
                "num_workers, and move batches to the device on the thread that trains"
            )
        return True

    def _take(self, used: Used) -> None:
        self._batch_samples = used.samples
        self._read_samples += used.samples
        self._tally.batch(used.span)

    def _notice_untrained(self, names: tuple[str, ...]) -> None:
        text = (
            f"{len(names)} parameters require gradients but are not in the optimizer, so they stay as they are: "
            f"{', '.join(names[:5])}"
        )
        self._link.notice(Notice("untrained_parameters", text, "warning", {"parameters": list(names[:20])}))


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor):
        value = value.detach()
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"metric {name!r} is a {type(value).__name__}; report numbers") from None
