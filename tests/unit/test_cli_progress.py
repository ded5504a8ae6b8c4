"""What a followed job looks like: a bar on a terminal, lines elsewhere, and the numbers in both."""

from __future__ import annotations

import io
from typing import Any

import pytest

from cadenza_api.cli.progress import Lines, display
from cadenza_api.cli.rendering import progress_text, seconds_left
from cadenza_api.client.watching import Update
from cadenza_api.sizes import human_bytes, human_seconds
from cadenza_api.views import EventView, JobView, ProgressView

TRAINED = {"samples": 250, "total_samples": 1000, "loss": 0.5, "samples_per_second": 50.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def update(samples: int, *messages: str, state: str = "RUNNING") -> Update:
    progress = TRAINED | {"samples": samples}
    document: dict[str, Any] = {
        "id": "a-1",
        "name": "a",
        "state": state,
        "created_at": 0,
        "progress": progress,
    }
    events = [{"seq": 1, "time": 0, "kind": "note", "message": message} for message in messages]
    return Update(JobView.model_validate(document), [EventView.model_validate(event) for event in events])


def test_lines_come_every_few_seconds_and_at_the_end() -> None:
    now = [0.0]
    stream = io.StringIO()
    lines = Lines(stream, clock=lambda: now[0])
    for second, samples in enumerate([0, 50, 100, 150, 200, 250, 300]):
        now[0] = second
        lines.show(update(samples))
    lines.show(update(350, "done [all]", state="SUCCEEDED"))
    shown = stream.getvalue().splitlines()
    assert [line.split("/")[0] for line in shown if "samples" in line] == ["50", "300", "350"]
    assert shown[-2].endswith("  done [all]")


def test_a_job_that_stands_still_prints_nothing_new() -> None:
    now = [0.0]
    stream = io.StringIO()
    lines = Lines(stream, clock=lambda: now[0])
    for second in range(0, 100, 10):
        now[0] = second
        lines.show(update(100))
    assert len(stream.getvalue().splitlines()) == 1


def test_a_terminal_gets_a_bar_with_events_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with display(terminal) as shown:
        shown.show(update(250, "sync [red]every[/red] 8 steps"))
    text = terminal.getvalue()
    for part in (
        "250/1,000 samples",
        "loss 0.5",
        "50 samples/s",
        "15s left",
        "25%",
        "sync [red]every[/red] 8 steps",
    ):
        assert part in text


def test_a_file_gets_plain_lines() -> None:
    stream = io.StringIO()
    with display(stream) as shown:
        shown.show(update(250))
        shown.tell("hello")
    assert stream.getvalue() == "250/1,000 samples, loss 0.5, 50 samples/s, 15s left\nhello\n"


@pytest.mark.parametrize(
    ("members", "left"),
    [
        ({}, None),
        ({"total_samples": 100}, None),
        ({"samples_per_second": 5.0}, None),
        ({"samples": 50, "total_samples": 100, "samples_per_second": 5.0}, 10),
        ({"samples": 150, "total_samples": 100, "samples_per_second": 5.0}, 0),
    ],
)
def test_time_left(members: dict[str, Any], left: float | None) -> None:
    assert seconds_left(ProgressView(**members)) == left


def test_progress_before_the_first_round() -> None:
    assert progress_text(ProgressView()) == "0 samples, loss -, 0 samples/s"


def test_sizes_and_durations() -> None:
    assert [human_bytes(size) for size in (0, 1023, 1536, 5 * 2**20, 3 * 2**30, 2**41)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
        "2.0 TiB",
    ]
    assert [human_seconds(seconds) for seconds in (0.04, 9.94, 59.4, 75, 3600, 7500)] == [
        "0.0s",
        "9.9s",
        "59s",
        "1m 15s",
        "1h 00m",
        "2h 05m",
    ]
