"""The processes of a job as Ray actors: thin shells whose methods are quick, and how each is made.

All are named, detached and never restarted by Ray: what is lost is the supervisor's to decide about.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cadenza.plane.layout import Layout
from cadenza.process.worker import Worker
from cadenza.spec import JobSpec
from cadenza_service.coordination import terms
from cadenza_service.coordination.coordinator import CoordinatorConfig, CoordinatorServer
from cadenza_service.orchestration.cluster import NAMESPACE, actor_name
from cadenza_service.orchestration.instructions import COORDINATOR, Address, shard_part, worker_part
from cadenza_service.orchestration.resources import Placement
from cadenza_service.servers.shard import ShardServer
from cadenza_service.snapshot import Failure, JobSnapshot

SHELL_THREADS = 4
"""So that a quick call is not stuck behind one that connects or waits."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of a job: what its supervisor needs to make and run its processes."""

    job_id: str
    epoch: int
    key: bytes
    """The secret of its connections, 32 bytes."""
    spec: JobSpec
    placement: Placement
    storage: str
    """The folder of packages and checkpoints."""
    start_timeout_s: float
    join_timeout_s: float
    round_timeout_s: float
    congestion_control: str = "auto"

    @property
    def workers(self) -> int:
        """How many."""
        return len(self.placement.workers)

    @property
    def shards(self) -> int:
        """How many."""
        return len(self.placement.shards)


class ShardActor:
    """One shard's process."""

    def __init__(self, key: bytes, epoch: int) -> None:
        self._server = ShardServer(ray.util.get_node_ip_address(), key, epoch)
        self._never = threading.Event()

    def address(self) -> Address:
        """Host and port that workers, coordinator and observers connect to."""
        return self._server.address

    def hold(self, seconds: float) -> None:
        """Answer after so long; a caller that waits learns at once when this process ends."""
        self._never.wait(seconds)


class CoordinatorActor:
    """The process of the round coordinator."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._server: CoordinatorServer | None = None

    def ready(self) -> None:
        """Answers once the process is up."""

    def open(self, shards: tuple[Address, ...]) -> None:
        """Connect to the shards and listen for workers; raises ConnectionError naming a shard out of reach."""
        server = CoordinatorServer(coordinator_config(self._attempt, ray.util.get_node_ip_address()))
        try:
            server.connect_shards(shards)
        except ConnectionError:
            server.close()
            raise
        self._server = server

    def address(self) -> Address | None:
        """Host and port that workers connect to; none before it was opened."""
        return self._server.address if self._server is not None else None

    def poll(
        self, after_event: int, after_log: int, lost: Mapping[int, str], failure: Failure | None
    ) -> JobSnapshot:
        """Hear what only the supervisor knows, and tell what is new. Hearing it twice changes nothing."""
        server = self._opened()
        for worker, why in lost.items():
            server.lost(worker, why)
        if failure is not None:
            server.fail(failure)
        return server.snapshot(after_event, after_log)

    def layout(self) -> Layout | None:
        """The model's layout; none before a worker has joined."""
        return self._opened().layout()

    def _opened(self) -> CoordinatorServer:
        if self._server is None:
            raise RuntimeError("the coordinator has not been opened yet")
        return self._server


def coordinator_config(attempt: Attempt, host: str) -> CoordinatorConfig:
    """The coordinator's part of an attempt; the workers' incarnation is the attempt's epoch."""
    return CoordinatorConfig(
        job_id=attempt.job_id,
        epoch=attempt.epoch,
        key=attempt.key,
        spec=attempt.spec,
        workers=tuple(range(attempt.workers)),
        incarnation=attempt.epoch,
        join_timeout_s=attempt.join_timeout_s,
        round_timeout_s=attempt.round_timeout_s,
        groups=terms.groups(attempt.spec, dedicated=attempt.placement.choice == "dedicated"),
        congestion_control=attempt.congestion_control,
        host=host,
    )


def make_coordinator(attempt: Attempt) -> Any:
    """The coordinator's actor."""
    return _make(
        CoordinatorActor, attempt.job_id, COORDINATOR, num_cpus=0, max_concurrency=SHELL_THREADS
    ).remote(attempt)


def make_shard(attempt: Attempt, shard: int) -> Any:
    """A shard's actor, on the node that was decided on."""
    options = _make(
        ShardActor,
        attempt.job_id,
        shard_part(shard),
        num_cpus=attempt.spec.servers.cpus,
        max_concurrency=SHELL_THREADS,
        scheduling_strategy=_on(attempt.placement.shards[shard]),
    )
    return options.remote(attempt.key, attempt.epoch)


def make_worker(attempt: Attempt, worker: int, runtime_env: dict[str, Any]) -> Any:
    """A worker's actor, on the node that was decided on. It has one thread, so that its long method runs on the process's main thread."""
    workers = attempt.spec.workers
    return _make(
        Worker,
        attempt.job_id,
        worker_part(worker),
        num_cpus=workers.cpus,
        num_gpus=workers.gpus,
        runtime_env=runtime_env,
        scheduling_strategy=_on(attempt.placement.workers[worker]),
    ).remote()


def _on(node_id: str) -> NodeAffinitySchedulingStrategy:
    """That node and no other: admission counted on it. Where it is gone, Ray refuses the actor at once."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _make(kind: type, job_id: str, part: str, **options: Any) -> Any:
    return ray.remote(kind).options(
        name=actor_name(job_id, part), namespace=NAMESPACE, lifetime="detached", max_restarts=0, **options
    )
