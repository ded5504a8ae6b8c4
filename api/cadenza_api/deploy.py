"""The service as a process of its own: ``python -P -m cadenza_api.deploy``.

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
from collections.abc import Callable
from types import FrameType

from pydantic import ValidationError

from cadenza_api.secret_file import write_secret
from cadenza_service.settings import Settings

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


def main() -> None:
    """Run until told to stop; an error that was foreseen is one line on stderr and exit code 1."""
    settings = _read_settings()
    _on_stop(_leave)
    _watch_parent()
    _prepare_environment(settings)
    # Ray reads its environment when it is imported.
    from cadenza_api.local_service import NotReady, run_service
    from cadenza_service.records import SchemaTooNew

    try:
        service = run_service(settings)
    except (NotReady, SchemaTooNew) as error:
        sys.exit(str(error))
    try:
        _on_stop(_leave)  # Ray has put its own handlers in their place.
        print(json.dumps({"url": service.url}), flush=True)
        threading.Event().wait()
    finally:
        _on_stop(signal.SIG_IGN)  # Being told twice must not cut the stopping short.
        service.stop()


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


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _on_stop(handler: Handler) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _watch_parent() -> None:
    """Stop when the pipe to whoever started this closes, which it does however they end."""
    mode = os.fstat(0).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        threading.Thread(target=_until_closed, name="parent", daemon=True).start()


def _until_closed() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
