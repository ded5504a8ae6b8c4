"""What the steps since the last contribution add up to: steps, samples, loss and the data they used."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cadenza.plane.messages import Span


@dataclass(frozen=True)
class Total:
    """What one contribution says about itself."""

    steps: int
    samples: int
    loss: float | None
    """Mean over the samples; none if unknown or not finite."""
    spans: tuple[Span, ...]
    lost_samples: int = 0
    """Of steps that were thrown away; they are in no contribution."""
    lost_spans: tuple[Span, ...] = ()


NOTHING = Total(steps=0, samples=0, loss=None, spans=())


class Tally:
    """Adds up without waiting for a device: a loss stays where it is until :meth:`take`."""

    def __init__(self) -> None:
        self.steps = 0
        self._samples = 0
        self._open_samples = 0
        """Of micro-batches whose step is still to come."""
        self._weight = 0
        """Samples that the sum of losses speaks of."""
        self._loss = 0.0
        self._loss_on_device: Tensor | None = None
        self._spans: list[Span] = []
        self._open_spans: list[Span] = []
        self._lost_samples = 0
        self._lost_spans: list[Span] = []

    @property
    def lost(self) -> bool:
        """Whether there are thrown-away steps that no contribution has told of."""
        return bool(self._lost_samples or self._lost_spans)

    def batch(self, span: Span) -> None:
        """A batch of these positions is being trained on."""
        self._open_spans.append(span)

    def skipped(self, spans: Iterable[Span]) -> None:
        """These spans are done with, although nothing was trained on them."""
        self._spans += spans

    def samples(self, count: int) -> None:
        """The step that is being made is computed from so many more samples."""
        self._open_samples += count

    def loss(self, loss: Tensor | float, samples: int) -> None:
        """The mean loss over ``samples``.

        Raises:
            ValueError: the tensor has more than one element.
        """
        self._weight += samples
        if isinstance(loss, Tensor):
            self._add(loss.detach(), samples)
        else:
            self._loss += float(loss) * samples

    def step(self) -> int:
        """The optimizer steps, on all that was counted since its last step; returns how many samples that is."""
        samples, self._open_samples = self._open_samples, 0
        self.steps += 1
        self._samples += samples
        if self._open_spans:
            self._spans += self._open_spans
            self._open_spans.clear()
        return samples

    def lose(self) -> None:
        """The steps since :meth:`take` were thrown away: what they used up is told, but does not count as trained."""
        self._lost_samples += self._samples
        self._lost_spans += self._spans
        self._clear()

    def take(self) -> Total:
        """The total of all steps, which starts again from nothing. Waits for the device that the losses are on."""
        total = Total(
            self.steps,
            self._samples,
            self._mean_loss(),
            merged(self._spans),
            self._lost_samples,
            merged(self._lost_spans),
        )
        self._clear()
        self._lost_samples = 0
        self._lost_spans.clear()
        return total

    def _clear(self) -> None:
        self.steps = self._samples = self._weight = 0
        self._loss = 0.0
        if self._loss_on_device is not None:
            self._loss_on_device.zero_()
        self._spans.clear()

    def _add(self, loss: Tensor, samples: int) -> None:
        if loss.ndim:
            if loss.numel() != 1:
                raise ValueError(
                    f"loss has shape {list(loss.shape)}; give the mean over the batch, one number (loss.mean())"
                )
            loss = loss.reshape(())
        total = self._loss_on_device
        if total is None or total.device != loss.device:
            if total is not None:
                self._loss += total.item()
            dtype = torch.promote_types(loss.dtype, torch.float32)
            total = self._loss_on_device = torch.zeros((), dtype=dtype, device=loss.device)
        total.add_(loss, alpha=samples)

    def _mean_loss(self) -> float | None:
        loss = self._loss
        if self._loss_on_device is not None:
            loss += self._loss_on_device.item()
        return loss / self._weight if self._weight and math.isfinite(loss) else None


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same positions in as few spans as possible, where neighbours follow each other."""
    joined: list[Span] = []
    for span in spans:
        if joined and (joined[-1].lease, joined[-1].stop) == (span.lease, span.start):
            joined[-1] = Span(span.lease, joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)
