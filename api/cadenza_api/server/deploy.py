"""The service as a process of its own: ``python -P -m cadenza_api.server.deploy``.

It takes its settings from the environment, prints one line of JSON with its ``url`` when it is ready, and runs
until it gets SIGTERM or SIGINT, or the pipe that is its standard input closes. Then everything that it started
is gone.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType

from pydantic import ValidationError

from cadenza_api.server.secret_file import write_secret
from cadenza_service.settings import Settings

ARM_EVERY_S = 0.2
"""While it starts, Ray puts a handler of its own in place of ours; so ours is put there again and again."""


def main() -> None:
    """Run until told to stop; an error that was foreseen is one line on stderr and exit code 1."""
    settings = _read_settings()
    stop = threading.Event()
    _watch_parent(stop)
    _prepare_environment(settings)
    # One thread from start to stop: Ray's processes end with the thread that started them. And not this thread,
    # where Ray would let a signal end it halfway through its start, with processes left.
    with ThreadPoolExecutor(1, thread_name_prefix="service") as pool:
        ended = pool.submit(_run, settings, stop)
        while not ended.done():
            _on_signal(stop)
            wait([ended], timeout=ARM_EVERY_S)
    problem = ended.result()
    if problem is not None:
        sys.exit(problem)


def _run(settings: Settings, stop: threading.Event) -> str | None:
    """Run the service until told to stop; returns what hindered it, if that was foreseen."""
    # Ray reads its environment when it is imported.
    from cadenza_api.server.local_service import NotReady, Unwanted, run_service
    from cadenza_service.jobs.records import SchemaTooNew

    try:
        service = run_service(settings, stop)
    except Unwanted:
        return None
    except (NotReady, SchemaTooNew) as error:
        return str(error)
    try:
        print(json.dumps({"url": service.url}), flush=True)
        stop.wait()
    finally:
        service.stop()
    return None


def _read_settings() -> Settings:
    try:
        return Settings()
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        sys.exit("\n".join(": ".join([*map(str, details["loc"]), details["msg"]]) for details in found))


def _prepare_environment(settings: Settings) -> None:
    """What Ray and the processes that it starts find in their environment, users' code among them."""
    os.environ.pop("CADENZA_TOKEN", None)  # It is for the API alone.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this Ray takes the address of a network for this machine's, and listens to everyone there.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
        settings.home.mkdir(parents=True, exist_ok=True)
        path = write_secret(settings.home / "ray_token", secrets.token_hex(32))
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)


def _on_signal(stop: threading.Event) -> None:
    def told(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told)


def _watch_parent(stop: threading.Event) -> None:
    """Stop when the pipe to whoever started this closes, which it does however they end."""
    mode = os.fstat(0).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        threading.Thread(target=_until_closed, args=(stop,), name="parent", daemon=True).start()


def _until_closed(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


if __name__ == "__main__":
    main()
