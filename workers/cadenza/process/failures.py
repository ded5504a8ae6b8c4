"""How an error in a worker is told: its kind, one line, and the traceback from the user's own frames on."""

from __future__ import annotations

import os
import traceback
from types import TracebackType

from cadenza.plane.link import LinkError
from cadenza.plane.messages import Failed
from cadenza.process.entrypoint import EntrypointError

TRACEBACK_LIMIT_BYTES = 32 * 1024
"""Deep recursion makes megabytes; the ends tell where it began and what it died of."""

MESSAGE_LIMIT = 2_000
"""Characters of an error's own text."""

NEVER_STEPPED = "session.step was never called"
"""How the session's own error about that begins."""

_CALLERS = {
    "cadenza.process.worker",
    "cadenza.process.entrypoint",
    "importlib",
    "importlib._bootstrap",
    "importlib._bootstrap_external",
}
"""Modules whose frames stand above the user's in a traceback."""


def failure_of(error: BaseException, step: int | None, folder: str = "") -> Failed:
    """The report of an error that ended the user's function or its import.

    Args:
        error: what was raised.
        step: the worker's optimizer steps so far; none before it joined.
        folder: where the job's code lies on this node; its files are told by their path from there.
    """
    if isinstance(error, EntrypointError):
        return Failed("entrypoint", str(error), traceback_of(error.__cause__, folder), step, error.remedy)
    text = _line(error)
    if isinstance(error, LinkError):
        return Failed(
            "link", text, traceback_of(error, folder), step, "see the job's events for who was lost"
        )
    if isinstance(error, RuntimeError) and str(error).startswith(NEVER_STEPPED):
        remedy = "call session.step(loss) after each loss.backward()"
        return Failed("never_stepped", text, traceback_of(error, folder), step, remedy)
    return Failed(
        "user_error",
        text,
        traceback_of(error, folder),
        step,
        "the traceback tells where the training code raised it",
    )


def traceback_of(error: BaseException | None, folder: str = "") -> str:
    """The traceback as Python prints it, without the frames that called the user's code; empty for none."""
    if error is None:
        return ""
    lines = traceback.format_exception(type(error), error, _user_frames(error.__traceback__))
    text = "".join(lines)
    return shortened(text.replace(folder + os.sep, "") if folder else text)


def shortened(text: str) -> str:
    """The text, or its beginning and end where it is longer than the limit."""
    data = text.encode("utf-8", "replace")
    left_out = len(data) - TRACEBACK_LIMIT_BYTES
    if left_out <= 0:
        return data.decode()
    head = data[: TRACEBACK_LIMIT_BYTES // 4].decode("utf-8", "ignore")
    tail = data[-(TRACEBACK_LIMIT_BYTES * 3 // 4) + 64 :].decode("utf-8", "ignore")
    return f"{head}\n… {left_out} bytes left out …\n{tail}"


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _CALLERS:
        trace = trace.tb_next
    return trace


def _line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    return text if len(text) <= MESSAGE_LIMIT else text[:MESSAGE_LIMIT] + " …"
