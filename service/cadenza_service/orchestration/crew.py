"""The actors of one attempt, and the supervisor's calls to them; answers come back as events."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayError, RuntimeEnvSetupError

from cadenza.process.worker import WorkerJob
from cadenza_service.coordination import terms
from cadenza_service.jobs.storage import MODEL, PackageNotFound, Storage
from cadenza_service.orchestration import cluster, packages
from cadenza_service.orchestration.actors import Attempt, make_coordinator, make_shard, make_worker
from cadenza_service.orchestration.calls import Calls, is_final, why
from cadenza_service.orchestration.instructions import (
    COORDINATOR,
    ActorLost,
    ActorRefused,
    ActorStarted,
    Address,
    CoordinatorOpened,
    Event,
    ModelSaved,
    OpeningFailed,
    SaveModel,
    SnapshotMissed,
    SnapshotTaken,
    TakeSnapshot,
    WorkerEnded,
    shard_part,
    worker_part,
)
from cadenza_service.orchestration.model_file import write_model
from cadenza_service.orchestration.supervision import Found
from cadenza_service.servers.state import fetch_state

CALL_TIMEOUT_S = 10.0
"""For calls that take milliseconds in a living process."""

OPEN_TIMEOUT_S = 120.0
"""For the coordinator's connections to all shards, each of which has a deadline of its own."""

CONNECT_TIMEOUT_S = 30.0
"""For a worker's connection to the coordinator."""

HOLD_S = 300.0
"""How long one call that only notices a shard's end lasts; then comes the next."""

logger = logging.getLogger(__name__)


class Crew:
    """All processes of an attempt. Used from one thread, but for :meth:`save`."""

    def __init__(self, attempt: Attempt, calls: Calls) -> None:
        self._attempt = attempt
        self._calls = calls
        self._actors: dict[str, Any] = {}

    # --- coming up ---

    def start(self, shards: int, workers: int) -> None:
        """Make all actors; the coordinator first, so that where it alone is missing it is known to be lost."""
        coordinator = self._actors[COORDINATOR] = make_coordinator(self._attempt)
        self._expect(COORDINATOR, coordinator.ready.remote(), lambda _: ActorStarted(COORDINATOR))
        for number in range(shards):
            self._start_shard(number)
        environment = self._environment()
        for number in range(workers if environment is not None else 0):
            part = worker_part(number)
            worker = self._actors[part] = make_worker(self._attempt, number, environment or {})
            self._expect(part, worker.ready.remote(), lambda _, part=part: ActorStarted(part))

    def find(self) -> Found:
        """What exists of the attempt, taken over; for a supervisor that is back."""
        parts = cluster.job_actors().get(self._attempt.job_id, set())
        for part in parts:
            actor = cluster.find(self._attempt.job_id, part)
            if actor is not None:
                self._actors[part] = actor
        for part in list(self._actors):
            if part.startswith("shard:"):
                self._hold(part)
        return Found(frozenset(self._actors), self._opened())

    def open(self, shards: tuple[Address, ...]) -> None:
        """Let the coordinator connect to the shards."""

        def failed(error: Exception) -> Event:
            return OpeningFailed(why(error))

        reference = self._actors[COORDINATOR].open.remote(shards)
        self._calls.add(reference, lambda _: CoordinatorOpened(), failed, OPEN_TIMEOUT_S)

    def _start_shard(self, number: int) -> None:
        part = shard_part(number)
        shard = self._actors[part] = make_shard(self._attempt, number)
        self._expect(part, shard.address.remote(), lambda address: ActorStarted(part, address))
        self._hold(part)

    def _environment(self) -> dict[str, Any] | None:
        """What the workers' processes are made with; none, and an event, where the code is missing."""
        wanted = self._attempt.spec.runtime_env
        try:
            uri = None
            if wanted.package is not None:
                path = Storage(Path(self._attempt.storage)).package(wanted.package)
                uri = packages.publish(path, wanted.package)
        except (PackageNotFound, OSError, RuntimeError, ValueError) as error:
            self._calls.tell(ActorLost(worker_part(0), f"its code is not there: {error}", "package"))
            return None
        return packages.runtime_env(uri, wanted.pip, self._attempt.spec.env, self._attempt.start_timeout_s)

    def _opened(self) -> bool:
        try:
            return ray.get(self._actors[COORDINATOR].address.remote(), timeout=CALL_TIMEOUT_S) is not None
        except KeyError:
            return False
        except RayError as error:
            logger.warning("the coordinator does not answer: %s", why(error))
            del self._actors[COORDINATOR]
            return False

    # --- running ---

    def run_worker(self, worker: int) -> None:
        """Let a worker begin."""

        def with_address(address: Address) -> None:
            reference = self._actors[worker_part(worker)].run.remote(self._job(worker, address))
            self._until_end(worker, reference)

        reference = self._actors[COORDINATOR].address.remote()
        self._calls.add(reference, with_address, lambda error: self._gone(COORDINATOR, error), CALL_TIMEOUT_S)

    def watch_worker(self, worker: int) -> None:
        """Learn of the end of a worker that may have begun."""
        self._until_end(worker, self._actors[worker_part(worker)].end.remote())

    def poll(self, poll: TakeSnapshot) -> None:
        """Ask the coordinator."""

        def missed(error: Exception) -> Event:
            return self._gone(COORDINATOR, error) or SnapshotMissed()

        reference = self._actors[COORDINATOR].poll.remote(
            poll.after_event, poll.after_log, dict(poll.lost), poll.failure
        )
        self._calls.add(reference, SnapshotTaken, missed, CALL_TIMEOUT_S)

    def _job(self, worker: int, coordinator: Address) -> WorkerJob:
        attempt = self._attempt
        return WorkerJob(
            worker=worker,
            incarnation=attempt.epoch,
            entrypoint=attempt.spec.entrypoint,
            config=attempt.spec.config,
            seed=attempt.spec.seed,
            cpus=attempt.spec.workers.cpus,
            gpus=attempt.spec.workers.gpus,
            packaged=attempt.spec.runtime_env.package is not None,
            coordinator=coordinator,
            key=attempt.key,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )

    def _until_end(self, worker: int, reference: Any) -> None:
        def failed(error: Exception) -> Event | None:
            lost = self._gone(worker_part(worker), error)
            if lost is None:
                self.watch_worker(worker)  # Out of reach, maybe for a moment: its end is still to come.
            return lost

        self._calls.add(reference, lambda how: WorkerEnded(worker, ran=how is not None), failed)

    def _hold(self, part: str) -> None:
        """Learn of a shard's end as soon as it happens."""

        def failed(error: Exception) -> Event | None:
            lost = self._gone(part, error)
            if lost is None:
                self._hold(part)
            return lost

        self._calls.add(self._actors[part].hold.remote(HOLD_S), lambda _: self._hold(part), failed)

    def _expect(self, part: str, reference: Any, on_value: Any) -> None:
        """An actor's first answer; there is no deadline here, since the start has one for all of them."""

        def failed(error: Exception) -> Event | None:
            return self._gone(part, error)

        self._calls.add(reference, on_value, failed)

    def _gone(self, part: str, error: Exception) -> ActorLost | ActorRefused | None:
        """The loss that an error of a call means, if it means one."""
        if isinstance(error, ActorUnschedulableError):
            return ActorRefused(part)
        if not is_final(error):
            logger.info("%s of %s is out of reach: %s", part, self._attempt.job_id, why(error))
            return None
        return ActorLost(part, why(error), "runtime_env" if isinstance(error, RuntimeEnvSetupError) else "")

    # --- the end ---

    def save(self, instruction: SaveModel) -> ModelSaved:
        """Fetch the model from the shards and write it as the job's next checkpoint. Takes as long as it takes.

        Raises:
            RayError, ConnectionError, TimeoutError: an actor or shard does not answer.
            OSError, ValueError, RuntimeError: it cannot be written.
        """
        attempt = self._attempt
        layout = ray.get(self._actors[COORDINATOR].layout.remote(), timeout=CALL_TIMEOUT_S)
        shards = [self._actors[shard_part(number)].address.remote() for number in range(attempt.shards)]
        cut = terms.cut(attempt.spec, attempt.shards)
        vectors = fetch_state(
            ray.get(shards, timeout=CALL_TIMEOUT_S), attempt.key, attempt.epoch, layout, cut
        )
        storage = Storage(Path(attempt.storage))
        n = 1 + max((checkpoint.n for checkpoint in storage.checkpoints(attempt.job_id)), default=0)
        with storage.checkpoint_writer(
            attempt.job_id, n, round=instruction.round, samples=instruction.samples
        ) as folder:
            write_model(
                folder / MODEL, layout, vectors, {"job": attempt.job_id, "round": str(instruction.round)}
            )
            size_bytes = (folder / MODEL).stat().st_size
        return ModelSaved(n, size_bytes)
