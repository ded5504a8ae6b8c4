"""Errors that a user can act on: each prints in a few plain lines, and carries the exit code of the command line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """What the ``cadenza`` command returns; documented in docs/cli.md."""

    SUCCESS = 0
    FAILED = 1
    """The job failed, or the service could not be started."""

    USAGE = 2
    """Wrong arguments, a wrong spec, or a folder that cannot be uploaded."""

    CANCELLED = 3
    UNREACHABLE = 4
    """Nothing answers at the URL."""

    REFUSED = 5
    """The service answered with a problem, for example that there is no such job."""

    INTERRUPTED = 130
    """Ctrl-C, as a shell reports it."""


class UserError(Exception):
    """Something that the user can put right; the message says what is wrong and what to do."""

    exit_code: ExitCode = ExitCode.USAGE


@dataclass(frozen=True)
class FieldProblem:
    """What is wrong with one field of a spec; the same four facts that the API's problem documents carry."""

    field: str
    """Dotted path, for example ``sync.mode``; empty where the spec as a whole is meant."""

    reason: str
    value: Any = None
    remedy: str = ""

    def __str__(self) -> str:
        shown = "" if self.value is None else f" (it is {_brief(self.value)})"
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.field + ': ' if self.field else ''}{self.reason}{shown}{remedy}"


def bullet_list(title: str, problems: Iterable[object]) -> str:
    """``title``, and each problem on a line of its own below it."""
    return "\n".join([title, *(f"  {problem}" for problem in problems)])


def _brief(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
