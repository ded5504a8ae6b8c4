"""What is remembered for the control plane: numbers without gaps, pages, counters that add up."""

from __future__ import annotations

import math

import pytest

from cadenza.plane.messages import BUCKETS, SYNC_BOUNDS_S, Log, SyncPhase, Telemetry
from cadenza_service.coordination import recorder as module
from cadenza_service.coordination.recorder import PAGE, Recorder, WorkerRecord, finite, severity
from cadenza_service.snapshot import Event, Histogram


def telemetry(push: int = 0, pull: int = 0, phases: dict[SyncPhase, int] | None = None) -> Telemetry:
    """``phases``: by phase, so many observations of 0.03 s."""
    counts = {
        phase: (tuple(count if bound >= 0.03 else 0 for bound in (*SYNC_BOUNDS_S, math.inf)), 0.03 * count)
        for phase, count in (phases or {}).items()
    }
    return Telemetry(1, 2, 0.5, push, pull, 2 * push, 2 * pull, counts)


def with_events(count: int) -> Recorder:
    recorder = Recorder()
    for number in range(1, count + 1):
        recorder.event(float(number), "kind", f"event {number}")
    return recorder


def numbers(entries: list[Event]) -> list[int]:
    return [entry.number for entry in entries]


def test_entries_are_numbered_from_1_and_kept_until_they_are_stored() -> None:
    recorder = with_events(5)
    assert numbers(recorder.events_after(0)) == [1, 2, 3, 4, 5]
    assert numbers(recorder.events_after(0)) == [1, 2, 3, 4, 5]
    assert numbers(recorder.events_after(3)) == [4, 5]
    assert numbers(recorder.events_after(0)) == [4, 5], "what was stored is forgotten"
    assert numbers(recorder.events_after(99)) == []
    recorder.event(6.0, "kind", "next")
    assert numbers(recorder.events_after(5)) == [6]


def test_a_page_is_bounded_and_the_next_one_follows() -> None:
    recorder = with_events(PAGE + 3)
    first = recorder.events_after(0)
    assert len(first) == PAGE
    assert numbers(recorder.events_after(first[-1].number)) == [PAGE + 1, PAGE + 2, PAGE + 3]


def test_what_nobody_fetches_is_bounded_and_the_gap_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE", 10)
    recorder = with_events(module.MOST_EVENTS + 7)
    assert recorder.events_after(0)[0].number == 8
    lines = tuple((0.0, "stdout", str(number)) for number in range(module.MOST_LOG_LINES + 5))
    recorder.log(3, Log(lines))  # type: ignore[arg-type]
    first = recorder.logs_after(0)
    assert (first[0].number, first[0].text, first[0].worker, len(first)) == (6, "5", 3, 10)


def test_counters_add_up_over_workers_and_repeat() -> None:
    recorder = Recorder({number: WorkerRecord(number, 1) for number in range(3)})
    recorder.workers[0].telemetry = telemetry(10, 20, {"send": 2})
    recorder.workers[2].telemetry = telemetry(1, 2, {"send": 3, "wait": 1})
    for _ in range(2):
        told = recorder.telemetry()
        assert told.sync_bytes == {"push": 11, "pull": 22}
        assert told.sync_raw_bytes == {"push": 22, "pull": 44}
        assert {phase: histogram.counts[-1] for phase, histogram in told.sync_seconds.items()} == {
            "send": 5,
            "wait": 1,
        }
        assert told.sync_seconds["send"].counts[0] == 0
        assert math.isclose(told.sync_seconds["send"].sum, 0.15)
        assert recorder.wire_bytes() == 33


def test_a_snapshot_does_not_follow_the_recorder() -> None:
    recorder = Recorder()
    before = recorder.telemetry()
    recorder.staleness.observe(3)
    recorder.dropped["late"] += 1
    assert before.staleness is not None
    assert before.staleness.counts[-1] == 0
    assert before.dropped == {}


def test_a_histogram_is_cumulative() -> None:
    histogram = Histogram.empty([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.sum) == ([2, 3, 4], 12.0)


def test_a_worker_that_told_nothing_has_a_status() -> None:
    status = WorkerRecord(4, 2).status()
    assert (status.worker, status.state, status.steps, status.compute_seconds) == (4, "starting", 0, 0.0)
    record = WorkerRecord(4, 2, telemetry=telemetry())
    assert (record.status().steps, record.status().samples) == (1, 2)


def test_what_json_cannot_hold_becomes_text() -> None:
    odd = {
        1: math.nan,
        "b": [b"x", (math.inf, 2)],
        "c": {"d": -math.inf},
        "e": {1},
        "f": [True, None, "g", 0.5],
    }
    assert finite(odd) == {
        "1": "nan",
        "b": ["b'x'", ["inf", 2]],
        "c": {"d": "-inf"},
        "e": "{1}",
        "f": [True, None, "g", 0.5],
    }


def test_an_unknown_severity_is_not_overlooked() -> None:
    assert [severity(text) for text in ("info", "warning", "error", "fatal", "")] == [
        "info",
        "warning",
        "error",
        "warning",
        "warning",
    ]


def test_buckets_are_one_more_than_bounds() -> None:
    assert len(SYNC_BOUNDS_S) + 1 == BUCKETS
    assert list(SYNC_BOUNDS_S) == sorted(set(SYNC_BOUNDS_S))
