"""One worker's place among the others: when it comes together with them, and how it follows what was decided."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from cadenza.plane.link import Link
from cadenza.plane.messages import Joined, Note
from cadenza.training.evaluation import Asked, Evaluation
from cadenza.training.flat import FlatModel
from cadenza.training.gradients import GradientAveraging
from cadenza.training.meter import Meter
from cadenza.training.overlap import Pace
from cadenza.training.schedule import Schedule
from cadenza.training.stepping import Averaged, Stepper
from cadenza.training.tally import Tally
from cadenza.training.weights import WeightAveraging


class Ensemble:
    """Counts local steps and makes an exchange when one is due.

    ``tally`` is what the next contribution will say of itself; whoever makes a step adds to it.
    """

    def __init__(
        self,
        link: Link,
        joined: Joined,
        flat: FlatModel,
        optimizer: Optimizer,
        stepper: Stepper,
        schedule: Schedule,
    ) -> None:
        self.tally = Tally()
        self._link = link
        self._stepper = stepper
        self._schedule = schedule
        self._averaging = (
            GradientAveraging(flat, link, joined)
            if joined.mode == "sync"
            else WeightAveraging(flat, link, joined, optimizer)
        )
        self._publishes = joined.publish
        self._pace = Pace(joined.mode, joined.overlap, joined.local_steps)
        self._evaluation = Evaluation(link)
        self._meter = Meter(link)
        self._exchange_s = 0.0
        """What the exchange under way has kept this thread from computing so far."""
        self._evaluated_version = -1
        """That the model held when the user's code was last told to evaluate it."""
        self._last: bool | None = None
        """Whether no other worker trains any more; none while this one does."""

    @property
    def note(self) -> Note:
        """What the latest answer said."""
        return self._averaging.exchanger.note

    @property
    def steps(self) -> int:
        """Optimizer steps of this worker."""
        return self._meter.steps

    def begin(self) -> None:
        """Bring the model to the job's first state."""
        self._averaging.begin(publish=self._publishes)
        self._stepper.settle()
        self._meter.resume()

    def open(self, stepping: Callable[[], bool]) -> None:
        """The loop begins.

        Args:
            stepping: whether the session will make the step that a backward pass belongs to, so that it will find the
                gradients as they were computed.
        """
        # A scaler's gradients are unscaled in the step, and where they overflowed they are not sent at all.
        if isinstance(self._averaging, GradientAveraging) and not self._stepper.scaled:
            self._averaging.open(lambda: stepping() and self._evaluation.state is Asked.NO)

    def close(self) -> None:
        """The loop is over, in whichever way."""
        if isinstance(self._averaging, GradientAveraging):
            self._averaging.close()

    # --- a step ---

    def accumulate(self, inside: bool) -> None:
        """The loop enters or leaves a block in which gradients only add up."""
        if inside:
            self.come_back()
        if isinstance(self._averaging, GradientAveraging):
            self._averaging.accumulate(inside)

    def micro_batch(self) -> None:
        """The loop has counted a micro-batch in such a block."""
        if isinstance(self._averaging, GradientAveraging):
            self._averaging.micro_batch()

    def begin_step(self) -> None:
        """The model is about to change: a call to evaluate it that was not heeded lapses."""
        if self._evaluation.state is not Asked.NO:
            self.come_back()
            self._evaluation.ask(False)

    def average(self) -> Averaged:
        """sync: make the parameters' gradients the mean over the workers."""
        assert isinstance(self._averaging, GradientAveraging)
        begun_at = self._meter.pause()
        averaged = self._averaging.average(self.tally.take(), watch_overflow=self._stepper.scaled)
        self._follow(0.0, begun_at)
        return averaged

    def end_step(self, samples: int) -> None:
        """The optimizer has stepped, on so many samples; synchronise the weights if that is due."""
        self._meter.step(samples)
        self._schedule.advance(self._position())
        if isinstance(self._averaging, GradientAveraging):
            self._stepper.settle()
            return
        if self._pace.lands(self.tally.steps, self._averaging.exchanger.landed):
            self._merge()
        # Asked to evaluate, it sends later: while a contribution is under way there are no committed weights.
        if self._pace.sends(self.tally.steps) and self._evaluation.state is Asked.NO:
            self._send(overlaps=self._pace.plan.overlaps)

    def _send(self, *, overlaps: bool) -> None:
        assert isinstance(self._averaging, WeightAveraging), "sync mode leaves no local steps"
        begun_at = self._meter.pause()
        total = self.tally.take()
        self._averaging.send(total, going_on=overlaps)
        self._pace.sent_steps = total.steps
        self._exchange_s = self._meter.excluded(begun_at)
        if not overlaps:
            self._merge()

    def _merge(self) -> None:
        assert isinstance(self._averaging, WeightAveraging), "sync mode leaves no local steps"
        begun_at = self._meter.pause()
        if not self._averaging.merge(changed=self.tally.steps > 0):
            self.tally.lose()
        self._pace.sent_steps = None
        self._follow(self._exchange_s, begun_at)
        self._schedule.advance(self._position())

    def _follow(self, spent_s: float, begun_at: float) -> None:
        """An exchange is over, on which ``spent_s`` were spent before ``begun_at``: heed its note."""
        self._pace.follow(self.note.local_steps)
        self._evaluation.ask(self.note.evaluate)
        spent_s += self._meter.excluded(begun_at)
        self._meter.tell(max(spent_s - self._averaging.exchanger.seconds, 0.0))

    def _position(self) -> int:
        return self._pace.position(self.note.steps, self.tally.steps)

    # --- evaluation ---

    def evaluation_due(self, *, repeatable: bool) -> bool:
        """Whether to evaluate now; if so, the rounds go on meanwhile where this worker can make up for them.

        Args:
            repeatable: whether the session itself makes the steps, so that in sync mode it can repeat missed ones.
        """
        if self._evaluation.state is not Asked.YES:
            return False
        leave = self._last is None and self._may_leave(repeatable)
        self._meter.pause()
        if isinstance(self._averaging, WeightAveraging):
            self._averaging.hold_back()
        self._evaluated_version = self.note.version
        return self._evaluation.due(leave=leave)

    def come_back(self) -> None:
        """Catch up with the rounds that went on while this worker evaluated, if it did."""
        if self._evaluation.state is not Asked.AWAY:
            return
        self._evaluation.ask(False)
        if isinstance(self._averaging, WeightAveraging):
            self._averaging.catch_up()
        else:
            self._averaging.catch_up(self._repeat)
        self._pace.follow(self.note.local_steps)
        self._schedule.advance(self._position())
        self._stepper.settle()
        self._meter.resume()

    def stay(self) -> None:
        """A loop has stepped without coming back from its evaluation: its next contribution brings it back."""
        if self._evaluation.state is not Asked.AWAY:
            return
        self._evaluation.ask(False)
        if isinstance(self._averaging, WeightAveraging):
            self._averaging.put_back()
        self._meter.resume()

    def goes_on(self) -> bool:
        """Whether to train on; catches up first."""
        self.come_back()
        return not self.note.stop

    def _may_leave(self, repeatable: bool) -> bool:
        if isinstance(self._averaging, WeightAveraging):
            return True
        # To the bit, or the workers drift apart: with the same clipping and learning rate as the others had.
        return repeatable and self._stepper.repeatable and not self._schedule.users

    def _repeat(self) -> None:
        self._stepper.repeat()
        self._schedule.advance_by_one()

    # --- the end ---

    def finish(self) -> None:
        """Contribute what is pending and leave the rounds."""
        self.close()
        self.come_back()
        if isinstance(self._averaging, WeightAveraging):
            self._contribute_rest(self._averaging)
        self._meter.tell(None)
        self._last = self._link.finish()
        if self._last and isinstance(self._averaging, WeightAveraging):
            self._averaging.catch_up()
        self._evaluation.ask(self._last and self.note.version != self._evaluated_version)

    def _contribute_rest(self, averaging: WeightAveraging) -> None:
        if self._pace.sent_steps is not None:
            self._merge()
        if self.tally.steps:
            self._send(overlaps=False)
        if self.tally.lost:
            averaging.abstain(self.tally.take())

    def break_off(self) -> None:
        """The loop ends with an error: nothing more is contributed, but how far it came is told."""
        self._meter.tell(None)

    def complete(self) -> None:
        """If this worker was the last one, give the shards what only workers hold."""
        if self._last:
            self._averaging.publish(everything=isinstance(self._averaging, GradientAveraging))
            self._link.published()
