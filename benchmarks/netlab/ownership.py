"""Whose a network is, and that nothing of it stays when its owner has gone, however it went.

An exception or Ctrl-C leaves the context manager. SIGTERM and SIGHUP, which would end Python on the spot, are turned
into SystemExit, where nobody else handles them. What is still there when the interpreter ends is removed then. What
a killed process left is removed when the next network is made, or by ``python -m benchmarks.netlab sweep``.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from benchmarks.netlab import namespaces
from benchmarks.netlab.naming import SWITCH, NetworkName, start_of

LOCK = Path("/run/cadenza-netlab.lock")
SCRATCH = Path("/tmp")
"""Short: Ray's sockets lie below it, and a socket's path has at most 107 characters."""

_numbers = itertools.count()
_held: set[NetworkName] = set()


def claim() -> NetworkName:
    """Remove what dead owners left, then take a name with a free subnet by making its switch namespace."""
    _arm()
    pid = os.getpid()
    start = start_of(pid)
    if start is None:
        raise RuntimeError(f"/proc/{pid}/stat: not readable; /proc must be mounted")
    with _locked():
        _sweep()
        taken = {name.subnet for name in _known()}
        own = (NetworkName(pid, start, number) for number in _numbers)
        name = next(name for name in own if name.subnet not in taken)
        _held.add(name)
        namespaces.create(name.namespace(SWITCH))
    return name


def release(name: NetworkName, patience_s: float = namespaces.PATIENCE_S) -> None:
    """End all processes in the network and remove all that belongs to it. Does nothing in a fork of its owner."""
    if name.pid == os.getpid():
        _remove(name, patience_s)
        _held.discard(name)


def sweep() -> list[str]:
    """Remove what processes that are gone left behind; returns the names of those networks."""
    with _locked():
        return _sweep()


def scratch(name: NetworkName) -> Path:
    """A folder for the network's files; it goes with the network."""
    folder = SCRATCH / str(name)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _sweep() -> list[str]:
    dead = sorted((name for name in _known() if not name.owner_lives), key=str)
    for name in dead:
        _remove(name, patience_s=0)
    return [str(name) for name in dead]


def _remove(name: NetworkName, patience_s: float) -> None:
    for namespace in sorted(namespaces.names()):
        if NetworkName.of(namespace) == name:
            namespaces.remove(namespace, patience_s)
    shutil.rmtree(SCRATCH / str(name), ignore_errors=True)


def _known() -> set[NetworkName]:
    """The networks of all processes that there is any trace of."""
    traces = namespaces.names() | {path.name for path in SCRATCH.glob("cdz*")}
    return {name for trace in traces if (name := NetworkName.of(trace))}


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """One process at a time chooses a subnet or sweeps. The lock ends with its holder."""
    with LOCK.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _arm() -> None:
    """Have signals and the interpreter's end release what is held. Only the main thread may set handlers."""
    atexit.unregister(_release_all)
    atexit.register(_release_all)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    if not any(
        name.pid == os.getpid() for name in _held
    ):  # A fork, or long after: as if there were no handler.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(128 + number)


def _release_all() -> None:
    for name in sorted(_held, key=str):
        release(name, patience_s=0)
