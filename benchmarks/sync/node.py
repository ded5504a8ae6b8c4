"""One process of a measured job: a shard, the coordinator, or a worker that runs programs of this package.

``python -m benchmarks.sync.node`` reads its orders as lines of JSON and answers each with one. The processes are the
product's own servers and links, without Ray, so that they may be put into network namespaces one by one.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from cadenza.plane.connection import Connection
from cadenza.plane.messages import Decision, Request, Tentative
from cadenza.spec import JobSpec
from cadenza_service.coordination import terms
from cadenza_service.coordination.coordinator import CoordinatorConfig, CoordinatorServer
from cadenza_service.servers.shard import ShardServer
from cadenza_service.servers.slots import Slot

Order = dict[str, Any]

PATIENCE_S = 120.0
"""How long a job's processes wait for each other."""


class WatchedShard(ShardServer):
    """A shard that notes when it had all of a round, and when it was told that the round is decided."""

    def __init__(self, host: str, key: bytes) -> None:
        super().__init__(host, key, epoch=1)
        self.moments: list[tuple[float, float]] = []
        """Of each decision: monotonic seconds at which the latest part of an update was there, and of the decision."""
        self._arrived_at = 0.0

    def received(self, slot: Slot) -> None:
        self._arrived_at = time.monotonic()
        super().received(slot)

    def requested(self, connection: Connection, call: int, request: Request) -> None:
        self._arrived_at = time.monotonic()
        super().requested(connection, call, request)

    def decided(self, entry: Decision | Tentative) -> None:
        if isinstance(entry, Decision):
            self.moments.append((self._arrived_at, time.monotonic()))
        super().decided(entry)


class Node:
    """Carries orders out; keeps its servers and programs until the process ends."""

    def __init__(self) -> None:
        self._shard: WatchedShard | None = None
        self._coordinator: CoordinatorServer | None = None
        self._programs: dict[str, Any] = {}

    def shard(self, host: str, key: str) -> Order:
        """Serve one shard; answers with its address."""
        self._shard = WatchedShard(host, bytes.fromhex(key))
        return {"address": self._shard.address}

    def moments(self, count: int) -> Order:
        """When the shard had the latest ``count`` rounds, and when they were decided."""
        assert self._shard is not None, "the order shard comes first"
        return {"moments": self._shard.moments[-count:]}

    def coordinator(
        self,
        host: str,
        key: str,
        spec: Order,
        workers: int,
        shards: list[tuple[str, int]],
        congestion_control: str,
        round_timeout_s: float,
    ) -> Order:
        """Serve the coordinator of a job; answers with its address."""
        checked = JobSpec.model_validate({"name": "benchmark", "entrypoint": "module:train", **spec})
        config = CoordinatorConfig(
            job_id="benchmark",
            epoch=1,
            key=bytes.fromhex(key),
            spec=checked,
            workers=tuple(range(workers)),
            incarnation=1,
            join_timeout_s=PATIENCE_S,
            round_timeout_s=round_timeout_s,
            host=host,
            groups=terms.groups(checked, dedicated=False),
            congestion_control=congestion_control,
        )
        self._coordinator = CoordinatorServer(config)
        self._coordinator.connect_shards([(str(host), int(port)) for host, port in shards])
        return {"address": self._coordinator.address}

    def open(self, name: str, program: str, arguments: Order) -> Order:
        """Make an object of the class ``module:Class`` and keep it as ``name``."""
        module, _, kind = program.partition(":")
        self._programs[name] = getattr(importlib.import_module(module), kind)(**arguments)
        return {}

    def act(self, name: str, method: str, arguments: Order) -> Order:
        """Call a method of an open program, which returns plain data, or nothing."""
        result: Order | None = getattr(self._programs[name], method)(**arguments)
        return result or {}

    def usage(self) -> Order:
        """CPU seconds that the process has used, and the memory that it holds, in bytes."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"cpu_s": time.process_time(), "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE")}


def main() -> None:
    """Until standard input ends."""
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    node = Node()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"result": getattr(node, order.pop("order"))(**order)}
        except Exception:  # noqa: BLE001  (the driver raises it)
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
