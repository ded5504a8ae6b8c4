"""What a training loop talks to: local steps, and the rounds in which workers come together.

``with cadenza.join(model, optimizer) as session:`` wraps one model and its optimizer. docs/training.md tells how
to use it, docs/protocol.md what travels.
"""

from __future__ import annotations

import enum
import operator
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from cadenza import context
from cadenza.averaging import GradientAveraging, WeightAveraging
from cadenza.data import Feed, Used, source_of
from cadenza.evaluation import Asked, Evaluation
from cadenza.flat import FlatModel
from cadenza.inventory import BufferPolicy
from cadenza.link import Link
from cadenza.messages import Joined, Note, Notice
from cadenza.meter import Meter
from cadenza.schedule import Schedule, Scheduler
from cadenza.solo import SoloLink, show_reports
from cadenza.stepping import Averaged, Stepper, check_optimizer
from cadenza.tally import Tally

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
        self._schedule = Schedule(optimizer, scheduler)
        self._joined: Joined = link.join(flat.layout, node=platform.node(), device=flat.device)
        self._schedule.check_mode(self._joined.mode)
        self._link = link
        self._stepper = Stepper(optimizer, scaler, flat.parameters)
        self._tally = Tally()
        self._evaluation = Evaluation(link)
        self._averaging = (
            GradientAveraging(flat, link, self._joined)
            if self._joined.mode == "sync"
            else WeightAveraging(flat, link, self._joined, optimizer)
        )
        self._interval = self._joined.local_steps
        self._phase = Phase.JOINED
        self._last = False
        self._style: Style | None = None
        self._accumulating = False
        self._clip_norm: float | None = None
        self._clips_alike = True
        """Whether every step clipped by the same norm, so that a missed round can be repeated."""
        self._averaged: tuple[Averaged, int] | None = None
        """Own loops in sync mode: the latest round, and the samples in it, until the step is told of."""
        self._batch_samples: int | None = None
        """In the batch yielded last."""
        self._read_samples = 0
        """In the batches yielded since an own loop's latest step."""
        self._no_data = False
        """Whether the data, or training, ended before this worker got any."""
        self._averaging.begin(publish=self._joined.publish)
        if flat.untrained:
            self._notice_untrained(flat.untrained)
        self._meter = Meter(link)

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
        return self._note.version

    @property
    def round(self) -> int:
        """The number of the latest round."""
        return self._note.round

    @property
    def steps(self) -> int:
        """Optimizer steps of this worker."""
        return self._meter.steps

    @property
    def should_stop(self) -> bool:
        """Whether training is to end; for loops without :meth:`batches`, which ends by itself."""
        return bool(self._note.stop)

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
            self._tally.samples(count)
            self._tally.loss(loss, count)
            return
        self._begin_step("step")
        if clip_norm != self._clip_norm:
            self._clips_alike = not self._meter.steps
            self._clip_norm = clip_norm
        self._tally.samples(count)
        self._tally.loss(loss, count)
        stepped = self._tally.step()
        if isinstance(self._averaging, GradientAveraging):
            self._stepper.unscale()
            self._stepper.apply(self._average(self._averaging), clip_norm)
        else:
            self._stepper.step(clip_norm)
        self._stepper.clear()
        self._end_step(stepped)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, :meth:`step` belongs to a micro-batch: gradients add up until the next step outside."""
        self._check_open("session.accumulate")
        self._come_back()
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def average_gradients(self, *, samples: int | None = None) -> None:
        """For loops that step by themselves: between backward (and ``scaler.unscale_``) and clipping.

        In sync mode the gradients are the mean of all workers' afterwards; in other modes it does nothing.

        Args:
            samples: as in :meth:`step`; by default those of the batches yielded since the latest step.
        """
        self._begin_step("stepped")
        if not isinstance(self._averaging, GradientAveraging):
            return
        if self._averaged is not None:
            raise RuntimeError(
                "session.average_gradients was called twice for one step; call session.stepped after the optimizer"
            )
        count = self._counted(samples, self._read_samples or self._batch_samples)
        self._stepper.check_unscaled()
        self._tally.samples(count)
        self._tally.step()
        averaged = self._average(self._averaging)
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
        if isinstance(self._averaging, GradientAveraging):
            count = self._told_of_average(samples)
        else:
            self._stay()
            self._begin_step("stepped")
            count = self._counted(samples, self._read_samples or self._batch_samples)
            self._tally.samples(count)
            self._tally.step()
        self._tally.loss(loss, count)
        self._read_samples = 0
        self._end_step(count)

    def evaluation_due(self) -> bool:
        """Whether to evaluate now: true, once, on one worker at a time, when its model holds committed weights.

        The other workers go on meanwhile, and this one catches up when it reports, or takes its next batch or step.
        """
        leave = self._phase is Phase.OPEN and self._may_leave()
        due = self._evaluation.due(leave=leave)
        if due:
            self._meter.pause()
        return due

    def report(self, **metrics: float) -> None:
        """Pass metrics on to the job's events and to ``stop.target``.

        Raises:
            TypeError: a value is not a number.
        """
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        self._link.report(numbers, self._meter.steps)
        self._come_back()

    def finish(self) -> None:
        """Contribute what is pending and leave the rounds; done by the end of :meth:`batches` and of the with-block.

        Raises:
            RuntimeError: no step was made.
        """
        if self._phase in (Phase.FINISHED, Phase.CLOSED):
            return
        if not self._meter.steps and not self._no_data:
            raise RuntimeError(
                "session.step was never called: nothing was trained; call session.step(loss) after each loss.backward()"
            )
        self._come_back()
        if self._tally.steps:
            self._merge()
        self._meter.tell(None)
        self._last = self._link.finish()
        self._phase = Phase.FINISHED
        if self._last and isinstance(self._averaging, WeightAveraging):
            self._averaging.catch_up()
        self._evaluation.ask(self._last)

    def __enter__(self) -> Self:
        if self._phase is not Phase.JOINED:
            raise RuntimeError("a session is entered once; join again for another one")
        self._phase = Phase.OPEN
        self._meter.resume()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
                self._complete()
        finally:
            self._phase = Phase.CLOSED

    # --- a step ---

    @property
    def _note(self) -> Note:
        return self._averaging.exchanger.note

    def _begin_step(self, style: Style) -> None:
        if self._phase is not Phase.OPEN or self._style is not style:
            self._check_open(f"session.{style}")
            self._use(style)
        if self._evaluation.state is not Asked.NO:
            self._come_back()
            self._evaluation.ask(False)

    def _end_step(self, samples: int) -> None:
        self._meter.step(samples)
        self._schedule.advance(self._note.steps + self._tally.steps)
        if self._tally.steps >= self._interval:
            self._merge()

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

    # --- rounds ---

    def _average(self, averaging: GradientAveraging) -> Averaged:
        begun_at = self._meter.pause()
        averaged = averaging.average(self._tally.take(), watch_overflow=self._stepper.scaled)
        self._follow(begun_at)
        return averaged

    def _merge(self) -> None:
        assert isinstance(self._averaging, WeightAveraging), "sync mode leaves no local steps"
        begun_at = self._meter.pause()
        self._averaging.merge(self._tally.take())
        self._follow(begun_at)
        self._schedule.advance(self._note.steps)

    def _follow(self, begun_at: float) -> None:
        """An exchange that began at ``begun_at`` is over: heed its note."""
        note = self._note
        self._interval = note.local_steps
        self._evaluation.ask(note.evaluate)
        took_s = self._meter.excluded(begun_at)
        self._meter.tell(max(took_s - self._averaging.exchanger.seconds, 0.0))

    def _may_leave(self) -> bool:
        """Whether this worker can make up for rounds that it misses.

        In sync mode that means to repeat each of them to the bit, which only the session's own steps allow.
        """
        if isinstance(self._averaging, WeightAveraging):
            return True
        return self._style == "step" and self._clips_alike and not self._schedule.users

    def _come_back(self) -> None:
        """Catch up with the rounds that went on while this worker evaluated, if it did."""
        if self._evaluation.state is not Asked.AWAY:
            return
        self._evaluation.ask(False)
        if isinstance(self._averaging, WeightAveraging):
            self._averaging.catch_up()
        else:
            self._averaging.catch_up(self._repeat)
        self._interval = self._note.local_steps
        self._schedule.advance(self._note.steps)
        self._meter.resume()

    def _stay(self) -> None:
        """An own loop has stepped without coming back from its evaluation: its next contribution brings it back."""
        if self._evaluation.state is Asked.AWAY:
            self._evaluation.ask(False)
            self._meter.resume()

    def _repeat(self) -> None:
        self._stepper.replay(self._clip_norm)
        self._schedule.advance_by_one()

    # --- data and the end ---

    def _read(self, feed: Feed) -> Iterator[Any]:
        source = iter(feed)
        while self._goes_on():
            item = next(source, None)
            self._tally.skipped(feed.skipped())
            if item is None:
                break
            batch, used = item
            self._take(used)
            yield batch
        self._no_data = self._batch_samples is None
        self.finish()

    def _goes_on(self) -> bool:
        self._come_back()
        return not self.should_stop

    def _take(self, used: Used) -> None:
        self._batch_samples = used.samples
        self._read_samples += used.samples
        self._tally.batch(used.span)

    def _complete(self) -> None:
        """The last worker gives the shards what only workers hold."""
        if self._last:
            self._averaging.publish(everything=isinstance(self._averaging, GradientAveraging))
            self._link.published()

    def _notice_untrained(self, names: tuple[str, ...]) -> None:
        text = (
            f"{len(names)} parameters require gradients but are not in the optimizer, so they stay as they are: "
            f"{', '.join(names[:5])}"
        )
        self._link.notice(Notice("untrained_parameters", text, "warning", {"parameters": list(names[:20])}))


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"metric {name!r} is a {type(value).__name__}; report numbers") from None
