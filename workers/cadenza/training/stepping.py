"""The optimizer's steps: gradients unscaled, clipped, and not applied where a GradScaler found an overflow."""

from __future__ import annotations

import enum
import inspect
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

_Facts = tuple[list[tuple[str, Any]], list[int]]
"""The optimizer's settings, and how often each parameter was changed in place."""


class Averaged(enum.Enum):
    """What a sync round did to the parameters' gradients."""

    MEAN = enum.auto()
    """They are the mean of all."""
    OTHERS = enum.auto()
    """They are the mean of the others': this worker's had overflowed."""
    SKIPPED = enum.auto()
    """Nobody's could be merged, and no parameter has a gradient."""


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises ValueError for an optimizer whose step evaluates the model by itself, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the model inside its step, where gradients cannot be averaged; "
            "use an optimizer whose step needs no closure, such as SGD or AdamW"
        )


class Stepper:
    """One optimizer, with its GradScaler if there is one.

    Args:
        optimizer: makes the steps.
        scaler: has scaled the loss; none, or one that is not enabled, where nothing was scaled.
        parameters: whose gradients are clipped, together.
    """

    def __init__(self, optimizer: Optimizer, scaler: GradScaler | None, parameters: list[Tensor]) -> None:
        self._optimizer = optimizer
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._parameters = parameters
        self._clip_norm: float | None = None
        self._made = False
        self._alike = True
        """Whether every step so far clipped by the same norm, and nobody else had a hand in it."""
        self._settled: _Facts | None = None

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled, so that an overflow is an everyday event."""
        return self._scaler is not None

    @property
    def repeatable(self) -> bool:
        """Whether a round that this worker misses could be made up for to the bit.

        It could not where the loop clips by changing norms, sets learning rates or changes weights by itself: what
        it would have done in that round is unknown.
        """
        return self._alike and self._untouched()

    def settle(self) -> None:
        """The session has made all its changes: what differs at the next step, the loop has changed."""
        self._settled = self._facts()

    def step(self, clip_norm: float | None) -> None:
        """Apply this worker's own gradients, as a plain loop does."""
        if clip_norm is not None:
            self.unscale()
            self._clip(clip_norm)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()

    def unscale(self) -> None:
        """Make the gradients those of the unscaled loss."""
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)

    def apply(self, averaged: Averaged, clip_norm: float | None) -> None:
        """Apply what a sync round left, after :meth:`unscale`."""
        self._remember(clip_norm)
        if averaged is not Averaged.SKIPPED:
            self._clip(clip_norm)
        if averaged is Averaged.OTHERS or (averaged is Averaged.MEAN and self._scaler is None):
            # Not through the scaler, which would skip the step that all other workers make.
            self._optimizer.step()
        elif averaged is Averaged.MEAN and self._scaler is not None:
            self._scaler.step(self._optimizer)
        if self._scaler is not None:
            self._scaler.update()

    def repeat(self) -> None:
        """Apply the mean gradient of a round that this worker missed, clipped as the others clipped it."""
        self._clip(self._clip_norm)
        self._optimizer.step()

    def clear(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    # --- for loops that step by themselves ---

    def check_unscaled(self) -> None:
        """Raises RuntimeError if gradients of differently scaled losses were about to be averaged."""
        if self._scaler is not None and not self._scaler._found_inf_per_device(self._optimizer):
            raise RuntimeError(
                "session.average_gradients found scaled gradients; call scaler.unscale_(optimizer) before it"
            )

    def hide_overflow(self) -> None:
        """Make ``scaler.step`` apply the others' mean, although this worker's own gradients had overflowed."""
        assert self._scaler is not None
        for found in self._scaler._found_inf_per_device(self._optimizer).values():
            found.zero_()

    def lower_scale(self) -> None:
        """What ``scaler.update`` would have done had the overflow not been hidden from it."""
        assert self._scaler is not None
        self._scaler.update(self._scaler.get_scale() * self._scaler.get_backoff_factor())

    def _remember(self, clip_norm: float | None) -> None:
        if (self._made and clip_norm != self._clip_norm) or not self._untouched():
            self._alike = False
        self._made, self._clip_norm = True, clip_norm

    def _untouched(self) -> bool:
        return self._settled is None or self._settled == self._facts()

    def _facts(self) -> _Facts:
        settings = [
            (name, _mark(value))
            for group in self._optimizer.param_groups
            for name, value in group.items()
            if name != "params"
        ]
        return settings, [parameter._version for parameter in self._parameters]

    def _clip(self, clip_norm: float | None) -> None:
        if clip_norm is not None:
            clip_grad_norm_(self._parameters, clip_norm)


def _mark(value: Any) -> Any:
    """A setting as something to compare; a tensor by how often it was changed, which needs no wait for its device."""
    return (id(value), value._version) if isinstance(value, Tensor) else value
