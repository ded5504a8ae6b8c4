"""A Ray cluster on a shaped network: one Ray node on each node."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from benchmarks.netlab.network import Network

GCS_PORT = 6379
START_TIMEOUT_S = 90.0
DEATH_TIMEOUT_S = 90.0
"""Ray takes 12 s to notice a killed node and 62 s for one that was cut off; see `RayCluster` for less."""

LOG_TAIL_CHARACTERS = 2000

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # No worker processes before somebody wants them: on a small machine they would take the time of what is measured.
    "RAY_enable_worker_prestart": "0",
    # All nodes share one machine's memory; each would count that of all.
    "RAY_memory_monitor_refresh_ms": "0",
}

QUICK_HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class RayCluster:
    """Ray on all nodes of a network, the first being the head; a context manager, inside the network's.

        with Network() as network, RayCluster(network) as cluster:
            cluster.run("head", [sys.executable, "driver.py"])  # There `ray.init()` finds the cluster.

    Each node has ``cpus`` CPUs and 1000 of the resource ``node:<name>``, to place actors with. With
    ``quick_health_checks`` a killed node is known to be dead after about 1 s and one that was cut off after 4 s.
    ``auth`` is what the service needs, a token that goes with the network, or ``disabled``: never Ray's default, which
    depends on whether anybody has ever started Ray in the user's home. Entering raises RuntimeError, with what a node
    said, where one does not start.
    """

    def __init__(
        self,
        network: Network,
        *,
        cpus: int = 2,
        object_store_bytes: int = 100 << 20,
        auth: Literal["token", "disabled"] = "token",
        quick_health_checks: bool = False,
        dashboard: bool = False,
    ) -> None:
        self.network = network
        self.head = network.nodes[0]
        self._cpus = cpus
        self._object_store_bytes = object_store_bytes
        self._auth = auth
        self._quick_health_checks = quick_health_checks
        self._dashboard = dashboard
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            for node in self.network.nodes:
                self._start(node)
            self._wait(alive=self.network.nodes, timeout_s=START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything on the nodes at once, drivers too."""
        for node in self.network.nodes:
            self._end(node)

    @property
    def address(self) -> str:
        """The cluster's, for ``ray.init`` on any of the nodes."""
        return f"{self.network.address(self.head)}:{GCS_PORT}"

    @property
    def environment(self) -> dict[str, str]:
        """This process's variables, and those that a driver on a node needs."""
        return self._node_environment() | {"RAY_ADDRESS": self.address}

    def popen(self, node: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """`Network.popen` for a driver: ``env`` adds to `environment`."""
        return self.network.popen(node, argv, **self._with_environment(options))

    def run(self, node: str, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """`Network.run` for a driver: ``env`` adds to `environment`."""
        return self.network.run(node, argv, **self._with_environment(options))

    def kill_node(self, node: str) -> None:
        """End everything on a node at once, as if it lost power; Ray may take a while to notice (`wait_dead`)."""
        self._end(node)

    def start_node(self, node: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start Ray on a node again after `kill_node`, and wait until the cluster has it. Not the head: all others
        would have to be down, since Ray looks through the whole machine for a cluster at a new head's address."""
        if node == self.head:
            raise ValueError(
                f"node {node!r} is the head: leave the cluster's `with` block and enter a new one"
            )
        self._start(node)
        self._wait(alive=[node], timeout_s=timeout_s)

    def wait_dead(self, node: str, timeout_s: float = DEATH_TIMEOUT_S) -> None:
        """Wait until the cluster knows that a node has gone; raises RuntimeError where it takes too long."""
        self._wait(dead=[node], timeout_s=timeout_s)

    def log(self, node: str) -> str:
        """What ``ray start`` said on a node."""
        return self._log_path(node).read_text(errors="replace")

    def _log_path(self, node: str) -> Path:
        return self.network.folder / f"{node}.log"

    def _start(self, node: str) -> None:
        environment = self._node_environment()
        if node == self.head and self._quick_health_checks:
            environment |= QUICK_HEALTH_CHECKS
        with self._log_path(node).open("ab") as log:
            self._processes[node] = self._spawn(node, environment, log)

    def _spawn(self, node: str, environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return self.network.popen(
            node,
            self._start_command(node),
            env=environment,
            cwd=self.network.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )

    def _start_command(self, node: str) -> list[str]:
        # Numbered, since the paths of the sockets below are long enough without a name.
        folder = self.network.folder / str(self.network.nodes.index(node))
        role = [f"--address={self.address}"]
        if node == self.head:
            role = ["--head", f"--port={GCS_PORT}", f"--include-dashboard={self._dashboard}"]
        return [
            str(Path(sys.executable).with_name("ray")),
            "start",
            *role,
            f"--node-ip-address={self.network.address(node)}",
            f"--num-cpus={self._cpus}",
            f"--object-store-memory={self._object_store_bytes}",
            f"--resources={json.dumps({f'node:{node}': 1000})}",
            f"--temp-dir={folder}",
            "--include-log-monitor=false",
            "--disable-usage-stats",
            "--block",
        ]

    def _node_environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        own: dict[str, str] = {"RAY_AUTH_MODE": self._auth}
        if self._auth == "token":
            own["RAY_AUTH_TOKEN_PATH"] = str(self._token_path())
        return inherited | QUIET | own

    def _token_path(self) -> Path:
        path = self.network.folder / "ray_token"
        with (
            contextlib.suppress(FileExistsError),
            path.open("x") as file,
        ):  # In a folder that is the user's alone.
            file.write(secrets.token_hex(32))
        return path

    def _with_environment(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | {"env": self.environment | dict(options.get("env") or {})}

    def _wait(self, *, alive: Sequence[str] = (), dead: Sequence[str] = (), timeout_s: float) -> None:
        """Until nodes are known to be alive or dead, or one that is awaited has ended instead."""
        began_s = time.monotonic()
        waiter = self._popen_waiter(alive, dead, timeout_s)
        starting = {node: self._processes[node] for node in alive}
        _until_one_ends([waiter, *starting.values()], timeout_s)
        failed = [node for node, process in starting.items() if process.poll() is not None]
        if waiter.poll() is None:
            waiter.kill()
        said = waiter.communicate()[1].decode(errors="replace")
        if failed or waiter.returncode:
            after_s = time.monotonic() - began_s
            what = f"after {after_s:.0f} s Ray does not have {list(alive)} alive and {list(dead)} dead: {said.strip()}"
            logs = "".join(
                f"\n{node} said: {self.log(node)[-LOG_TAIL_CHARACTERS:]}" for node in failed or alive
            )
            raise RuntimeError(what + logs)

    def _popen_waiter(
        self, alive: Sequence[str], dead: Sequence[str], timeout_s: float
    ) -> subprocess.Popen[bytes]:
        script = str(Path(__file__).with_name("alive.py"))
        argv = [sys.executable, "-P", script, self.address, str(timeout_s)]
        for option, nodes in (("--alive", alive), ("--dead", dead)):
            argv += [option, *map(self.network.address, nodes)]
        return self.popen(self.head, argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def _end(self, node: str) -> None:
        self.network.end_processes(node, patience_s=0)
        if process := self._processes.pop(node, None):
            process.wait()


def _until_one_ends(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    waiting = select.poll()
    with contextlib.ExitStack() as stack:
        for process in processes:
            handle = os.pidfd_open(process.pid)
            stack.callback(os.close, handle)
            waiting.register(handle, select.POLLIN)
        waiting.poll(timeout_s * 1000)
