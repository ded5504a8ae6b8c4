"""Single network namespaces: made, entered, emptied, removed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.netlab.tools import ToolFailed, ip

NAMED = Path("/run/netns")
FILES = Path("/etc/netns")
"""``ip netns exec`` lays the files of the folder FILES/<namespace> over those in /etc."""

CLONE_NEWNET = 0x40000000
PATIENCE_S = 3.0
"""Between asking processes to end and ending them."""

KILL_PATIENCE_S = 10.0
"""A killed process ends at once, unless a device holds it."""


def create(name: str) -> None:
    """Make a namespace with its loopback up; raises `ToolFailed` where the name is taken."""
    ip("netns", "add", name)
    ip("-n", name, "link", "set", "lo", "up")


def names() -> set[str]:
    """All namespaces of the machine that have a name or files under a name."""
    return {path.name for folder in (NAMED, FILES) if folder.is_dir() for path in folder.iterdir()}


def write_files(name: str, files: dict[str, str]) -> None:
    """Lay files over those in /etc, for processes that are started in the namespace from now on."""
    folder = FILES / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(text)


def remove(name: str, patience_s: float = PATIENCE_S) -> None:
    """End the namespace's processes, then remove it and its files; one that is not there is no error."""
    end(name, patience_s)
    shutil.rmtree(FILES / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        FILES.rmdir()  # Only where it is empty.
    if (NAMED / name).exists():
        try:
            ip("netns", "del", name)
        except ToolFailed:
            if (NAMED / name).exists():  # Else another process swept it away at the same time.
                raise


def argv_in(name: str, argv: Sequence[str]) -> list[str]:
    """A command line that runs another inside the namespace, under the same process id."""
    return ["ip", "netns", "exec", name, *argv]


def pids(name: str) -> list[int]:
    """The processes that are in the namespace now, as ``ip netns pids`` lists them."""
    try:
        wanted = (NAMED / name).stat()
    except FileNotFoundError:
        return []
    numbers = (int(entry) for entry in os.listdir("/proc") if entry.isdecimal())
    return [pid for pid in numbers if _is_in(pid, wanted)]


def end(name: str, patience_s: float = PATIENCE_S) -> None:
    """End every process of the namespace: SIGTERM, and SIGKILL for those that are left after ``patience_s``.

    Raises RuntimeError, naming them, where some outlive even that.
    """
    _signal_until_gone(name, signal.SIGTERM, patience_s)
    _signal_until_gone(name, signal.SIGKILL, KILL_PATIENCE_S)
    if left := _others(name):
        raise RuntimeError(
            f"processes {left} of namespace {name} did not end: remove them by hand, then sweep"
        )


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """The calling thread is in the namespace during the block; sockets stay where they were made."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(NAMED / name, os.O_RDONLY)
        try:
            _enter(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(home)
    finally:
        os.close(home)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def _is_in(pid: int, wanted: os.stat_result) -> bool:
    try:
        found = os.stat(f"/proc/{pid}/ns/net")
    except OSError:  # It has ended.
        return False
    return (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)


def _others(name: str) -> list[int]:
    return [pid for pid in pids(name) if pid != os.getpid()]


def _signal_until_gone(name: str, number: signal.Signals, patience_s: float) -> None:
    """Signal the namespace's processes, and again those that they forked meanwhile."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s and (found := _others(name)):
        with contextlib.ExitStack() as stack:
            handles = [stack.enter_context(_handle(pid)) for pid in found]
            wanted = (NAMED / name).stat()
            # A handle is of whoever has the number now: only if that one is in the namespace it is ours.
            ours = [
                handle for pid, handle in zip(found, handles, strict=True) if handle and _is_in(pid, wanted)
            ]
            for handle in ours:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
            _wait(ours, deadline_s)


@contextlib.contextmanager
def _handle(pid: int) -> Iterator[int | None]:
    """A descriptor that stays with the process; none where it has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _wait(handles: Sequence[int], deadline_s: float) -> None:
    """Until all of these processes have ended, or the deadline has passed."""
    waiting = select.poll()
    left = set(handles)
    for handle in left:
        waiting.register(handle, select.POLLIN)
    while left and (left_s := deadline_s - time.monotonic()) > 0:
        for handle, _ in waiting.poll(left_s * 1000):
            waiting.unregister(handle)
            left.discard(handle)
