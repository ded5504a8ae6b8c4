"""A whole job in one process: real shards, coordinator and links over loopback, workers as threads, no Ray."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.control import Control
from cadenza.plane.network import NetworkLink
from cadenza.spec import JobSpec
from cadenza_service.coordination.coordinator import CoordinatorConfig, CoordinatorServer
from cadenza_service.servers.shard import ShardServer
from cadenza_service.servers.state import fetch_state
from cadenza_service.snapshot import JobSnapshot

HOST = "127.0.0.1"
T = TypeVar("T")


def job_spec(**changes: Any) -> JobSpec:
    """A spec for tests; keyword arguments are the spec's own fields."""
    return JobSpec.model_validate({"name": "test", "entrypoint": "module:train", **changes})


class LocalCluster:
    """One attempt of a job; a context manager that leaves nothing behind."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        workers: int,
        shards: int = 2,
        join_timeout_s: float = 20.0,
        round_timeout_s: float = 30.0,
    ) -> None:
        self.key = secrets.token_bytes(32)
        self.workers = workers
        self.shards = [ShardServer(HOST, self.key, epoch=1) for _ in range(shards)]
        self.coordinator = CoordinatorServer(
            CoordinatorConfig(
                job_id="test",
                epoch=1,
                key=self.key,
                spec=spec,
                workers=tuple(range(workers)),
                incarnation=1,
                join_timeout_s=join_timeout_s,
                round_timeout_s=round_timeout_s,
                host=HOST,
                groups=spec.sync.groups or 1,
            )
        )
        self.coordinator.connect_shards([shard.address for shard in self.shards])

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.coordinator.close()
        for shard in self.shards:
            shard.close()

    def connect(self, worker: int) -> Control:
        """A worker's control connection."""
        host, port = self.coordinator.address
        return Control.connect(host, port, self.key, worker=worker, incarnation=1)

    def run(self, body: Callable[[int, NetworkLink], T], timeout_s: float = 120.0) -> list[T]:
        """Call ``body(worker, link)`` in one thread per worker and return the results in order.

        The first error of a worker is raised; the others' are chained away. A worker whose body raises
        leaves its connection open until all have ended, as a process with a traceback would.
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []
        threads = [
            threading.Thread(
                target=self._work, args=(worker, body, results, errors), name=f"worker {worker}", daemon=True
            )
            for worker in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
            if thread.is_alive():
                raise TimeoutError(f"{thread.name} is still running after {timeout_s} s")
        if errors:
            raise errors[0]
        return [results[worker] for worker in range(self.workers)]

    def snapshot(self) -> JobSnapshot:
        return self.coordinator.snapshot()

    def state(self) -> dict[str, NDArray[np.generic]]:
        """The committed vectors."""
        layout = self.coordinator.layout()
        assert layout is not None
        cut = self.coordinator.cut()
        return fetch_state([shard.address for shard in self.shards], self.key, 1, layout, cut)

    def _work(
        self,
        worker: int,
        body: Callable[[int, NetworkLink], T],
        results: dict[int, T],
        errors: list[BaseException],
    ) -> None:
        control = self.connect(worker)
        link = NetworkLink(control)
        try:
            results[worker] = body(worker, link)
        except BaseException as error:  # noqa: BLE001  (handed to the main thread)
            errors.append(error)
            self.coordinator.lost(worker, repr(error))
        finally:
            control.flush()
            link.close()
            control.close()
