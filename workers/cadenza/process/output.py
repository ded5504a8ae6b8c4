"""What a worker prints, line by line on its way to the coordinator, and on to the process's own streams.

Only Python's ``sys.stdout`` and ``sys.stderr`` are captured; what C code or a child process writes
reaches the process's own streams alone.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from cadenza.plane.messages import Stream

Line = tuple[float, Stream, str]
"""Seconds since the Unix epoch, stream, text."""

Send = Callable[[Sequence[Line]], None]
"""Takes lines in order; called from several threads, one at a time. It must not raise."""

LINE_LIMIT_BYTES = 8 * 1024
"""A longer line is cut: it is a dump, not a message."""
LINES_PER_SECOND = 1_000
"""What one worker may send; a print in an inner loop must not crowd out its training."""
BATCH_LINES = 100
BATCH_INTERVAL_S = 0.2
CLOSE_TIMEOUT_S = 5.0

_CUT_MARK = " … (cut)"


class Lines:
    """Cuts written text into lines, of bounded length. What a carriage return overwrites is left out."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """The lines that ``text`` completes."""
        *complete, rest = (self._rest + text).split("\n")
        self._rest = _bounded(rest)
        return [_shown(line) for line in complete]

    def end(self) -> list[str]:
        """The last line, if it was left without its end."""
        rest, self._rest = self._rest, ""
        return [_shown(rest)] if rest else []


def _shown(line: str) -> str:
    line = line.rstrip("\r").rsplit("\r", 1)[-1]
    data = line.encode("utf-8", "replace")
    if len(data) <= LINE_LIMIT_BYTES:
        return data.decode()
    return data[: LINE_LIMIT_BYTES - len(_CUT_MARK.encode())].decode("utf-8", "ignore") + _CUT_MARK


def _bounded(rest: str) -> str:
    """An unfinished line without what was overwritten, and no longer than it takes to see that it is too long."""
    if len(rest) <= LINE_LIMIT_BYTES:
        return rest
    ending = "\r" if rest.endswith("\r") else ""
    return rest.rstrip("\r").rsplit("\r", 1)[-1][: LINE_LIMIT_BYTES + 1] + ending


class Meter:
    """Lets through so many lines a second, and counts the others."""

    def __init__(self, lines_per_second: int = LINES_PER_SECOND) -> None:
        self._limit = lines_per_second
        self._second = 0
        self._passed = 0
        self._left_out = 0

    def passes(self, now_s: float) -> bool:
        """Whether one more line may go at ``now_s``, on any monotonic clock."""
        if int(now_s) != self._second:
            self._second, self._passed = int(now_s), 0
        if self._passed >= self._limit:
            self._left_out += 1
            return False
        self._passed += 1
        return True

    def take_left_out(self, now_s: float | None) -> int:
        """How many lines were left out since the last call; 0 in a second that is not over (``None``: it is)."""
        if now_s is not None and int(now_s) == self._second:
            return 0
        count, self._left_out = self._left_out, 0
        return count


class Output:
    """Collects lines of both streams and sends them in batches from a thread of its own."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._condition = threading.Condition()
        self._sending = threading.Lock()
        self._pending: list[Line] = []
        self._lines: dict[Stream, Lines] = {"stdout": Lines(), "stderr": Lines()}
        self._meter = Meter()
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._loop, name="output", daemon=True)
        self._thread.start()

    def write(self, stream: Stream, text: str) -> None:
        """Take text as it was written. Thread-safe."""
        if os.getpid() != self._process:
            return  # A forked child: nobody runs its copy of the thread, and its copy of the lock may be held.
        with self._condition:
            self._add(stream, self._lines[stream].feed(text))

    def flush(self) -> None:
        """Send what is there, unfinished lines too."""
        with self._condition:
            for stream, lines in self._lines.items():
                self._add(stream, lines.end())
            self._add_left_out(None)
        self._send_pending()

    def close(self) -> None:
        """Send what is left and end. Idempotent."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._condition.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        self.flush()

    def _add(self, stream: Stream, lines: list[str]) -> None:
        now = time.monotonic()
        self._add_left_out(now)
        for line in lines:
            if self._meter.passes(now):
                self._pending.append((time.time(), stream, line))
        if len(self._pending) >= BATCH_LINES:
            self._condition.notify()

    def _add_left_out(self, now_s: float | None) -> None:
        count = self._meter.take_left_out(now_s)
        if count:
            text = f"{count} lines left out: a worker may print {LINES_PER_SECOND} a second"
            self._pending.append((time.time(), "stderr", text))

    def _loop(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._closed or len(self._pending) >= BATCH_LINES, BATCH_INTERVAL_S
                )
                if self._closed:
                    return
                self._add_left_out(time.monotonic())
            self._send_pending()

    def _send_pending(self) -> None:
        with self._sending:  # Whole batches, in order.
            with self._condition:
                lines, self._pending = self._pending, []
            for start in range(0, len(lines), BATCH_LINES):
                self._send(lines[start : start + BATCH_LINES])


class Tee(io.TextIOBase):
    """A text stream that writes on to another one and to an :class:`Output`."""

    def __init__(self, stream: Stream, onward: TextIO, output: Output) -> None:
        self._stream = stream
        self._onward = onward
        self._output = output

    def write(self, text: str) -> int:
        self._onward.write(text)
        self._output.write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        self._onward.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._onward.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._onward.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._onward.errors

    @property
    def buffer(self) -> io.BufferedIOBase:
        """The real stream's bytes; what is written there is not captured."""
        return self._onward.buffer  # type: ignore[return-value]


@contextlib.contextmanager
def captured(send: Send) -> Iterator[Output]:
    """Send all that is printed meanwhile."""
    output = Output(send)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Tee("stdout", before[0], output), Tee("stderr", before[1], output)
    try:
        yield output
    finally:
        sys.stdout, sys.stderr = before
        output.close()
