"""Aggregation of contributions and the server optimizers, on one shard's slice of one vector (numpy)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from cadenza.spec import Average, Outer, OuterNesterov, OuterSgd

Array = NDArray[Any]
"""Shape [length of the slice], float32 or float64."""


def weighted_sum(arrays: Sequence[Array], weights: Sequence[float], out: Array, scratch: Array) -> Array:
    """sum_i weights[i] * arrays[i], added in the given order, so that it is repeatable to the bit.

    It is written into ``out``, with ``scratch`` as memory of the same length; a single array with weight 1 is returned
    as it is.
    """
    if len(arrays) == 1 and weights[0] == 1.0:
        return arrays[0]
    np.multiply(arrays[0], out.dtype.type(weights[0]), out=out)
    for array, weight in zip(arrays[1:], weights[1:], strict=True):
        np.multiply(array, out.dtype.type(weight), out=scratch)
        np.add(out, scratch, out=out)
    return out


class ServerOptimizer(Protocol):
    """How the committed weights follow the aggregated delta. One instance per vector slice.

    A step may be made again, with another delta, until it is committed.
    """

    def step(self, weights: Array, delta: Array, out: Array, start: int) -> None:
        """Write the new weights into ``out``; all are the elements of the slice from ``start`` on."""

    def commit(self) -> None:
        """Every element was stepped, and the latest steps count."""

    def state(self) -> dict[str, Array]:
        """What a checkpoint has to hold, by name."""

    def load(self, state: dict[str, Array]) -> None:
        """Take over a saved state."""


class Averaging:
    """x <- x + delta: with plain means, exactly the workers' average (local SGD; Stich 2019, arXiv 1805.09767)."""

    def step(self, weights: Array, delta: Array, out: Array, start: int) -> None:
        np.add(weights, delta, out=out)

    def commit(self) -> None:
        """There is no state."""

    def state(self) -> dict[str, Array]:
        return {}

    def load(self, state: dict[str, Array]) -> None:
        """There is none."""


class MomentumSgd:
    """SGD on the pseudo-gradient g = -delta, as torch.optim.SGD has it: u <- mu u + g.

    Heavy ball: x <- x - lr u. Nesterov: x <- x - lr (g + mu u) (DiLoCo; Douillard et al. 2023, arXiv 2311.08105).

    Args:
        length: elements of the slice.
        dtype: in which it is kept.
    """

    def __init__(
        self, lr: float, momentum: float, length: int, dtype: np.dtype, *, nesterov: bool = False
    ) -> None:
        self._lr = dtype.type(lr)
        self._momentum = dtype.type(momentum)
        self._nesterov = nesterov
        self._velocity = np.zeros(length if momentum else 0, dtype)
        self._next = np.zeros_like(self._velocity)

    def step(self, weights: Array, delta: Array, out: Array, start: int) -> None:
        np.negative(delta, out=out)
        if self._momentum:
            span = slice(start, start + len(delta))
            velocity = self._next[span]
            np.multiply(self._velocity[span], self._momentum, out=velocity)
            velocity += out
            if self._nesterov:
                out += self._momentum * velocity
            else:
                out[:] = velocity
        out *= self._lr
        np.subtract(weights, out, out=out)

    def commit(self) -> None:
        self._velocity, self._next = self._next, self._velocity

    def state(self) -> dict[str, Array]:
        return {"velocity": self._velocity.copy()} if self._momentum else {}

    def load(self, state: dict[str, Array]) -> None:
        if self._momentum:
            self._velocity[:] = state["velocity"]


_OUTER: TypeAdapter[Outer] = TypeAdapter(Outer)


def server_optimizer(outer: dict[str, Any], length: int, dtype: np.dtype) -> ServerOptimizer:
    """The optimizer that a spec's ``sync.outer`` names; raises pydantic.ValidationError on an unknown one."""
    match _OUTER.validate_python(outer):
        case Average():
            return Averaging()
        case OuterSgd(lr=lr, momentum=momentum):
            return MomentumSgd(lr, momentum, length, dtype)
        case OuterNesterov(lr=lr, momentum=momentum):
            return MomentumSgd(lr, momentum, length, dtype, nesterov=True)
