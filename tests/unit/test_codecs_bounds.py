"""What each codec may change at most, and what it keeps on average."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cadenza.plane.codecs import Turn, codec_named
from cadenza.plane.codecs.blockwise import BLOCK
from cadenza.plane.units import Unit

SEEDS = st.integers(0, 2**32)
LENGTHS = st.integers(1, 2_100)
SCALES = st.sampled_from([1e-3, 1.0, 1e20])
ROUNDING = 1 + 1e-4
TURN = Turn(seed=1, round=10_000, worker=0)


def over(name: str, values: NDArray[Any], unit: Unit | None = None, turn: Turn = TURN) -> NDArray[Any]:
    """``values`` after a journey, in float64."""
    codec = codec_named(name)
    unit = unit or Unit("parameters.float32", 0, 0, values.size)
    out = memoryview(bytearray(codec.size_bytes(unit, turn.round)))
    codec.encode(values, unit, turn, out)
    received = np.empty(values.size, np.float64)
    codec.decode(out, unit, turn, received)
    return received


def heavy(length: int, seed: int, scale: float) -> NDArray[np.float32]:
    """Values over many orders of magnitude, some of them zero, none below what scales can tell."""
    random = np.random.default_rng(seed)
    values = random.normal(size=length) ** 5
    values[(random.random(length) < 0.1) | (abs(values) < 1e-20)] = 0
    return np.asarray(scale * values, np.float32)


def peaks(values: NDArray[Any]) -> NDArray[Any]:
    """For each value the largest magnitude in its block."""
    starts = np.arange(0, values.size, BLOCK)
    sizes = np.diff([*starts, values.size])
    return np.repeat(np.maximum.reduceat(np.abs(values.astype(np.float64)), starts), sizes)


@settings(deadline=None, max_examples=30)
@given(LENGTHS, SEEDS, SCALES)
def test_int8_is_off_by_half_a_step_at_most(length: int, seed: int, scale: float) -> None:
    values = heavy(length, seed, scale)
    assert (abs(over("int8", values) - values) <= peaks(values) / 127 / 2 * ROUNDING).all()


@settings(deadline=None, max_examples=30)
@given(LENGTHS, SEEDS, SCALES)
def test_e3m0_is_off_by_a_third_or_the_least_magnitudes_half(length: int, seed: int, scale: float) -> None:
    values = heavy(length, seed, scale)
    bound = np.maximum(abs(values.astype(np.float64)) / 3, peaks(values) / 128)
    assert (abs(over("e3m0", values) - values) <= bound * ROUNDING).all()


def test_e3m0_rounds_to_the_nearest_of_its_sixteen_values() -> None:
    values = np.array([1, -1, 0.74, 0.76, -0.3, 2**-6, 1.01 * 2**-7, 0.99 * 2**-7, 0], np.float32)
    assert over("e3m0", values).tolist() == [1, -1, 0.5, 1, -0.25, 2**-6, 2**-6, 0, 0]


@pytest.mark.parametrize(
    ("name", "relative", "least"),
    [
        ("bf16", 2.0**-8, 0.0),
        ("fp8_e4m3", 2.0**-4, 2.0**-10 / 448),
        ("fp8_e5m2", 2.0**-3, 2.0**-17 / 57_344),
    ],
)
@settings(deadline=None, max_examples=20)
@given(length=LENGTHS, seed=SEEDS, scale=SCALES)
def test_narrow_floats_are_off_by_half_a_last_place(
    name: str, relative: float, least: float, length: int, seed: int, scale: float
) -> None:
    values = heavy(length, seed, scale)
    bound = np.maximum(abs(values.astype(np.float64)) * relative, abs(values).max() * least)
    assert (abs(over(name, values) - values) <= bound * ROUNDING).all()


def test_fp16_is_off_by_half_a_last_place_and_saturates() -> None:
    values = np.array([1 + 2**-11, 1e-8, -3.1, 65_504, 65_520, -1e30, 6e-5], np.float32)
    received = over("fp16", values)
    bound = np.maximum(abs(values.astype(np.float64)) * 2**-11, 2**-25)
    assert (abs(received - values)[[0, 1, 2, 3, 6]] <= bound[[0, 1, 2, 3, 6]]).all()
    assert received[[4, 5]].tolist() == [65_504, -65_504]


@settings(deadline=None, max_examples=30)
@given(LENGTHS, SEEDS, st.sampled_from([0.001, 0.1, 0.5, 1.0]))
def test_topk_keeps_the_largest_as_they_are(length: int, seed: int, fraction: float) -> None:
    values = heavy(length, seed, 1.0)
    received = over(f"topk:{fraction}", values)
    k = max(1, int(np.ceil(fraction * length)))
    kept = received != 0
    assert (received[kept] == values[kept]).all()
    assert np.array_equal(np.sort(abs(received))[-k:], np.sort(abs(values.astype(np.float64)))[-k:])
    assert ((values - received) ** 2).sum() <= (1 - k / length) * (
        values.astype(np.float64) ** 2
    ).sum() * ROUNDING


def test_scaled_sign_has_one_magnitude() -> None:
    assert over("sign", np.array([3, -1, -2, 0], np.float32)).tolist() == [1.5, -1.5, -1.5, 1.5]


@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e10])
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_powersgd_is_exact_up_to_its_rank(rank: int, scale: float) -> None:
    # Fixed seeds: how much of float32 is left depends on how far the random start is from the matrix's rows.
    random = np.random.default_rng(rank)
    product = random.normal(size=(24, rank)) @ random.normal(size=(rank, 17))
    values = np.concatenate([random.normal(size=5), scale * product.ravel(), random.normal(size=3)]).astype(
        np.float32
    )
    received = over("powersgd:4", values, Unit("parameters.float32", 0, 0, values.size, ((5, 24, 17),)))
    assert (received[:5] == values[:5]).all()
    assert (received[-3:] == values[-3:]).all()
    assert abs(received - values)[5:-3].max() <= 1e-5 * abs(values[5:-3]).max()


def test_powersgd_sends_small_matrices_as_they_are() -> None:
    values = np.arange(30, dtype=np.float32)
    unit = Unit("parameters.float32", 0, 0, 30, ((0, 5, 4), (20, 2, 5)))
    assert (over("powersgd:4", values, unit) == values).all()


def journeys(name: str, values: NDArray[np.float32], count: int = 500) -> NDArray[Any]:
    return np.stack([over(name, values, turn=Turn(3, round, 1)) for round in range(count)])


@pytest.mark.parametrize("name", ["qsgd:1", "qsgd:4", "qsgd:16", "terngrad", "randomk:0.1", "randomk:0.5"])
def test_unbiased_codecs_keep_the_mean(name: str) -> None:
    values = np.random.default_rng(2).normal(size=60).astype(np.float32)
    received = journeys(name, values)
    variance = ((received - values) ** 2).sum(axis=1).mean()
    error = ((received.mean(axis=0) - values) ** 2).sum()
    assert 0 < error < 1.5 * variance / len(received)
    assert variance > 0


@pytest.mark.parametrize("levels", [1, 4, 16, 127])
def test_qsgd_keeps_its_bound_of_the_variance(levels: int) -> None:
    d = 200
    values = np.random.default_rng(5).normal(size=d).astype(np.float32)
    variance = ((journeys(f"qsgd:{levels}", values, 150) - values) ** 2).sum(axis=1).mean()
    bound = min(d / levels**2, np.sqrt(d) / levels) * float(values @ values)
    assert bound / 10 < variance <= bound


def test_qsgd_takes_the_norm_of_what_cannot_be_squared() -> None:
    for scale in (1e-25, 1e25):
        values = (scale * np.random.default_rng(5).normal(size=20)).astype(np.float32)
        assert abs(over("qsgd:1000", values) / scale - values / scale).max() < 0.01


def test_random_k_has_the_variance_of_its_formula() -> None:
    values = np.random.default_rng(5).normal(size=200).astype(np.float32)
    variance = ((journeys("randomk:0.05", values) - values) ** 2).sum(axis=1).mean()
    assert variance / float(values @ values) == pytest.approx(200 / 10 - 1, rel=0.05)
