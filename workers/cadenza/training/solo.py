"""The link of a script outside any job: one worker, no network, the same loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.layout import Layout
from cadenza.plane.link import Arrays, LinkError, Stream, Timings
from cadenza.plane.messages import Answer, Exhausted, Joined, Lease, Leased, Note, Notice, Request
from cadenza.plane.units import Unit

logger = logging.getLogger("cadenza")

MANY_STEPS = 1_000_000_000
"""Alone, there is no reason to synchronise but the end of an epoch."""

SEED = 0


@dataclass(frozen=True)
class Landed:
    """An answer that is there at once."""

    answer: Answer

    def landed(self) -> bool:
        return True

    def result(self) -> Answer:
        return self.answer


class SoloLink:
    """A job of one worker in local mode, whose own weights are always the committed ones.

    It asks for an exchange where an epoch of leased data ends, and for an evaluation there.
    """

    worker = 0

    def __init__(self) -> None:
        self.timings = Timings()
        self.push_bytes = self.pull_bytes = self.raw_push_bytes = self.raw_pull_bytes = 0
        self._version = 0
        self._steps = 0
        self._samples = 0
        self._samples_per_step = 1
        self._epoch = 0
        self._epoch_samples = 0
        """Samples that one epoch trains on; 0 before the first lease."""
        self._epochs_evaluated = 0

    def join(self, layout: Layout, *, node: str, device: str) -> Joined:
        # The first exchange comes after one step, to learn how many samples a step takes.
        return Joined(
            publish=True,
            mode="local",
            local_steps=1,
            epochs=1,
            workers=1,
            shards=(),
            codec="fp32",
            round_timeout_s=math.inf,
        )

    def publish(self, vectors: tuple[str, ...], values: Arrays) -> None:
        """There is nobody to publish to."""

    def ready(self) -> None:
        """There is nobody to tell."""

    def units(self, vector: str) -> list[Unit]:
        """Nothing is cut, because nothing is sent."""
        return []

    def sparse(self, vector: str, numbers: Iterable[int]) -> None:
        """There is nobody to send to."""

    def begin(self, request: Request, values: Arrays, into: Arrays) -> Landed:
        """Always ``unchanged``: the model's own weights, to the bit, are the committed state."""
        if request.kind == "update":
            self._version += 1
            self._steps += request.steps
            self._samples += request.samples
            # The most so far: the last batch of an epoch is short, and must not let the next epoch end late.
            self._samples_per_step = max(self._samples_per_step, -(-request.samples // request.steps))
        return Landed(Answer("unchanged", self._note()))

    def stream(self, seq: int, base_version: int, values: Arrays, into: Arrays) -> Stream:
        raise LinkError("there is nobody to stream to: alone, no gradient leaves")

    def replayed(self, vector: str) -> NDArray[np.generic]:
        raise LinkError(f"there is nothing to replay of {vector}: alone, no round is missed")

    def lease(self, request: Lease) -> Leased | Exhausted:
        """Whole epochs, in the order of seed 0."""
        whole = request.dataset_size // request.batch_size * request.batch_size
        self._epoch_samples = whole if request.drop_last else request.dataset_size
        if self._epoch >= request.epochs:
            return Exhausted("all epochs are handed out")
        self._epoch += 1
        return Leased(self._epoch, self._epoch - 1, 0, request.dataset_size, SEED)

    def evaluating(self) -> None:
        """Nobody waits."""

    def report(self, metrics: dict[str, float], steps: int) -> None:
        values = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        logger.info("step %d: %s", steps, values)

    def notice(self, notice: Notice) -> None:
        logger.log(logging.INFO if notice.severity == "info" else logging.WARNING, "%s", notice.message)

    def telemetry(
        self, *, steps: int, samples: int, compute_seconds: float, apply_seconds: float | None
    ) -> None:
        """Nobody watches."""

    def finish(self) -> bool:
        return True

    def published(self) -> None:
        """There is nobody to tell."""

    def _note(self) -> Note:
        return Note(
            version=self._version,
            round=self._version,
            steps=self._steps,
            evaluate=self._evaluation_due(),
            local_steps=self._steps_to_epoch_end(),
        )

    def _evaluation_due(self) -> bool:
        if not self._epoch_samples:
            return False
        epochs = self._samples // self._epoch_samples
        due, self._epochs_evaluated = epochs > self._epochs_evaluated, epochs
        return due

    def _steps_to_epoch_end(self) -> int:
        if not self._epoch_samples:
            return MANY_STEPS
        left = self._epoch_samples - self._samples % self._epoch_samples
        return max(1, left // self._samples_per_step)


def show_reports() -> None:
    """Print what is reported where the script has set up no logging: alone, somebody is looking."""
    if logging.getLogger().handlers or logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("cadenza: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
