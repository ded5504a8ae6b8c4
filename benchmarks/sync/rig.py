"""Starts the processes of a measured job, each where it belongs, and ends them."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, Protocol, Self

ORDER_TIMEOUT_S = 600.0

Order = dict[str, Any]


class Places(Protocol):
    """Where processes run: nodes of a shaped network, or this machine."""

    def popen(self, node: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]: ...

    def address(self, node: str) -> str: ...


class Loopback:
    """Everything on this machine, over loopback."""

    def popen(self, node: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(list(argv), **options)

    def address(self, node: str) -> str:
        return "127.0.0.1"


class Process:
    """A node process: give it orders, then take their results."""

    def __init__(self, places: Places, node: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.node = node
        self.host = places.address(node)
        self._process = places.popen(
            node,
            [sys.executable, "-m", "benchmarks.sync.node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def give(self, order: str, **arguments: Any) -> None:
        """Send an order without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"order": order, **arguments}) + "\n")
        self._process.stdin.flush()

    def take(self) -> Order:
        """The result of the oldest order.

        Raises:
            RuntimeError: the order failed, with the process's traceback, or the process ended, or it took too long.
        """
        assert self._process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        watch = threading.Timer(ORDER_TIMEOUT_S, give_up)
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            why = f"took more than {ORDER_TIMEOUT_S:.0f} s for an order" if late.is_set() else "ended"
            raise RuntimeError(f"the process on {self.node} {why}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"on {self.node}: {answer['error']}")
        result: Order = answer["result"]
        return result

    def ask(self, order: str, **arguments: Any) -> Order:
        """Send an order and wait."""
        self.give(order, **arguments)
        return self.take()

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        """End it, at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Servers:
    """A job's shards and its coordinator; a context manager."""

    def __init__(
        self,
        places: Places,
        sync: dict[str, Any],
        *,
        workers: int,
        shards: Sequence[str],
        coordinator: str,
        together: bool = False,
        congestion_control: str = "auto",
        round_timeout_s: float = ORDER_TIMEOUT_S,
    ) -> None:
        """
        Args:
            sync: the section of the spec.
            workers: how many will join.
            shards: a node for each shard.
            coordinator: its node.
            together: shards and coordinator in one process.
            round_timeout_s: how long a round may wait.
        """
        self._key = secrets.token_hex(32)
        self.head = Process(places, coordinator)
        self.shards = [self.head if together else Process(places, node) for node in shards]
        try:
            for shard in self.shards:
                shard.give("shard", host=shard.host, key=self._key)
            self._address = self.head.ask(
                "coordinator",
                host=self.head.host,
                key=self._key,
                spec={"sync": sync},
                workers=workers,
                shards=[shard.take()["address"] for shard in self.shards],
                congestion_control=congestion_control,
                round_timeout_s=round_timeout_s,
            )["address"]
        except BaseException:
            self.end()
            raise

    def seat(self, worker: int) -> Order:
        """What a worker needs to join."""
        return {"coordinator": self._address, "key": self._key, "worker": worker}

    def processes(self) -> list[Process]:
        """Each once."""
        return list({id(process): process for process in (self.head, *self.shards)}.values())

    def end(self) -> None:
        for process in self.processes():
            process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Crew:
    """Worker processes, which may have places in several jobs; a context manager."""

    def __init__(self, places: Places, nodes: Sequence[str]) -> None:
        self.workers = [Process(places, node) for node in nodes]

    def open(self, name: str, program: str, servers: Servers | None = None, /, **arguments: Any) -> None:
        """Each worker opens ``module:Class`` as ``name``; in a job, it is given its ``seat``."""
        for number, worker in enumerate(self.workers):
            given = arguments | _seat(servers, number)
            worker.give("open", name=name, program=program, arguments=given)
        self._take()

    def act(self, name: str, method: str, servers: Servers | None = None, /, **arguments: Any) -> list[Order]:
        """Each worker calls a method of what it opened, all at the same moment; their results in order."""
        self.begin(name, method, servers, **arguments)
        return self._take()

    def begin(self, name: str, method: str, servers: Servers | None = None, /, **arguments: Any) -> None:
        """The same without waiting: each worker then has its result."""
        for number, worker in enumerate(self.workers):
            given = arguments | _seat(servers, number)
            worker.give("act", name=name, method=method, arguments=given)

    def _take(self) -> list[Order]:
        return [worker.take() for worker in self.workers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.end()


def _seat(servers: Servers | None, worker: int) -> Order:
    return {} if servers is None else {"seat": servers.seat(worker)}
