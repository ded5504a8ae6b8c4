"""What a worker prints: lines, limits, batches, and on to the real streams."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Sequence

import pytest

from cadenza.process.output import (
    BATCH_LINES,
    LINE_LIMIT_BYTES,
    LINES_PER_SECOND,
    Line,
    Lines,
    Meter,
    Output,
    captured,
)


class Sent:
    """Collects what is sent, and lets a test wait for it."""

    def __init__(self) -> None:
        self.batches: list[list[Line]] = []
        self.arrived = threading.Event()

    def __call__(self, lines: Sequence[Line]) -> None:
        self.batches.append(list(lines))
        self.arrived.set()

    @property
    def texts(self) -> list[tuple[str, str]]:
        return [(stream, text) for batch in self.batches for _, stream, text in batch]


def test_lines_are_put_together_from_pieces() -> None:
    lines = Lines()
    assert lines.feed("a") == []
    assert lines.feed("b\nc\n\nd") == ["ab", "c", ""]
    assert lines.end() == ["d"]
    assert lines.end() == []


def test_what_a_progress_bar_overwrote_is_left_out() -> None:
    lines = Lines()
    assert lines.feed("\r10 %\r20 %") == []
    assert lines.feed("\r100 %\n") == ["100 %"]
    assert lines.feed("windows\r\n") == ["windows"]


@pytest.mark.parametrize("letter", ["x", "é", "🎻"])
def test_a_long_line_is_cut_at_the_limit(letter: str) -> None:
    (line,) = Lines().feed(letter * 2 * LINE_LIMIT_BYTES + "\n")
    assert len(line.encode()) <= LINE_LIMIT_BYTES
    assert len(line.encode()) > LINE_LIMIT_BYTES - 32
    assert line.endswith("(cut)")
    assert line.startswith(letter)


def test_an_unfinished_line_takes_bounded_memory() -> None:
    lines = Lines()
    for _ in range(100):
        assert lines.feed("\r" + "x" * 1000) == []
    assert lines.feed("\rdone\n") == ["done"]
    for _ in range(100):
        lines.feed("y" * 1000)
    assert len(lines._rest) <= LINE_LIMIT_BYTES + 2
    (line,) = lines.feed("\n")
    assert line.endswith("(cut)")


def test_the_meter_counts_what_it_leaves_out_of_each_second() -> None:
    meter = Meter(lines_per_second=3)
    assert [meter.passes(7.1) for _ in range(5)] == [True, True, True, False, False]
    assert meter.take_left_out(7.9) == 0
    assert meter.take_left_out(8.0) == 2
    assert meter.take_left_out(9.0) == 0
    assert meter.passes(8.0)


def test_a_batch_goes_out_without_being_flushed() -> None:
    sent = Sent()
    output = Output(sent)
    output.write("stdout", "hello\n")
    assert sent.arrived.wait(5)
    assert sent.texts == [("stdout", "hello")]
    output.close()


def test_flush_sends_unfinished_lines_and_batches_are_bounded() -> None:
    sent = Sent()
    output = Output(sent)
    output.write("stderr", "".join(f"{i}\n" for i in range(250)) + "tail")
    output.flush()
    output.close()
    assert [text for _, text in sent.texts] == [*map(str, range(250)), "tail"]
    assert max(len(batch) for batch in sent.batches) <= BATCH_LINES


def test_too_many_lines_are_left_out_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cadenza.process.output.time.monotonic", lambda: 100.0)
    sent = Sent()
    output = Output(sent)
    output.write("stdout", "x\n" * (LINES_PER_SECOND + 500))
    output.close()
    texts = [text for _, text in sent.texts]
    assert texts.count("x") == LINES_PER_SECOND
    assert [text for text in texts if "500 lines left out" in text]


def test_captured_streams_write_on_and_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real_out, real_err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", real_out)
    monkeypatch.setattr(sys, "stderr", real_err)
    sent = Sent()
    with captured(sent):
        print("to out")
        print("to err", file=sys.stderr)
        sys.stdout.write("no end")
    assert sys.stdout is real_out
    assert sys.stderr is real_err
    assert real_out.getvalue() == "to out\nno end"
    assert real_err.getvalue() == "to err\n"
    assert sorted(sent.texts) == [("stderr", "to err"), ("stdout", "no end"), ("stdout", "to out")]


def test_all_is_sent_even_if_the_block_raises() -> None:
    sent = Sent()

    def fail() -> None:
        with captured(sent):
            print("before")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert ("stdout", "before") in sent.texts


def test_a_forked_child_prints_without_waiting_for_a_lock() -> None:
    sent = Sent()
    output = Output(sent)
    with output._condition:  # As the output's own thread may hold it in the moment of a fork.
        child = os.fork()
        if child == 0:
            output.write("stdout", "from the child\n")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    output.close()
    assert sent.texts == []
