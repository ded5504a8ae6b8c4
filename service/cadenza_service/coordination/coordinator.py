"""The round coordinator's server: control connections to the workers, a log to every shard.

One place per job decides about rounds, data leases and the job's end. The decisions themselves are made by
the pure cores (:mod:`rounds`, :mod:`ledger`, :mod:`progress`); this module is locks, sockets and clocks.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from cadenza.plane.connection import Connection, Refusal, RefusedError
from cadenza.plane.layout import Cut, Layout
from cadenza.plane.messages import (
    Decision,
    Done,
    Ended,
    Exhausted,
    Failed,
    Finished,
    Join,
    Joined,
    Lease,
    Leased,
    Log,
    Notice,
    Received,
    Report,
    Telemetry,
    Tentative,
)
from cadenza.plane.transport import Server, connect
from cadenza.plane.wire import Identity, Role, Status
from cadenza.spec import JobSpec
from cadenza_service.coordination import terms
from cadenza_service.coordination.control import ShardLog, WorkerControl
from cadenza_service.coordination.ledger import Dataset, DatasetMismatch, Ledger
from cadenza_service.coordination.opening import ModelMismatch, Opening
from cadenza_service.coordination.progress import TrainingProgress
from cadenza_service.coordination.recorder import Recorder, WorkerRecord, severity
from cadenza_service.coordination.rounds import Dropped, Happened, JobFails, Output, Rounds, Stale, Used
from cadenza_service.snapshot import Failure, JobSnapshot

logger = logging.getLogger(__name__)

TICK_S = 0.25
SHARD_TIMEOUT_S = 30.0
SHARD_REMEDY = "look at its node (memory, preemption), then submit the job again"


class Phase(enum.StrEnum):
    """Where an attempt of a job stands."""

    JOINING = "joining"
    TRAINING = "training"
    COMPLETED = "completed"
    FAILED = "failed"


LEGAL_PHASES = frozenset(
    {
        (Phase.JOINING, Phase.TRAINING),
        (Phase.JOINING, Phase.FAILED),
        (Phase.TRAINING, Phase.COMPLETED),
        (Phase.TRAINING, Phase.FAILED),
    }
)


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """What one attempt of a job is made of."""

    job_id: str
    epoch: int
    key: bytes
    spec: JobSpec
    workers: tuple[int, ...]
    """The numbers of the workers that will join; training begins when all have."""
    incarnation: int
    """Of these workers; another one is refused."""
    join_timeout_s: float
    """How long the first worker to join waits for the last."""
    round_timeout_s: float
    """How long a round waits for its last contribution, and all workers for the first state to be published."""
    host: str
    groups: int = 1
    """Parts in which a barrier's round is answered."""
    congestion_control: str = "auto"
    """How connections between hosts share slow links; see :mod:`cadenza.plane.congestion`."""


class CoordinatorServer:
    """One attempt of one job."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._lock = threading.RLock()
        self._phase = Phase.JOINING
        self._failure: Failure | None = None
        self._progress = TrainingProgress(config.spec)
        self._ledger = Ledger()
        self._rounds: Rounds | None = None
        self._recorder = Recorder({w: WorkerRecord(w, config.incarnation) for w in config.workers})
        self._shards: list[Connection] = []
        self._addresses: tuple[tuple[str, int], ...] = ()
        self._controls: dict[int, Connection] = {}
        self._opening: Opening[tuple[Connection, int]] = Opening(
            config.workers,
            join_timeout_s=config.join_timeout_s,
            publish_timeout_s=config.round_timeout_s,
        )
        self._stopped = threading.Event()
        self._server = Server(config.host, config.key, self._accept, lambda _: WorkerControl(self))
        self._ticker = threading.Thread(target=self._tick_loop, name="coordinator clock", daemon=True)
        self._ticker.start()

    # --- for the supervisor ---

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that workers connect to."""
        return self._server.address

    def connect_shards(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Connect to the job's shards, in order; raises ConnectionError naming one that cannot be reached."""
        self._addresses = tuple((host, port) for host, port in addresses)
        identity = Identity(Role.COORDINATOR, epoch=self._config.epoch)
        for number, (host, port) in enumerate(self._addresses):
            handler = ShardLog(self, number)
            shard = connect(
                host,
                port,
                self._config.key,
                identity,
                handler,
                peer=f"shard {number}",
                timeout_s=SHARD_TIMEOUT_S,
            )
            self._shards.append(shard.start())

    def snapshot(self, after_event: int = 0, after_log: int = 0) -> JobSnapshot:
        """The state of the attempt, with the events and log lines that follow the given numbers.

        Entries up to these numbers are forgotten, so a caller gives them once it has stored them.
        """
        with self._lock:
            return JobSnapshot(
                phase=self._phase.value,
                progress=terms.public_progress(
                    self._progress, self._ledger, self._recorder, time.monotonic()
                ),
                telemetry=self._recorder.telemetry(),
                events=self._recorder.events_after(after_event),
                logs=self._recorder.logs_after(after_log),
                failure=self._failure,
            )

    def layout(self) -> Layout | None:
        """The model's layout; none before the first worker has joined."""
        return self._opening.layout

    def cut(self) -> Cut:
        """How the model is cut among the shards."""
        return terms.cut(self._config.spec, len(self._addresses))

    def lost(self, worker: int, why: str) -> None:
        """A worker's process ended; that is a failure unless it had finished or failed by itself."""
        with self._lock:
            record = self._recorder.workers[worker]
            if self._phase in (Phase.COMPLETED, Phase.FAILED) or (
                record.state == "finished" and not self._must_publish(worker)
            ):
                return
            record.state = "lost"
            message = f"worker {worker} was lost: {why}"
            remedy = "look at the worker's log and its node (memory, preemption), then submit the job again"
            self.fail(
                Failure(
                    kind="worker_lost", message=message, remedy=remedy, worker=worker, step=self._step(worker)
                )
            )

    def fail(self, failure: Failure, *, told_by: int | None = None) -> None:
        """End the attempt as failed; the first failure counts. Every worker is released with the reason.

        ``told_by`` is a worker that knows already: its connection stays for the rest of its log, or for a refusal.
        """
        with self._lock:
            if self._phase in (Phase.COMPLETED, Phase.FAILED):
                return
            self._move(Phase.FAILED)
            self._failure = failure
            self._recorder.failures[failure.kind] += 1
            self._event("failed", failure.message, "error", failure.model_dump(exclude_none=True))
            joining = self._opening.take_waiting()
            others = [control for worker, control in self._controls.items() if worker != told_by]
        refusal = Refusal("job_failed", failure.message)
        for connection, call in joining:
            connection.refuse(call, refusal)
        for control in others:
            # A worker in the middle of a round waits for an answer that will not come.
            control.send(Ended(failure.message))
            control.finish()

    def close(self) -> None:
        """End everything. Idempotent."""
        self._stopped.set()
        self._server.close()
        for shard in self._shards:
            shard.close()
        if self._ticker is not threading.current_thread():
            self._ticker.join(SHARD_TIMEOUT_S)

    # --- workers ---

    def _accept(self, identity: Identity) -> Status:
        known = identity.role is Role.WORKER and identity.worker in self._recorder.workers
        return Status.OK if known and identity.incarnation == self._config.incarnation else Status.STALE

    def greeted(self, connection: Connection) -> None:
        """A worker's first message on a connection."""
        with self._lock:
            self._controls[connection.identity.worker] = connection

    def disconnected(self, connection: Connection, error: Exception | None) -> None:
        """A worker's control connection ended."""
        if not self._stopped.is_set():
            self.lost(connection.identity.worker, f"its connection ended ({error})")

    def join(self, connection: Connection, call: int, message: Join) -> None:
        """A worker has its model; the last one to join makes all of them begin."""
        worker = connection.identity.worker
        with self._lock:
            self._check_phase(Phase.JOINING)
            try:
                last = self._opening.join(worker, message.layout, (connection, call), time.monotonic())
            except ModelMismatch as error:
                self.fail(Failure(kind="model_mismatch", message=str(error), worker=worker), told_by=worker)
                raise Refusal("model_mismatch", str(error)) from None
            record = self._recorder.workers[worker]
            record.state, record.node, record.device = "joining", message.node, message.device
            text = f"worker {worker} joined from {message.node} ({message.device})"
            self._event("worker_joined", text, data={"worker": worker})
        if last and self._assign(message.layout):
            self._let_publish()

    def _let_publish(self) -> None:
        with self._lock:
            if self._phase is Phase.JOINING:
                connection, call = self._opening.choose_publisher(time.monotonic())
                connection.reply(call, self._joined(publish=True))

    def ready(self, connection: Connection, call: int) -> None:
        """The first state is published: everyone begins."""
        with self._lock:
            self._check_phase(Phase.JOINING)
            if connection.identity.worker != self._opening.publisher:
                raise Refusal(
                    "not_publisher", "another worker publishes the first state, or not all have joined"
                )
            rounds = self._rounds_now()
            self._move(Phase.TRAINING)
            for worker in self._config.workers:
                rounds.join(worker, self._config.incarnation)
                self._recorder.workers[worker].state = "active"
            rounds.start()
            self._progress.start(time.monotonic())
            spec = self._config.spec
            text = terms.introduction(spec, workers=len(self._config.workers), shards=len(self._shards))
            self._event("training_started", text, data=terms.decision_in_force(spec))
            connection.reply(call, Done())
            for other, number in self._opening.take_waiting():
                other.reply(number, self._joined(publish=False))

    def lease(self, connection: Connection, call: int, message: Lease) -> None:
        """A worker wants samples."""
        worker = connection.identity.worker
        with self._lock:
            self._check_phase(Phase.TRAINING)
            dataset = Dataset(
                message.dataset_size, message.batch_size, message.shuffle, message.epochs, message.drop_last
            )
            try:
                self._ledger.declare(dataset, worker)
            except DatasetMismatch as error:
                failure = Failure(kind="dataset_mismatch", message=str(error), worker=worker)
                self.fail(failure, told_by=worker)
                raise Refusal("dataset_mismatch", str(error)) from None
            self._progress.dataset_size, self._progress.epochs = dataset.size, dataset.epochs
            if self._progress.stop_reason:
                connection.reply(call, Exhausted(self._progress.stop_reason))
                return
            rounds = self._rounds_now()
            grant = self._ledger.lease(worker, len(rounds.training()), in_step=rounds.in_step())
            if grant is None:
                connection.reply(call, Exhausted("all epochs are handed out"))
                return
            connection.reply(
                call, Leased(grant.lease, grant.epoch, grant.start, grant.stop, self._config.spec.seed)
            )

    def evaluating(self, connection: Connection, call: int) -> None:
        """A worker evaluates; the rounds go on without it."""
        worker = connection.identity.worker
        with self._lock:
            self._check_phase(Phase.TRAINING)
            self._carry_out(self._rounds_now().evaluating(worker, time.monotonic()))
            self._recorder.workers[worker].state = "evaluating"
        connection.reply(call, Done())

    def finish(self, connection: Connection, call: int) -> None:
        """A worker takes no more steps."""
        worker = connection.identity.worker
        with self._lock:
            self._check_phase(Phase.TRAINING)
            self._recorder.workers[worker].state = "finished"
            returned = self._ledger.release(worker)
            self._carry_out(self._rounds_now().finish(worker, time.monotonic()))
            self._event(
                "worker_finished",
                f"worker {worker} finished",
                data={"worker": worker, "returned_samples": returned},
            )
            connection.reply(call, Finished(last=self._must_publish(worker)))

    def published(self, connection: Connection, call: int) -> None:
        """The last worker has published the rest: the shards hold the whole model."""
        with self._lock:
            self._check_phase(Phase.TRAINING)
            if not self._must_publish(connection.identity.worker):
                raise Refusal("not_last", "only the worker that finishes last completes the model")
            self._move(Phase.COMPLETED)
            if unused := self._ledger.unused():
                why = self._progress.stop_reason or "the workers ended before the data did"
                self._event(
                    "data_left", f"{unused} samples were not trained on: {why}", data={"samples": unused}
                )
            progress = self._progress
            self._event(
                "training_completed",
                f"training completed: {progress.samples} samples in {progress.rounds} rounds",
                data={
                    "samples": progress.samples,
                    "rounds": progress.rounds,
                    "dropped_samples": progress.dropped_samples,
                },
            )
        connection.reply(call, Done())

    def failed(self, connection: Connection, message: Failed) -> None:
        """A worker reports that it failed."""
        worker = connection.identity.worker
        with self._lock:
            self._recorder.workers[worker].state = "failed"
            where = f"worker {worker}" + ("" if message.step is None else f", step {message.step}")
            self.fail(
                Failure(
                    kind=message.kind,
                    message=f"{where}: {message.message}",
                    remedy=message.remedy,
                    worker=worker,
                    step=message.step,
                    traceback=message.traceback or None,
                ),
                told_by=worker,
            )

    def report(self, worker: int, message: Report) -> None:
        """A worker reports metrics."""
        known = {name: value for name, value in message.metrics.items() if math.isfinite(value)}
        with self._lock:
            self._progress.report(known, time.monotonic())
            values = ", ".join(f"{name} {value:.6g}" for name, value in message.metrics.items())
            data = {
                "worker": worker,
                "metrics": dict(message.metrics),
                "round": self._progress.rounds,
                "samples": self._progress.samples,
            }
            self._event("metrics", f"round {self._progress.rounds}: {values}", data=data)

    def telemetry(self, worker: int, message: Telemetry) -> None:
        """A worker tells its figures."""
        with self._lock:
            self._recorder.workers[worker].telemetry = message

    def log(self, worker: int, message: Log) -> None:
        """A worker printed something."""
        with self._lock:
            self._recorder.log(worker, message)

    def notice(self, worker: int, message: Notice) -> None:
        """A worker makes an event."""
        with self._lock:
            self._event(
                message.kind, message.message, severity(message.severity), {**message.data, "worker": worker}
            )

    # --- shards ---

    def received(self, message: Received) -> None:
        """A shard has a worker's request."""
        with self._lock:
            if self._phase is not Phase.TRAINING:
                return
            rounds = self._rounds_now()
            if rounds.expects(message.key):
                self._note_request(message)
            if self._phase is Phase.TRAINING:
                self._carry_out(rounds.received(message, time.monotonic()))

    def shard_lost(self, number: int, error: Exception | None) -> None:
        """The connection to a shard ended."""
        if self._stopped.is_set():
            return
        self.fail(
            Failure(
                kind="shard_lost",
                message=f"parameter server {number} was lost: {error}",
                remedy=SHARD_REMEDY,
            )
        )

    # --- inside, with the lock held ---

    def _note_request(self, message: Received) -> None:
        worker = message.key.worker
        try:
            self._ledger.check(worker, message.spans + message.lost_spans)
        except ValueError as error:
            text = f"worker {worker} contributed samples that it does not hold: {error}"
            remedy = "this is a bug, please report it"
            self.fail(Failure(kind="protocol", message=text, remedy=remedy, worker=worker))
            return
        record = self._recorder.workers[worker]
        if message.steps:
            record.local_steps = message.steps
        if record.state == "evaluating":
            record.state = "active"

    def _carry_out(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            match output:
                case Decision() | Tentative():
                    for shard in self._shards:
                        shard.send(output)
                case Used(merged=merged, dropped=dropped):
                    self._ledger.commit(merged)
                    self._ledger.drop(dropped)
                case Dropped(reason=reason):
                    self._recorder.dropped[reason] += 1
                case Stale(versions=versions):
                    self._recorder.staleness.observe(versions)
                case Happened(kind=kind, message=message, severity=level, data=data):
                    self._event(kind, message, severity(level), dict(data))
                case JobFails(kind=kind, message=message, remedy=remedy, worker=worker):
                    step = None if worker is None else self._step(worker)
                    self.fail(Failure(kind=kind, message=message, remedy=remedy, worker=worker, step=step))

    def _assign(self, layout: Layout) -> bool:
        """Tell every shard what it holds, and wait until it has it; false if one does not take it, which fails the job."""
        spec = self._config.spec
        calls = [
            shard.call(
                terms.assign(
                    spec,
                    layout,
                    shard=number,
                    shards=len(self._shards),
                    groups=self._config.groups,
                    congestion_control=self._config.congestion_control,
                )
            )
            for number, shard in enumerate(self._shards)
        ]
        try:
            for call in calls:
                call.result(SHARD_TIMEOUT_S)
        except (ConnectionError, RefusedError, TimeoutError) as error:
            # Let through, it would end the connection of the worker that happened to join last.
            self.fail(
                Failure(kind="shard_lost", message=f"the layout was not taken: {error}", remedy=SHARD_REMEDY)
            )
            return False
        with self._lock:
            rules = terms.round_rules(
                spec,
                layout,
                epoch=self._config.epoch,
                shards=len(self._shards),
                round_timeout_s=self._config.round_timeout_s,
                groups=self._config.groups,
            )
            self._rounds = Rounds(rules, self._progress)
        return True

    def _joined(self, *, publish: bool) -> Joined:
        return terms.joined(
            self._config.spec,
            publish=publish,
            workers=len(self._config.workers),
            shards=self._addresses,
            round_timeout_s=self._config.round_timeout_s,
            congestion_control=self._config.congestion_control,
            fan_in=self._fan_in(),
        )

    def _fan_in(self) -> int:
        """How many workers on other hosts send to one shard at a time, since each sends to one after another."""
        workers = [control.peer_host for control in self._controls.values()]
        counts = [sum(worker != host for worker in workers) for host, _ in self._addresses]
        return max(1, math.ceil(max(counts) / len(counts)))

    def _check_phase(self, phase: Phase) -> None:
        if self._phase is Phase.FAILED and self._failure is not None:
            raise Refusal("job_failed", self._failure.message)
        if self._phase is not phase:
            raise Refusal("wrong_phase", f"the job is {self._phase.value}, not {phase.value}")

    def _move(self, to: Phase) -> None:
        if (self._phase, to) not in LEGAL_PHASES:
            raise ValueError(f"an attempt cannot go from {self._phase} to {to}")
        self._phase = to

    def _must_publish(self, worker: int) -> bool:
        """Whether ``worker`` is the one that completes the model: no other still trains, and none did it."""
        rounds = self._rounds
        return rounds is not None and not rounds.training() and rounds.last_finished == worker

    def _rounds_now(self) -> Rounds:
        if self._rounds is None:
            raise Refusal("not_started", "the job's workers have not all joined yet")
        return self._rounds

    def _step(self, worker: int) -> int | None:
        told = self._recorder.workers[worker].telemetry
        return told.steps if told is not None else None

    def _event(
        self, kind: str, message: str, level: str = "info", data: dict[str, object] | None = None
    ) -> None:
        logger.info("%s: %s", kind, message)
        self._recorder.event(time.time(), kind, message, severity(level), data)

    # --- time ---

    def _tick_loop(self) -> None:
        while not self._stopped.wait(TICK_S):
            with self._lock:
                self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        if self._phase is Phase.TRAINING and self._rounds is not None:
            self._progress.check_stop(now)
            self._carry_out(self._rounds.tick(now))
        if self._phase is Phase.JOINING and (failure := self._opening.overdue(now)) is not None:
            self.fail(failure)
