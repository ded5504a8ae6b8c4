"""Running iproute2's tools."""

from __future__ import annotations

import subprocess

TOOL_TIMEOUT_S = 20.0
"""They answer within milliseconds; this only keeps a wedged kernel lock from hanging a test run for ever."""


class ToolFailed(RuntimeError):
    """A tool ended with an error; the text has its command line and what it said."""


def tool(*argv: str) -> str:
    """Run a tool and return what it printed; raises `ToolFailed`."""
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    if ended.returncode:
        raise ToolFailed(f"`{' '.join(argv)}` ended with {ended.returncode}: {ended.stderr.strip()}")
    return ended.stdout


def ip(*argv: str) -> str:
    """`tool` for ``ip``."""
    return tool("ip", *argv)
