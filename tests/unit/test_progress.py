"""Committed totals, the conditions that end training, and when the weights are evaluated."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza_service.coordination.progress import RATE_WINDOW_S, TrainingProgress
from tests.harness import job_spec


def progress_of(**spec: Any) -> TrainingProgress:
    progress = TrainingProgress(job_spec(**spec))
    progress.start(100.0)
    return progress


def commit(
    progress: TrainingProgress,
    samples: int = 1,
    *,
    dropped: int = 0,
    steps: float = 1.0,
    loss: float | None = 1.0,
    now: float = 100.0,
) -> None:
    progress.commit(samples=samples, dropped=dropped, steps=steps, loss=loss, now=now)


@settings(deadline=None)
@given(workers=st.integers(1, 64), each=st.integers(1, 20))
def test_shares_of_steps_add_up_to_whole_ones(workers: int, each: int) -> None:
    progress = progress_of()
    for count in range(1, workers * each + 1):
        commit(progress, steps=1 / workers)
        assert progress.steps == count // workers


def test_a_round_in_which_nothing_was_merged_keeps_the_loss() -> None:
    progress = progress_of()
    commit(progress, 4, loss=0.5)
    commit(progress, 0, dropped=3, steps=0.0, loss=None)
    assert (progress.loss, progress.rounds, progress.samples, progress.dropped_samples) == (0.5, 2, 4, 3)


def test_the_end_is_the_nearest_one_that_is_known() -> None:
    progress = progress_of(data={"epochs": 3})
    assert progress.total_samples is None
    progress.dataset_size = 100
    assert progress.total_samples == 300
    progress.epochs = 2
    assert progress.total_samples == 200
    progress.spec = job_spec(stop={"samples": 150})
    assert progress.total_samples == 150


def test_samples_stop_at_the_round_that_reaches_them() -> None:
    progress = progress_of(stop={"samples": 10})
    commit(progress, 9)
    assert progress.stop_reason == ""
    commit(progress, 5)
    assert progress.stop_reason == "stop.samples: 14 samples are committed, 10 were asked for"


def test_seconds_stop_by_the_clock_alone() -> None:
    progress = progress_of(stop={"seconds": 30})
    progress.check_stop(129.9)
    assert progress.stop_reason == ""
    progress.check_stop(130.0)
    assert progress.stop_reason == "stop.seconds: trained for 30 s, 30 s were allowed"


@pytest.mark.parametrize(
    ("target", "values", "says"),
    [
        ({"metric": "f1", "above": 0.9}, [0.5, 0.9, 0.91], "stop.target: f1 is 0.91, above 0.9"),
        ({"metric": "error", "below": 0.1}, [0.5, 0.1, 0.05], "stop.target: error is 0.05, below 0.1"),
    ],
)
def test_a_target_is_crossed_not_touched(target: dict[str, Any], values: list[float], says: str) -> None:
    progress = progress_of(stop={"target": target})
    for value in values[:-1]:
        progress.report({target["metric"]: value}, 100.0)
        assert progress.stop_reason == ""
    progress.report({target["metric"]: values[-1]}, 100.0)
    assert progress.stop_reason == says


def test_the_training_loss_is_a_target_only_where_none_is_reported() -> None:
    spec = {"stop": {"target": {"metric": "loss", "below": 0.5}}}
    progress = progress_of(**spec)
    progress.report({"loss": 2.0}, 100.0)
    commit(progress, loss=0.1)
    assert progress.stop_reason == ""
    progress = progress_of(**spec)
    commit(progress, loss=0.1)
    assert progress.stop_reason == "stop.target: loss is 0.1, below 0.5"


def test_a_loss_that_is_not_a_number_reaches_no_target() -> None:
    for side in ("below", "above"):
        progress = progress_of(stop={"target": {"metric": "loss", side: 0.5}})
        commit(progress, loss=math.nan)
        commit(progress, loss=None)
        assert progress.stop_reason == ""


def test_the_first_reason_to_stop_stays() -> None:
    progress = progress_of(stop={"samples": 5, "seconds": 1})
    commit(progress, 5)
    reason = progress.stop_reason
    progress.check_stop(1e6)
    assert progress.stop_reason == reason != ""


@settings(deadline=None)
@given(
    every=st.integers(1, 50),
    rounds=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60),
)
def test_each_line_of_evaluation_is_due_once_however_large_the_rounds(
    every: int, rounds: list[tuple[int, int]]
) -> None:
    progress = progress_of(evaluation={"every_samples": every})
    total = given_at = 0
    for samples, dropped in rounds:
        commit(progress, samples, dropped=dropped)
        total += samples + dropped
        assert progress.evaluation_due() is (total // every > given_at // every)
        if progress.evaluation_due():
            progress.evaluation_given()
            given_at = total
        assert not progress.evaluation_due()


@pytest.mark.parametrize("size", [None, 0])
def test_without_a_dataset_no_evaluation_is_due(size: int | None) -> None:
    progress = progress_of()
    progress.dataset_size = size
    commit(progress, 100)
    assert not progress.evaluation_due()
    progress.evaluation_given()


def test_the_rate_is_that_of_the_latest_seconds() -> None:
    progress = progress_of()
    assert progress.rate(100.0) == 0.0
    for second in range(1, 31):
        commit(progress, 10 if second <= 15 else 50, now=100.0 + second)
    assert progress.rate(130.0) == pytest.approx(50.0)
    assert progress.rate(130.0 + RATE_WINDOW_S) == pytest.approx(25.0)
    assert len(progress._window) <= RATE_WINDOW_S + 2


def test_a_rate_needs_no_time_to_have_passed() -> None:
    progress = progress_of()
    commit(progress, 10, now=100.0)
    assert math.isfinite(progress.rate(100.0))
    commit(progress, 10, now=100.0)
    assert math.isfinite(progress.rate(100.0))


def test_no_time_passes_before_the_start() -> None:
    assert TrainingProgress(job_spec()).seconds(1e9) == 0.0
