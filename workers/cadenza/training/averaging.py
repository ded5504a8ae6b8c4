"""What is averaged, and how a worker's model follows: weights in local, ssp and async mode, gradients in sync mode.

Both keep an *anchor*, the latest committed values of the vectors that travel, and contribute the difference to it;
in sync mode the anchor of parameters is not needed, and its memory receives the mean gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from cadenza.plane.layout import Role
from cadenza.plane.link import Link
from cadenza.plane.messages import Answer, Joined, Notice
from cadenza.training.exchange import Exchanger
from cadenza.training.flat import FlatModel, HostVectors
from cadenza.training.stepping import Averaged
from cadenza.training.tally import Total

TRAVELLING_ROLES: tuple[Role, ...] = ("parameters", "buffers")


class Averaging:
    """What both have in common: the first state, and publishing the last."""

    def __init__(self, flat: FlatModel, link: Link, joined: Joined) -> None:
        self.exchanger = Exchanger(link, flat.layout, joined)
        self._flat = flat
        self._link = link
        self._work = flat.vectors(flat.layout.travelling())
        self._anchor = flat.vectors(flat.layout.travelling())

    def begin(self, *, publish: bool) -> None:
        """Bring the model to the job's first state: make this one that state, or take the published one."""
        static = self._static()
        arrays = {**self._anchor.arrays, **static.arrays}
        if publish:
            self._flat.gather(self._anchor)
            self._flat.gather(static)
            self._link.publish(self._flat.layout.every(), arrays)
            self._link.ready()
            return
        self.exchanger.fetch_first(arrays)
        self._flat.scatter(self._anchor)
        self._flat.scatter(static)

    def publish(self, *, everything: bool) -> None:
        """Make the model's static tensors, or all of them, the shards' state."""
        names = self._flat.layout.every() if everything else tuple(self._static().flat)
        if not names:
            return
        vectors = self._flat.vectors(names)
        self._flat.gather(vectors)
        self._link.publish(names, vectors.arrays)

    def _static(self) -> HostVectors:
        """Memory for the vectors that travel only at the beginning and the end."""
        travelling = self._flat.layout.travelling()
        return self._flat.vectors(name for name in self._flat.layout.every() if name not in travelling)

    def _subtract_anchor(self, role: Role) -> None:
        """Turn the values in the work vectors into differences; 16-bit types subtract in fp32 and round once."""
        for name, values in self._work.flat.items():
            if name.startswith(f"{role}."):
                values.sub_(self._anchor.flat[name])


class WeightAveraging(Averaging):
    """local, ssp, async: contributes what the local steps changed and takes the committed weights."""

    def __init__(self, flat: FlatModel, link: Link, joined: Joined, optimizer: Optimizer) -> None:
        super().__init__(flat, link, joined)
        self._optimizer = optimizer

    def merge(self, total: Total) -> None:
        """One exchange; the model holds the committed weights afterwards."""
        self._flat.check_unchanged()
        self._flat.gather(self._work)
        for role in TRAVELLING_ROLES:
            self._subtract_anchor(role)
        answer = self.exchanger.update(self._work.arrays, self._anchor.arrays, total)
        if answer.content == "unchanged":
            # Alone, there is nothing to average with: what the model holds is the committed state.
            self._flat.gather(self._anchor)
        else:
            self._flat.scatter(self._anchor)
        if answer.note.dropped == "non_finite":
            self._forget_optimizer_state()

    def catch_up(self) -> None:
        """Take what was committed since the latest exchange. The model must not have changed since."""
        if self.exchanger.fetch(self._anchor.arrays).content == "weights":
            self._flat.scatter(self._anchor)

    def _forget_optimizer_state(self) -> None:
        forgotten = forget_non_finite_state(self._optimizer)
        if forgotten:
            text = f"optimizer state of {forgotten} parameters was not finite and starts afresh"
            data = {"worker": self._link.worker, "parameters": forgotten}
            self._link.notice(Notice("optimizer_state_dropped", text, "warning", data))


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


@torch.no_grad()
def forget_non_finite_state(optimizer: Optimizer) -> int:
    """Drop the optimizer's state of each parameter for which any of it is not finite; returns of how many."""
    bad = [
        parameter
        for parameter, state in optimizer.state.items()
        if any(
            isinstance(value, Tensor) and not bool(torch.isfinite(value).all()) for value in state.values()
        )
    ]
    for parameter in bad:
        del optimizer.state[parameter]
    return len(bad)
