"""One pace for all who send to a shard."""

from __future__ import annotations

import pytest

from cadenza.plane.inflow import FIRST_SHARE, LEAST_BYTES, WINDOW_S, Inflow, busiest

RATE = 2_000_000.0
FRAME = 64 << 10


def arrive(inflow: Inflow, start_s: float, rate: float, count: int) -> float:
    """So many frames at a rate; when the last one is there."""
    for number in range(count):
        begun_at = start_s + number * FRAME / rate
        inflow.came(FRAME, begun_at, begun_at + FRAME / rate)
    return start_s + count * FRAME / rate


def test_nothing_is_told_before_a_round_was_large_enough() -> None:
    inflow = Inflow()
    assert inflow.settle() is None
    inflow.came(LEAST_BYTES - 1, 0.0, 1.0)
    assert inflow.settle() is None


def test_the_first_pace_follows_the_busiest_time_of_a_round() -> None:
    inflow = Inflow()
    end_s = arrive(inflow, 0.0, RATE / 4, 8)  # As long as only one of four workers has begun.
    arrive(inflow, end_s, RATE, 32)
    assert inflow.settle() == pytest.approx(FIRST_SHARE * RATE, rel=0.02)


def test_calm_rounds_at_the_pace_raise_it_and_a_slower_one_does_not() -> None:
    inflow = Inflow()
    arrive(inflow, 0.0, RATE, 32)
    first = inflow.settle()
    assert first is not None
    arrive(inflow, 10.0, first, 32)
    second = inflow.settle()
    assert second is not None
    assert second > first
    arrive(inflow, 20.0, second / 2, 32)
    assert inflow.settle() == second


@pytest.mark.parametrize(
    ("arrivals", "rate"),
    [
        ([(0.0, 0), (1.0, 100)], 100.0),
        ([(0.0, 0), (0.1, 100)], 1000.0),
        ([(0.0, 0), (1.0, 10), (1.5, 110), (3.0, 120)], 200.0),
    ],
    ids=["one", "shorter than the window", "a burst"],
)
def test_the_busiest_window(arrivals: list[tuple[float, int]], rate: float) -> None:
    assert busiest(arrivals, WINDOW_S) == pytest.approx(rate)
