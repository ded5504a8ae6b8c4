"""Aggregation of contributions and the server optimizers, on one shard's slice of one vector (numpy)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray
from pydantic import TypeAdapter

from cadenza.spec import Average, Outer, OuterNesterov, OuterSgd

Array = NDArray[Any]
"""Shape [length of the slice], float32 or float64."""


def weighted_sum(arrays: Sequence[Array], weights: Sequence[float]) -> Array:
    """sum_i weights[i] * arrays[i], added in the given order, so that it is repeatable to the bit.

    A single array with weight 1 comes back with exactly its own values.
    """
    total: Array = arrays[0] * arrays[0].dtype.type(weights[0])
    for array, weight in zip(arrays[1:], weights[1:], strict=True):
        total += array * array.dtype.type(weight)
    return total


class ServerOptimizer(Protocol):
    """How the committed weights follow the aggregated delta. One instance per vector slice."""

    def step(self, weights: Array, delta: Array) -> Array:
        """The new weights, in a new array; ``weights`` stays as it is, since it may be on its way to a worker."""

    def state(self) -> dict[str, Array]:
        """What a checkpoint has to hold, by name."""

    def load(self, state: dict[str, Array]) -> None:
        """Take over a saved state."""


class Averaging:
    """x <- x + delta: with plain means, exactly the workers' average (local SGD; Stich 2019, arXiv 1805.09767)."""

    def step(self, weights: Array, delta: Array) -> Array:
        return weights + delta

    def state(self) -> dict[str, Array]:
        return {}

    def load(self, state: dict[str, Array]) -> None:
        """There is none."""


class MomentumSgd:
    """SGD on the pseudo-gradient g = -delta, as torch.optim.SGD has it: u <- mu u + g.

    Heavy ball: x <- x - lr u. Nesterov: x <- x - lr (g + mu u) (DiLoCo; Douillard et al. 2023, arXiv 2311.08105).
    """

    def __init__(self, lr: float, momentum: float, *, nesterov: bool = False) -> None:
        self._lr = lr
        self._momentum = momentum
        self._nesterov = nesterov
        self._velocity: Array | None = None

    def step(self, weights: Array, delta: Array) -> Array:
        lr, momentum = weights.dtype.type(self._lr), weights.dtype.type(self._momentum)
        gradient = direction = -delta
        if self._momentum:
            self._velocity = gradient if self._velocity is None else momentum * self._velocity + gradient
            direction = gradient + momentum * self._velocity if self._nesterov else self._velocity
        moved: Array = weights - lr * direction
        return moved

    def state(self) -> dict[str, Array]:
        return {} if self._velocity is None else {"velocity": self._velocity}

    def load(self, state: dict[str, Array]) -> None:
        self._velocity = state.get("velocity")


_OUTER: TypeAdapter[Outer] = TypeAdapter(Outer)


def server_optimizer(outer: dict[str, Any]) -> ServerOptimizer:
    """The optimizer that a spec's ``sync.outer`` names; raises pydantic.ValidationError on an unknown one."""
    match _OUTER.validate_python(outer):
        case Average():
            return Averaging()
        case OuterSgd(lr=lr, momentum=momentum):
            return MomentumSgd(lr, momentum)
        case OuterNesterov(lr=lr, momentum=momentum):
            return MomentumSgd(lr, momentum, nesterov=True)
