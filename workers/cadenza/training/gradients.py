"""sync mode: the mean of gradients, which each worker's own optimizer applies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cadenza.plane.messages import Answer
from cadenza.training.averaging import Averaging
from cadenza.training.stepping import Averaged
from cadenza.training.tally import Total


class GradientAveraging(Averaging):
    """sync: contributes gradients and takes their mean, which each worker's own optimizer applies."""

    def average(self, total: Total, *, watch_overflow: bool) -> Averaged:
        """One exchange; the parameters' gradients and the averaged buffers are what it came to afterwards.

        Args:
            total: what the gradients were computed from.
            watch_overflow: abstain from the round if a gradient is not finite, as a GradScaler skips such a step.
        """
        self._flat.check_unchanged()
        present = self._flat.gather_gradients(self._work)
        overflowed = watch_overflow and not self._finite_gradients()
        if overflowed:
            answer = self.exchanger.abstain("amp_overflow", self._anchor.arrays, total)
        else:
            self._flat.gather(self._work, ("buffers",))
            self._subtract_anchor("buffers")
            answer = self.exchanger.update(self._work.arrays, self._anchor.arrays, total, present)
        mean = answer.content == "gradient"
        self._flat.scatter_gradients(self._anchor, answer.present[0] if mean else b"")
        self._flat.scatter(self._anchor, ("buffers",))
        if not mean:
            return Averaged.SKIPPED
        return Averaged.OTHERS if overflowed else Averaged.MEAN

    def catch_up(self, apply: Callable[[], None]) -> None:
        """Apply the mean gradients of the rounds that this worker missed, one after another.

        ``apply`` makes one step of the optimizer. The gradients that the parameters have are kept.
        """
        answer = self.exchanger.fetch(self._anchor.arrays)
        if answer.content != "gradients":
            return
        own = self._flat.take_gradients()
        self._replay(answer, apply)
        self._flat.put_gradients(own)
        self._flat.scatter(self._anchor, ("buffers",))

    def _replay(self, answer: Answer, apply: Callable[[], None]) -> None:
        rows = {name: self._link.replayed(name) for name in answer.vectors}
        for number, present in enumerate(answer.present):
            for name, values in rows.items():
                self._anchor.arrays[name][:] = values[number]
            self._flat.scatter_gradients(self._anchor, present)
            apply()

    def _finite_gradients(self) -> bool:
        return all(
            finite(values) for name, values in self._work.flat.items() if name.startswith("parameters.")
        )


def finite(values: Tensor) -> bool:
    """Whether no value is infinite or NaN; without memory of the vector's size."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))
