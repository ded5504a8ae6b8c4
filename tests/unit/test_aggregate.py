"""Weighted sums and server optimizers against float64 arithmetic and torch."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from cadenza_service.servers.aggregate import (
    Averaging,
    MomentumSgd,
    ServerOptimizer,
    server_optimizer,
    weighted_sum,
)

Array = NDArray[Any]
OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "average"},
    {"name": "sgd", "lr": 0.7},
    {"name": "sgd", "lr": 0.3, "momentum": 0.9},
    {"name": "nesterov", "lr": 0.7, "momentum": 0.9},
]
parametrize_outer = pytest.mark.parametrize(
    "outer", OPTIMIZERS, ids=lambda outer: "-".join(map(str, outer.values()))
)


def summed(arrays: list[Array], weights: list[float]) -> Array:
    """The weighted sum, in memory that held something else before."""
    out, scratch = np.full_like(arrays[0], np.nan), np.full_like(arrays[0], np.nan)
    return weighted_sum(arrays, weights, out, scratch)


def optimizer_of(outer: dict[str, Any], length: int, dtype: Any = np.float64) -> ServerOptimizer:
    return server_optimizer(outer, length, np.dtype(dtype))


def stepped(optimizer: ServerOptimizer, weights: Array, delta: Array) -> Array:
    """One committed step of the whole slice."""
    out = np.full_like(weights, np.nan)
    optimizer.step(weights, delta, out, 0)
    optimizer.commit()
    return out


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-6), (np.float64, 1e-15)])
@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 12), length=st.integers(0, 50))
def test_a_weighted_mean_is_that_of_float64(
    dtype: Any, bound: float, seed: int, count: int, length: int
) -> None:
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=length).astype(dtype) for _ in range(count)]
    samples = rng.integers(1, 1_000, size=count)
    weights = [int(n) / int(samples.sum()) for n in samples]
    total = summed(arrays, weights)
    exact = np.average(np.array(arrays, np.float64), axis=0, weights=samples)
    assert total.dtype == dtype
    scale = np.abs(np.array(arrays, np.float64)).sum(axis=0)
    assert (np.abs(total - exact) <= bound * scale).all()


@settings(deadline=None)
@given(values=st.lists(st.floats(width=32), max_size=20))
def test_one_contribution_alone_keeps_its_bits(values: list[float]) -> None:
    array = np.array(values, np.float32)
    with np.errstate(invalid="ignore"):
        total = summed([array], [1.0])
    assert np.array_equal(total, array, equal_nan=True)
    finite = np.isfinite(array)
    assert total[finite].tobytes() == array[finite].tobytes()


def test_the_order_of_summation_is_the_given_one() -> None:
    arrays = [np.array([value]) for value in (1e16, 1.0, -1e16)]
    assert summed(arrays, [1.0, 1.0, 1.0])[0] == (1e16 + 1.0) - 1e16
    assert summed([arrays[0], arrays[2], arrays[1]], [1.0, 1.0, 1.0])[0] == 1.0


def test_as_many_weights_as_contributions() -> None:
    with pytest.raises(ValueError, match="zip"):
        summed([np.ones(2)] * 3, [0.5, 0.5])


@parametrize_outer
def test_nothing_that_was_handed_in_or_out_is_written_to(outer: dict[str, Any]) -> None:
    optimizer = optimizer_of(outer, 6)
    rng = np.random.default_rng(1)
    weights = rng.normal(size=6)
    seen = []
    for _ in range(4):
        delta = rng.normal(size=6)
        seen += [(weights, weights.copy()), (delta, delta.copy())]
        weights.flags.writeable = delta.flags.writeable = False
        weights = stepped(optimizer, weights, delta)
        assert all(np.array_equal(array, then) for array, then in seen)


@parametrize_outer
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_keep_their_type_and_an_empty_slice_is_fine(outer: dict[str, Any], dtype: Any) -> None:
    optimizer = optimizer_of(outer, 3, dtype)
    for _ in range(2):
        assert np.isfinite(stepped(optimizer, np.ones(3, dtype), np.ones(3, dtype))).all()
    assert {array.dtype for array in optimizer.state().values()} <= {np.dtype(dtype)}
    assert stepped(optimizer_of(outer, 0, dtype), np.ones(0, dtype), np.ones(0, dtype)).shape == (0,)


@parametrize_outer
def test_an_optimizer_goes_on_from_its_saved_state(outer: dict[str, Any]) -> None:
    rng = np.random.default_rng(2)
    deltas = rng.normal(size=(6, 4))
    straight, first = optimizer_of(outer, 4), optimizer_of(outer, 4)
    one = two = rng.normal(size=4)
    for delta in deltas:
        one = stepped(straight, one, delta)
    for delta in deltas[:3]:
        two = stepped(first, two, delta)
    second = optimizer_of(outer, 4)
    second.load(first.state())
    for delta in deltas[3:]:
        two = stepped(second, two, delta)
    assert np.array_equal(one, two)


def test_the_average_adds_exactly_and_rate_1_is_the_average() -> None:
    weights, delta = np.array([0.1, 0.7]), np.array([0.2, -0.7])
    moved = stepped(Averaging(), weights, delta)
    assert np.array_equal(moved, weights + delta)
    assert np.array_equal(stepped(MomentumSgd(1.0, 0.0, 2, np.dtype(np.float64)), weights, delta), moved)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_follows_its_formula_in_exact_arithmetic(nesterov: bool) -> None:
    rate, momentum = Fraction(1, 4), Fraction(1, 2)
    optimizer = MomentumSgd(0.25, 0.5, 1, np.dtype(np.float64), nesterov=nesterov)
    weights, x, u = np.array([3.0]), Fraction(3), Fraction(0)
    for delta in (1, -2, 4, 8, -16):
        weights = stepped(optimizer, weights, np.array([float(delta)]))
        gradient = Fraction(-delta)
        u = momentum * u + gradient
        x -= rate * (gradient + momentum * u if nesterov else u)
        assert Fraction(float(weights[0])) == x


def test_momentum_comes_to_the_rate_that_it_promises() -> None:
    optimizer = MomentumSgd(0.1, 0.9, 1, np.dtype(np.float64))
    weights = np.zeros(1)
    for _ in range(400):
        before, weights = weights, stepped(optimizer, weights, np.ones(1))
    assert math.isclose(float((weights - before)[0]), 0.1 / (1 - 0.9), rel_tol=1e-12)


@pytest.mark.parametrize(
    "outer", [{}, {"name": "adagrad"}, {"name": "sgd", "lr": -1}, {"name": "average", "lr": 1}]
)
def test_an_unknown_optimizer_is_refused(outer: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        optimizer_of(outer, 1)


@parametrize_outer
def test_a_step_may_be_made_again_in_parts_until_it_is_committed(outer: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    plain, again = optimizer_of(outer, 5), optimizer_of(outer, 5)
    one = two = rng.normal(size=5)
    for _ in range(4):
        wrong, right = rng.normal(size=(2, 5))
        before = {name: array.copy() for name, array in again.state().items()}
        out = np.full(5, np.nan)
        again.step(two, wrong, out, 0)
        assert all(np.array_equal(array, before[name]) for name, array in again.state().items())
        for start, stop in ((3, 5), (0, 3)):
            again.step(two[start:stop], right[start:stop], out[start:stop], start)
        again.commit()
        one, two = stepped(plain, one, right), out
        assert np.array_equal(one, two)
    assert all(np.array_equal(array, again.state()[name]) for name, array in plain.state().items())
