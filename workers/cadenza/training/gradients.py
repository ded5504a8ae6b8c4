"""sync mode: the mean of gradients, which each worker's own optimizer applies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cadenza.plane.link import Link, Stream
from cadenza.plane.messages import Answer, Joined
from cadenza.training.averaging import Averaging
from cadenza.training.flat import FlatModel
from cadenza.training.sparse import mostly_zero
from cadenza.training.stepping import Averaged
from cadenza.training.streaming import Streaming
from cadenza.training.tally import Total


class GradientAveraging(Averaging):
    """Contributes gradients and takes their mean."""

    def __init__(self, flat: FlatModel, link: Link, joined: Joined) -> None:
        super().__init__(flat, link, joined)
        self._streams = joined.overlap != "off"
        self._streaming: Streaming | None = None

    def open(self, allowed: Callable[[], bool]) -> None:
        """Let gradients leave during the backward pass, where the job wants that; see Streaming for ``allowed``."""
        if self._streams:
            self._streaming = Streaming(self._flat, self._work, self._link, self._stream, allowed)

    def close(self) -> None:
        """No more backward passes are followed."""
        if self._streaming is not None:
            self._streaming.close()

    def accumulate(self, inside: bool) -> None:
        """The loop enters or leaves a block in which gradients only add up."""
        if self._streaming is not None:
            self._streaming.accumulating = inside

    def micro_batch(self) -> None:
        """The loop has counted a micro-batch in such a block."""
        if self._streaming is not None:
            self._streaming.micro_batch()

    def average(self, total: Total, *, watch_overflow: bool) -> Averaged:
        """One exchange; the parameters' gradients and the averaged buffers are what it came to afterwards.

        Args:
            total: what the gradients were computed from.
            watch_overflow: abstain from the round if a gradient is not finite, as a GradScaler skips such a step.
        """
        self._flat.check_unchanged()
        present = self._gather()
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

    def _gather(self) -> bytes:
        if self._streaming is None:
            present = self._flat.gather_gradients(self._work)
        else:
            present = self._streaming.complete()
        for vector in {rows.item.vector for rows in self._flat.rows}:
            mine = [rows for rows in self._flat.rows if rows.item.vector == vector]
            self._link.sparse(vector, mostly_zero(self._link.units(vector), mine))
        return present

    def _stream(self) -> Stream:
        return self.exchanger.stream(self._work.arrays, self._anchor.arrays)

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
