"""One process of a measured job: a shard, the coordinator, or a worker that runs one of :mod:`benchmarks.sync.programs`.

``python -m benchmarks.sync.node`` reads its orders as lines of JSON and answers each with one. The processes are the
product's own servers and links, without Ray, so that they may be put into network namespaces one by one.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

from cadenza.plane.control import Control
from cadenza.plane.network import NetworkLink
from cadenza.spec import JobSpec
from cadenza_service.coordination import terms
from cadenza_service.coordination.coordinator import CoordinatorConfig, CoordinatorServer
from cadenza_service.servers.shard import ShardServer

Order = dict[str, Any]


class Node:
    """Carries orders out; keeps its servers until the process ends."""

    def __init__(self) -> None:
        self._servers: list[Any] = []

    def shard(self, host: str, key: str) -> Order:
        """Serve one shard; answers with its address."""
        server = ShardServer(host, bytes.fromhex(key), epoch=1)
        self._servers.append(server)
        return {"address": server.address}

    def coordinator(
        self,
        host: str,
        key: str,
        spec: Order,
        workers: int,
        shards: list[tuple[str, int]],
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
            join_timeout_s=120.0,
            round_timeout_s=round_timeout_s,
            host=host,
            groups=terms.groups(checked, dedicated=False),
            congestion_control=os.environ.get("CADENZA_CONGESTION_CONTROL", "auto"),
        )
        server = CoordinatorServer(config)
        server.connect_shards([(str(host), int(port)) for host, port in shards])
        self._servers.append(server)
        return {"address": server.address}

    def worker(
        self, coordinator: tuple[str, int], key: str, worker: int, program: str, arguments: Order
    ) -> Order:
        """Join the job and run ``module:function`` with the link; answers with what it returns."""
        host, port = coordinator
        control = Control.connect(host, port, bytes.fromhex(key), worker=worker, incarnation=1)
        link = NetworkLink(control)
        try:
            return self._call(program, link=link, **arguments)
        finally:
            link.close()
            control.close()

    def call(self, program: str, arguments: Order) -> Order:
        """Run ``module:function`` without a job."""
        return self._call(program, **arguments)

    def cpu(self) -> Order:
        """CPU seconds that the process has used."""
        times = os.times()
        return {"seconds": times.user + times.system}

    def _call(self, program: str, **arguments: Any) -> Order:
        module, _, name = program.partition(":")
        result: Order = getattr(importlib.import_module(module), name)(**arguments)
        return result


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
