"""The whole service on this machine: a local Ray head, the controller, and the API on Serve."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import ray
from ray import serve

from cadenza_api.server.secret_file import write_secret
from cadenza_api.server.serving import APPLICATION, application
from cadenza_service.jobs.storage import Storage
from cadenza_service.jobs.store import Store
from cadenza_service.orchestration import cluster
from cadenza_service.orchestration.controller import start_controller
from cadenza_service.settings import Settings

READY_TIMEOUT_S = 120.0
READY_POLL_S = 0.1
PROBE_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 5.0

SHORT_PATH = 30
"""Ray puts sockets below its folder, and a socket's path may have 107 characters, of which Ray needs about 65."""


class NotReady(Exception):
    """The service could not be started, or not in time."""


class Unwanted(Exception):
    """The service was told to stop before it was ready."""


@dataclass
class Service:
    """The running service; ``stop`` it in the thread that started it."""

    url: str
    _undo: ExitStack = field(repr=False)

    def stop(self) -> None:
        """Stop everything that was started, in reverse order; repeating it does nothing."""
        self._undo.close()


def run_service(settings: Settings, stop: threading.Event) -> Service:
    """Start the service and wait until it is ready. Whatever fails on the way stops what was started before it.

    The process works in an empty folder until the service is stopped. ``stop`` only cuts the start short.
    Raises NotReady, Unwanted, SchemaTooNew, and Ray's own errors.
    """
    settings.home.mkdir(parents=True, exist_ok=True)
    port = _port(settings)
    _prepare_files(settings)
    with ExitStack() as undo:
        folder = undo.enter_context(_private_folder())
        undo.enter_context(chdir(_made(folder / "run")))
        undo.enter_context(_ray_head(_made(folder / "ray"), settings.home / "logs"))
        _go_on(stop)
        undo.callback(_stop_jobs)
        start_controller(settings)
        _go_on(stop)
        undo.callback(serve.shutdown)
        _serve(settings, port, folder)
        undo.callback(_drain)
        url = f"http://{_reachable(settings.host)}:{port}"
        _wait_ready(url, stop)
        return Service(url, undo.pop_all())


def _go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise Unwanted("the service was told to stop before it was ready")


def _port(settings: Settings) -> int:
    """The port to listen on, which must be free; where none is set, one that is."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise NotReady(
                f"cannot listen on port {settings.port} of {settings.host}: {error.strerror}; "
                "stop what uses it, or set another CADENZA_PORT"
            ) from error
        return int(probe.getsockname()[1])


def _prepare_files(settings: Settings) -> None:
    """Make the schema before several processes open it, and forget uploads that an earlier end cut off."""
    Store.open(settings).close()
    Storage(settings.storage_path).remove_leftovers()


@contextmanager
def _private_folder() -> Iterator[Path]:
    parent = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="cadenza-", dir=parent if len(parent) <= SHORT_PATH else "/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # Ray's last processes may still write a line.


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@contextmanager
def _ray_head(folder: Path, logs: Path) -> Iterator[None]:
    """A Ray cluster of this machine alone; its logs are moved to ``logs`` when it ends."""
    ray.init(
        address="local",
        namespace=cluster.NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder),
    )
    try:
        yield
    finally:
        session = (folder / "session_latest").resolve()
        ray.shutdown()
        shutil.rmtree(logs, ignore_errors=True)
        if (session / "logs").is_dir():
            shutil.copytree(session / "logs", logs, symlinks=True)


def _stop_jobs() -> None:
    """End the controller, then what it made: unfinished jobs go on when the service starts again."""
    with suppress(ValueError):  # It is not there where it never came up.
        ray.kill(ray.get_actor(cluster.CONTROLLER, namespace=cluster.NAMESPACE), no_restart=True)
    for job_id, parts in cluster.job_actors().items():
        cluster.remove(job_id, parts)


def _serve(settings: Settings, port: int, folder: Path) -> None:
    token_file = None
    if settings.token is not None:
        token_file = write_secret(folder / "token", settings.token.get_secret_value())
    serve.start(proxy_location="HeadOnly", http_options={"host": settings.host, "port": port})
    target = serve.RunTarget(application(settings, token_file), name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _drain() -> None:
    """End the open event streams, which would hold the replica until it is cut off."""
    try:
        serve.get_app_handle(APPLICATION).drain.remote().result(timeout_s=DRAIN_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - told; the shutdown that follows cuts the streams anyway
        print(f"the event streams could not be ended in order: {error!r}", file=sys.stderr)


def _reachable(host: str) -> str:
    """How this machine itself reaches a listener on ``host``, as it stands in a URL."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{address}]" if ":" in address else address


def _wait_ready(url: str, stop: threading.Event) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    last = "no answer yet"
    # A proxy from the environment knows nothing of this machine's own addresses.
    with httpx.Client(trust_env=False, timeout=PROBE_TIMEOUT_S) as client:
        while time.monotonic() < deadline:
            try:
                answer = client.get(f"{url}/readyz")
            except httpx.TransportError as error:
                last = repr(error)
            else:
                if answer.is_success:
                    return
                last = answer.text
            _check_deployed()
            stop.wait(READY_POLL_S)
            _go_on(stop)
    raise NotReady(f"the service was not ready after {READY_TIMEOUT_S:.0f} s; {url}/readyz said last: {last}")


def _check_deployed() -> None:
    found = serve.status().applications.get(APPLICATION)
    if found is not None and found.status == "DEPLOY_FAILED":
        raise NotReady(f"the API could not be started: {found.message}")
