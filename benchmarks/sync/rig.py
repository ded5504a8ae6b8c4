"""Starts the processes of a measured job, each where it belongs, and ends them."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Protocol, Self

ORDER_TIMEOUT_S = 600.0


class Places(Protocol):
    """Where processes run: nodes of a rig, or this machine."""

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

    @property
    def pid(self) -> int:
        return self._process.pid

    def give(self, order: str, **arguments: Any) -> None:
        """Send an order without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"order": order, **arguments}) + "\n")
        self._process.stdin.flush()

    def take(self) -> dict[str, Any]:
        """The result of the oldest order; raises RuntimeError with the process's traceback."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process on {self.node} ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"on {self.node}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def ask(self, order: str, **arguments: Any) -> dict[str, Any]:
        """Send an order and wait."""
        self.give(order, **arguments)
        return self.take()

    def end(self) -> None:
        """End it, at once."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Job:
    """One job of plain processes; a context manager."""

    def __init__(
        self,
        places: Places,
        spec: dict[str, Any],
        *,
        workers: Sequence[str],
        shards: Sequence[str],
        coordinator: str,
        together: bool = False,
        round_timeout_s: float = 120.0,
    ) -> None:
        """
        Args:
            workers: a node for each worker.
            shards: a node for each shard.
            coordinator: its node.
            together: shards and coordinator in one process.
            round_timeout_s: how long a round waits for anybody.
        """
        self._key = secrets.token_hex(32)
        self.head = Process(places, coordinator)
        self.shards = [self.head if together else Process(places, node) for node in shards]
        self.workers = [Process(places, node) for node in workers]
        addresses = [shard.ask("shard", host=shard.host, key=self._key)["address"] for shard in self.shards]
        self._address = self.head.ask(
            "coordinator",
            host=self.head.host,
            key=self._key,
            spec=spec,
            workers=len(workers),
            shards=addresses,
            round_timeout_s=round_timeout_s,
        )["address"]

    def run(self, program: str, **arguments: Any) -> list[dict[str, Any]]:
        """Let every worker join and run a program; their results in order."""
        self.begin(program, **arguments)
        return [worker.take() for worker in self.workers]

    def begin(self, program: str, **arguments: Any) -> None:
        """Let every worker join and run a program, without waiting; each has its result."""
        for number, worker in enumerate(self.workers):
            worker.give(
                "worker",
                coordinator=self._address,
                key=self._key,
                worker=number,
                program=program,
                arguments=arguments,
            )

    def processes(self) -> list[Process]:
        """Each once."""
        return list({id(process): process for process in (self.head, *self.shards, *self.workers)}.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            process.end()
