"""How far training has come, when it ends, and when the committed weights are evaluated. Pure: no clock, no socket."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from cadenza.spec import JobSpec

RATE_WINDOW_S = 10.0
"""Long enough to smooth over rounds of a second, short enough to show a change of the network."""


@dataclass
class TrainingProgress:
    """Committed totals of one attempt of a job."""

    spec: JobSpec
    samples: int = 0
    dropped_samples: int = 0
    rounds: int = 0
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    dataset_size: int | None = None
    epochs: int | None = None
    started_at: float | None = None
    """Monotonic seconds at which the workers were let go."""
    stop_reason: str = ""
    _steps: float = 0.0
    _evaluations: int = 0
    _window: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def steps(self) -> int:
        """Committed global steps: what learning-rate schedules follow."""
        # Thirds add up to 2.9999999999999996; a committed step must not be lost to that.
        return math.floor(self._steps + 1e-6)

    @property
    def total_samples(self) -> int | None:
        """Samples at which the job ends by its data or by ``stop.samples``, whichever is less."""
        ends = [self.spec.stop.samples]
        if self.dataset_size is not None:
            ends.append(self.dataset_size * (self.epochs or self.spec.data.epochs))
        known = [end for end in ends if end is not None]
        return min(known) if known else None

    def start(self, now: float) -> None:
        """The workers begin."""
        self.started_at = now

    def seconds(self, now: float) -> float:
        """Seconds of training so far."""
        return 0.0 if self.started_at is None else now - self.started_at

    def commit(self, *, samples: int, dropped: int, steps: float, loss: float | None, now: float) -> None:
        """A round ended; ``loss`` is the mean over its merged samples."""
        self.rounds += 1
        self.samples += samples
        self.dropped_samples += dropped
        self._steps += steps
        if samples:
            self.loss = loss
        self._window.append((now, self.samples))
        while len(self._window) > 2 and now - self._window[0][0] > RATE_WINDOW_S:
            self._window.popleft()
        self.check_stop(now)

    def report(self, metrics: dict[str, float], now: float) -> None:
        """A worker reported metrics."""
        self.metrics.update(metrics)
        self.check_stop(now)

    def rate(self, now: float) -> float:
        """Samples per second over the latest RATE_WINDOW_S."""
        if len(self._window) < 2:
            return self.samples / max(self.seconds(now), 1e-9) if self.samples else 0.0
        (since, before), (_, after) = self._window[0], self._window[-1]
        return (after - before) / max(now - since, 1e-9)

    def check_stop(self, now: float) -> None:
        """Set ``stop_reason`` once one of the spec's conditions holds."""
        if not self.stop_reason:
            self.stop_reason = self._due_stop(now)

    def _due_stop(self, now: float) -> str:
        stop = self.spec.stop
        if stop.samples is not None and self.samples >= stop.samples:
            return f"stop.samples: {self.samples} samples are committed, {stop.samples} were asked for"
        if stop.seconds is not None and self.seconds(now) >= stop.seconds:
            return f"stop.seconds: trained for {self.seconds(now):.0f} s, {stop.seconds:g} s were allowed"
        if stop.target is not None:
            value = self.metrics.get(stop.target.metric, self.loss if stop.target.metric == "loss" else None)
            if value is not None and stop.target.reached(value):
                line = (
                    f"below {stop.target.below:g}"
                    if stop.target.below is not None
                    else f"above {stop.target.above:g}"
                )
                return f"stop.target: {stop.target.metric} is {value:.6g}, {line}"
        return ""

    def evaluation_due(self) -> bool:
        """Whether the committed samples have passed the next line of evaluation since :meth:`evaluation_given`."""
        every = self.spec.evaluation.every_samples or self.dataset_size
        # A dataset without samples has no end of an epoch.
        return (
            every is not None
            and every > 0
            and (self.samples + self.dropped_samples) // every > self._evaluations
        )

    def evaluation_given(self) -> None:
        """A worker was asked to evaluate."""
        every = self.spec.evaluation.every_samples or self.dataset_size
        if every:
            self._evaluations = (self.samples + self.dropped_samples) // every
