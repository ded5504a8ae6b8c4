"""Runs the service on this machine as a child process, for as long as a command needs it.

The child has an empty folder and nothing of the caller's on its path; it stops when it is told to, and
also when its standard input closes, so that it never outlives this process.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from cadenza_api.user_errors import ExitCode, UserError
from cadenza_service.settings import Settings

COMMAND = (sys.executable, "-P", "-m", "cadenza_api.server.deploy")
START_TIMEOUT_S = 180.0
"""A cold start on a small machine takes about half a minute."""

STOP_TIMEOUT_S = 60.0
"""Stopping the processes of several jobs takes seconds; beyond this the child hangs and is killed."""

LOG_LINES_SHOWN = 15


class ServiceFailed(UserError):
    """The service did not start, or ended by itself."""

    exit_code = ExitCode.FAILED


@dataclass(frozen=True)
class Service:
    """The running child."""

    url: str
    log: Path
    process: subprocess.Popen[str]

    def wait(self) -> None:
        """Return never: raises KeyboardInterrupt when this process is told to stop, or ServiceFailed."""
        code = self.process.wait()
        raise ServiceFailed(
            f"the service ended by itself with code {code}; the end of {self.log}:\n{_tail(self.log)}"
        )


@contextmanager
def running(settings: Settings, command: Sequence[str] | None = None) -> Iterator[Service]:
    """Start the service and wait until it is ready; stop it at the end and wait until it is gone.

    Raises ServiceFailed if the port is taken, another service uses the same home, or it does not get ready.
    ``command`` is run instead of the service, for tests.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    log = settings.home / "service.log"
    with _alone(settings.home) as lock, _termination_as_interrupt():
        _check_port(settings.host, settings.port)
        with _child(settings, command or COMMAND, log, lock) as process:
            try:
                service = Service(_ready_url(process, log), log, process)
                print(service.url, file=lock, flush=True)
                yield service
            finally:
                _stop(process)


@contextmanager
def _child(
    settings: Settings, command: Sequence[str], log: Path, lock: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    folder = settings.home / "empty"
    folder.mkdir(exist_ok=True)
    with (
        log.open("w") as log_file,
        subprocess.Popen(
            command,
            cwd=folder,
            env=_environment(settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the child in order.
            pass_fds=(
                lock.fileno(),
            ),  # The home stays taken until the child is gone, even if this process is killed.
        ) as process,
    ):
        yield process


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServiceFailed(
                f"cannot listen on port {port} of {host}: {error.strerror}; "
                "stop what uses it, or choose another with --port"
            ) from error


@contextmanager
def _alone(home: Path) -> Iterator[IO[str]]:
    """Hold ``home`` against a second service: two controllers over one job store would start every job twice."""
    with (home / "up.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            url = lock.read().strip() or "an address that it will print when it is ready"
            raise ServiceFailed(
                f"a service already uses {home}, at {url}; use that one with --url, or choose another folder with --home"
            ) from None
        lock.truncate(0)
        yield lock


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """A stop asked for by a signal or by a closed terminal is as orderly as one by Ctrl-C.

    SIGINT is taken even where a script started the service in its background, which ignores it; a closed terminal
    is not where nohup had it ignored.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment(settings: Settings) -> dict[str, str]:
    chosen = {
        "CADENZA_HOME": str(settings.home),
        "CADENZA_HOST": settings.host,
        "CADENZA_PORT": str(settings.port),
    }
    if settings.token:
        chosen["CADENZA_TOKEN"] = settings.token.get_secret_value()
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | chosen


def _ready_url(process: subprocess.Popen[str], log: Path) -> str:
    """The address from the line that the child prints when it is ready."""
    lines = _lines_of(process)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise ServiceFailed(
                f"the service was not ready within {START_TIMEOUT_S:.0f} s; the end of {log}:\n{_tail(log)}"
            ) from None
        if line is None:
            code = process.wait(STOP_TIMEOUT_S)
            raise ServiceFailed(f"the service did not start (code {code}); the end of {log}:\n{_tail(log)}")
        if url := _url_in(line):
            return url


def _lines_of(process: subprocess.Popen[str]) -> queue.SimpleQueue[str | None]:
    """What the child prints, line by line, then None. Read to its end, so that the child never blocks on a full pipe."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read(stream: IO[str]) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    assert process.stdout is not None
    threading.Thread(target=read, args=(process.stdout,), name="service-output", daemon=True).start()
    return lines


def _url_in(line: str) -> str | None:
    with suppress(ValueError):  # Other lines than the announced one are not ours to judge.
        document = json.loads(line)
        if isinstance(document, dict):
            return document.get("url")
    return None


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask the child to stop and wait for it. A second Ctrl-C, or a child that hangs, ends it the hard way."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)
        raise ServiceFailed(
            f"the service was killed ({type(error).__name__}); processes of its jobs may be left, "
            "and unfinished jobs go on at the next `cadenza up`"
        ) from error


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
