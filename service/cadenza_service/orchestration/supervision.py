"""What a job's supervisor does next: a state machine without Ray, threads or a clock.

Events say what happened, instructions what to do; :mod:`cadenza_service.orchestration.supervisor` carries them out.

    PLACING    every actor of the job comes up; past the deadline, or where the node of one is gone, the job
               gives all back and waits again
    OPENING    the coordinator connects to the shards
    TRAINING   the workers run; the coordinator is polled, and what it tells is reported
    CLOSING    training is over, well or not: the model is written, the last events and lines come in
    ENDING     the outcome is reported, until the controller has it
    ENDED      nothing more to do; the controller removes the actors

All times are seconds on one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cadenza_service.orchestration.instructions import (
    COORDINATOR,
    ActorLost,
    ActorRefused,
    ActorStarted,
    Address,
    CoordinatorOpened,
    Event,
    Failed,
    Instruction,
    Interrupted,
    ModelSaved,
    OpenCoordinator,
    OpeningFailed,
    Outcome,
    ReportAnswered,
    ReportMissed,
    RunWorker,
    SaveModel,
    SavingFailed,
    SendReport,
    SnapshotMissed,
    SnapshotTaken,
    StartActors,
    Succeeded,
    TakeSnapshot,
    Unplaced,
    WatchWorker,
    WorkerEnded,
    shard_part,
    worker_part,
)
from cadenza_service.orchestration.reporting import Polls, Reports, more_after
from cadenza_service.orchestration.worker_ends import WorkerEnds
from cadenza_service.snapshot import Failure, JobSnapshot

SILENCE_S = 30.0
"""A coordinator that has not answered for this long is lost: its calls take milliseconds."""

LAST_WORDS_S = 60.0
"""How long the user's code may go on after its job is complete, before its process is ended."""

DRAIN_S = 15.0
"""How long a failed job's last events and log lines are waited for."""

START_REMEDIES = {
    "worker_lost": "look at its node (memory, preemption), then submit the job again",
    "runtime_env": "check runtime_env.pip: each line must install with pip on the workers' nodes",
    "package": "upload the job's code again: cadenza submit does it",
}
"""By the kind of failure of a worker that did not start."""


class Stage(StrEnum):
    """Where the supervision of one attempt is."""

    PLACING = "placing"
    OPENING = "opening"
    TRAINING = "training"
    CLOSING = "closing"
    ENDING = "ending"
    ENDED = "ended"


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.PLACING: frozenset({Stage.OPENING, Stage.TRAINING, Stage.ENDING, Stage.ENDED}),
    Stage.OPENING: frozenset({Stage.TRAINING, Stage.ENDING, Stage.ENDED}),
    Stage.TRAINING: frozenset({Stage.CLOSING, Stage.ENDING, Stage.ENDED}),
    Stage.CLOSING: frozenset({Stage.ENDING, Stage.ENDED}),
    Stage.ENDING: frozenset({Stage.ENDED}),
    Stage.ENDED: frozenset(),
}
"""Every legal move. PLACING leads to TRAINING where a restarted supervisor finds all of it running."""

_STARTING = (Stage.PLACING, Stage.OPENING)
_OVER = (Stage.ENDING, Stage.ENDED)


@dataclass(frozen=True)
class Found:
    """What a restarted supervisor finds of its attempt."""

    parts: frozenset[str]
    opened: bool
    """Whether the coordinator had connected to the shards."""


class Supervision:
    """The supervision of one attempt of one job."""

    def __init__(self, *, shards: int, workers: int, start_timeout_s: float, now_s: float) -> None:
        self.stage = Stage.PLACING
        self._shards = shards
        self._workers = workers
        self._began_at_s = now_s
        self._start_timeout_s = start_timeout_s
        self._awaited = {COORDINATOR, *map(shard_part, range(shards)), *map(worker_part, range(workers))}
        self._addresses: dict[str, Address] = {}
        self._polls = Polls(now_s)
        self._reports = Reports(now_s)
        self._snapshot: JobSnapshot | None = None
        self._ends = WorkerEnds(workers)
        self._failure: Failure | None = None
        """What the coordinator is told to end the job for."""
        self._closed_at_s = 0.0
        self._result: Succeeded | Failed | None = None
        """How training ended, while the rest is still coming in."""
        self._outcome: Outcome | None = None
        """How the attempt ended."""

    # --- the ways in ---

    def begin(self, now_s: float) -> list[Instruction]:
        """The first instructions of a fresh attempt."""
        return [StartActors(self._shards, self._workers), *self.tick(now_s)]

    def resume(self, found: Found, now_s: float) -> list[Instruction]:
        """The first instructions of a supervisor that was lost and started again."""
        missing = sorted(self._awaited - found.parts)
        if not found.opened:
            if COORDINATOR in missing and found.parts:
                self._fail(_lost(COORDINATOR, "it ended while the supervisor was away"))
            else:
                self._end(Interrupted())
            return self.tick(now_s)
        self._awaited.clear()
        self._move(Stage.TRAINING)
        for part in missing:
            self._lose(ActorLost(part, "its process ended while the supervisor was away"), now_s)
        present = [worker for worker in range(self._workers) if worker_part(worker) in found.parts]
        return [*map(WatchWorker, present), *self.tick(now_s)]

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take note of what happened, and say what to do now."""
        return [*self._react(event, now_s), *self.tick(now_s)]

    def tick(self, now_s: float) -> list[Instruction]:
        """Say what is due, whether or not anything happened."""
        if self.stage in _STARTING:
            self._check_start(now_s)
        elif self.stage not in _OVER:
            self._check_silence(now_s)
            self._ends.give_up(self._snapshot, now_s)
            self._check_closed(now_s)
        return [*self._poll(now_s), *self._report(now_s)]

    def abandon(self, failure: Failure) -> None:
        """End as failed without any further step: the one who carries out instructions could not."""
        self._fail(failure)

    # --- events ---

    def _react(self, event: Event, now_s: float) -> list[Instruction]:
        match event:
            case ActorStarted(part, address):
                return self._started(part, address)
            case CoordinatorOpened():
                return self._opened(now_s)
            case OpeningFailed(why):
                message = f"the coordinator could not connect to the shards: {why}"
                self._fail(Failure(kind="shard_lost", message=message, remedy="submit the job again"))
            case ActorLost():
                self._lose(event, now_s)
            case ActorRefused(part) if self.stage in _STARTING:
                self._end(Unplaced((part,), now_s - self._began_at_s, node_gone=True))
            case WorkerEnded(worker, ran):
                return self._worker_ended(worker, ran, now_s)
            case SnapshotTaken(snapshot):
                return self._took(snapshot, now_s)
            case SnapshotMissed():
                self._polls.missed(now_s)
            case ReportAnswered(stop):
                self._answered(stop, now_s)
            case ReportMissed():
                self._reports.missed(now_s)
            case ModelSaved(n, size_bytes):
                self._result = Succeeded(n, size_bytes)
            case SavingFailed(why):
                message = f"training is complete, but its model could not be saved: {why}"
                remedy = "see that CADENZA_STORAGE can be written to, then submit the job again"
                self._fail(Failure(kind="model_not_saved", message=message, remedy=remedy))
        return []

    def _started(self, part: str, address: Address | None) -> list[Instruction]:
        self._awaited.discard(part)
        if address is not None:
            self._addresses[part] = address
        if self._awaited or self.stage is not Stage.PLACING:
            return []
        self._move(Stage.OPENING)
        return [OpenCoordinator(tuple(self._addresses[shard_part(shard)] for shard in range(self._shards)))]

    def _opened(self, now_s: float) -> list[Instruction]:
        if self.stage is not Stage.OPENING:
            return []
        self._move(Stage.TRAINING)
        self._polls.heard_at_s = now_s
        return [RunWorker(worker) for worker in range(self._workers)]

    def _worker_ended(self, worker: int, ran: bool, now_s: float) -> list[Instruction]:
        if not ran and self.stage is Stage.TRAINING:
            return [RunWorker(worker)]
        self._ends.ended(worker, now_s)
        return []

    def _lose(self, event: ActorLost, now_s: float) -> None:
        """What a loss means depends on what the actor was, and whether it is still needed."""
        what, _, number = event.part.partition(":")
        if what == "worker":
            self._lose_worker(int(number), event, now_s)
        elif what == "shard" and self.stage is Stage.TRAINING:
            self._failure = self._failure or _lost(event.part, event.why)
        else:
            self._fail(_lost(event.part, event.why))

    def _lose_worker(self, worker: int, event: ActorLost, now_s: float) -> None:
        if self.stage not in _STARTING:
            self._ends.lose(worker, event.why, self._snapshot, now_s)
            return
        kind = event.kind or "worker_lost"
        message = f"worker {worker} did not start: {event.why}"
        self._fail(Failure(kind=kind, message=message, remedy=START_REMEDIES[kind], worker=worker))

    def _took(self, snapshot: JobSnapshot, now_s: float) -> list[Instruction]:
        self._polls.answered(now_s)
        if self.stage in _OVER:
            return []
        self._snapshot = snapshot
        if self.stage is Stage.TRAINING and snapshot.phase in ("completed", "failed"):
            self._move(Stage.CLOSING)
            self._closed_at_s = now_s
            if snapshot.phase == "completed":
                return [SaveModel(snapshot.progress.rounds, snapshot.progress.samples)]
            unknown = Failure(kind="unknown", message="the coordinator ended the job without saying why")
            self._result = Failed(snapshot.failure or unknown)
        return []

    def _answered(self, stop: bool, now_s: float) -> None:
        sent = self._reports.answered(now_s)
        if sent is not None and more_after(sent.snapshot):
            self._polls.soon(now_s)
        if self.stage is not Stage.ENDED and (stop or (sent is not None and sent.outcome is not None)):
            self._move(Stage.ENDED)

    # --- what is due ---

    def _check_start(self, now_s: float) -> None:
        waited_s = now_s - self._began_at_s
        if waited_s >= self._start_timeout_s:
            self._end(Unplaced(tuple(sorted(self._awaited)) or (COORDINATOR,), waited_s))

    def _check_silence(self, now_s: float) -> None:
        silent_s = now_s - self._polls.heard_at_s
        if silent_s >= SILENCE_S:
            self._fail(_lost(COORDINATOR, f"it has not answered for {silent_s:.0f} s"))

    def _check_closed(self, now_s: float) -> None:
        """End once the result is there and everything is said, or patience is over."""
        if self.stage is not Stage.CLOSING or self._result is None:
            return
        patience_s = LAST_WORDS_S if isinstance(self._result, Succeeded) else DRAIN_S
        if self._all_said() or now_s >= self._closed_at_s + patience_s:
            self._end(self._result)

    def _all_said(self) -> bool:
        """Whether the latest snapshot was asked for after all had ended, and holds all that is left."""
        since_s: float | None = self._closed_at_s
        if isinstance(self._result, Succeeded):
            since_s = self._ends.all_ended_at_s()
        return since_s is not None and self._polls.heard_since(since_s) and not more_after(self._snapshot)

    def _poll(self, now_s: float) -> list[Instruction]:
        if self.stage not in (Stage.TRAINING, Stage.CLOSING) or not self._polls.due(now_s):
            return []
        self._polls.begin(now_s)
        return [
            TakeSnapshot(
                self._reports.after_event, self._reports.after_log, dict(self._ends.lost), self._failure
            )
        ]

    def _report(self, now_s: float) -> list[Instruction]:
        if self.stage is Stage.ENDED:
            return []
        report = self._reports.due(self._snapshot, self._outcome, now_s)
        return [SendReport(report)] if report is not None else []

    # --- helpers ---

    def _fail(self, failure: Failure) -> None:
        """End as failed, unless the result is known already: nothing that is lost later changes it."""
        self._end(self._result or Failed(failure))

    def _end(self, outcome: Outcome) -> None:
        if self.stage not in _OVER:
            self._outcome = outcome
            self._move(Stage.ENDING)

    def _move(self, stage: Stage) -> None:
        if stage not in TRANSITIONS[self.stage]:
            raise RuntimeError(f"supervision: {self.stage} -> {stage} is not a legal move")
        self.stage = stage


def _lost(part: str, why: str) -> Failure:
    what = part.partition(":")[0]
    return Failure(
        kind=f"{what}_lost",
        message=f"{part.replace(':', ' ')} was lost: {why}",
        remedy="submit the job again",
    )
