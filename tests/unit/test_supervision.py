"""The supervisor's state machine: what happens is fed in, what to do comes out."""

from __future__ import annotations

import itertools
from typing import Any, TypeVar

import pytest

from cadenza_service.coordination.recorder import PAGE
from cadenza_service.orchestration.instructions import (
    COORDINATOR,
    ActorLost,
    ActorRefused,
    ActorStarted,
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
)
from cadenza_service.orchestration.supervision import (
    DRAIN_S,
    LAST_WORDS_S,
    SILENCE_S,
    TRANSITIONS,
    Found,
    Stage,
    Supervision,
)
from cadenza_service.orchestration.worker_ends import SETTLE_S
from cadenza_service.snapshot import (
    Failure,
    JobSnapshot,
    LogLine,
    Phase,
    Progress,
    Telemetry,
    WorkerState,
    WorkerStatus,
)

Kind = TypeVar("Kind")

EVERYTHING = frozenset({COORDINATOR, "shard:0", "shard:1", "worker:0", "worker:1"})


def snapshot(phase: Phase, *states: WorkerState, **changes: Any) -> JobSnapshot:
    workers = [WorkerStatus(worker=number, incarnation=1, state=state) for number, state in enumerate(states)]
    progress = Progress(rounds=7, samples=56, workers=workers)
    return JobSnapshot(phase=phase, progress=progress, telemetry=Telemetry(), **changes)


def log(first: int, count: int) -> list[LogLine]:
    return [LogLine(number=first + i, time=0.0, worker=0, stream="stdout", text="x") for i in range(count)]


class Story:
    """A supervision with a clock, and everything that it has asked for."""

    def __init__(self, *, start_timeout_s: float = 60) -> None:
        self.now_s = 1000.0
        self.core = Supervision(shards=2, workers=2, start_timeout_s=start_timeout_s, now_s=self.now_s)
        self.done: list[Instruction] = []

    def begin(self) -> Story:
        self.done += self.core.begin(self.now_s)
        return self

    def resume(self, parts: frozenset[str], *, opened: bool) -> Story:
        self.done += self.core.resume(Found(parts, opened), self.now_s)
        return self

    def train(self) -> Story:
        self.begin().tell(ActorStarted("shard:1", ("b", 2)), ActorStarted("shard:0", ("a", 1)))
        self.tell(ActorStarted("worker:0"), ActorStarted("worker:1"), ActorStarted(COORDINATOR))
        return self.tell(CoordinatorOpened())

    def tell(self, *events: Event) -> Story:
        for event in events:
            self.now_s += 2**-10
            self.done += self.core.handle(event, self.now_s)
        return self

    def after(self, seconds: float) -> Story:
        self.now_s += seconds
        self.done += self.core.tick(self.now_s)
        return self

    def take(self, snapshot: JobSnapshot) -> Story:
        """The next poll, answered; its report, answered."""
        return self.after(1.0).tell(SnapshotTaken(snapshot), ReportAnswered(False))

    def asked(self, kind: type[Kind]) -> list[Kind]:
        """The instructions of a kind since the last call, of any kind."""
        found: list[Kind] = [instruction for instruction in self.done if isinstance(instruction, kind)]
        self.done.clear()
        return found

    def outcome(self) -> Outcome | None:
        return self.asked(SendReport)[-1].report.outcome


def test_actors_come_first_then_the_coordinator_then_the_workers() -> None:
    story = Story().begin()
    assert story.asked(StartActors) == [StartActors(2, 2)]
    story.tell(ActorStarted("shard:1", ("b", 2)), ActorStarted("worker:0"), ActorStarted("worker:1"))
    story.tell(ActorStarted(COORDINATOR))
    assert story.asked(OpenCoordinator) == []
    story.tell(ActorStarted("shard:0", ("a", 1)))
    assert story.asked(OpenCoordinator) == [OpenCoordinator((("a", 1), ("b", 2)))]
    story.tell(CoordinatorOpened())
    assert story.asked(RunWorker) == [RunWorker(0), RunWorker(1)]


def test_a_start_that_takes_too_long_names_what_is_missing() -> None:
    story = (
        Story(start_timeout_s=30).begin().tell(ActorStarted("shard:0", ("a", 1)), ActorStarted(COORDINATOR))
    )
    story.after(29)
    assert story.asked(SendReport) == []
    outcome = story.after(1).outcome()
    assert isinstance(outcome, Unplaced)
    assert outcome.missing == ("shard:1", "worker:0", "worker:1")
    assert outcome.waited_s == pytest.approx(30, abs=0.1)


def test_a_worker_that_does_not_start_fails_the_job_with_what_is_known() -> None:
    story = Story().begin().tell(ActorLost("worker:1", "pip found no such package", "runtime_env"))
    outcome = story.outcome()
    assert isinstance(outcome, Failed)
    assert outcome.failure.kind == "runtime_env"
    assert outcome.failure.worker == 1
    assert "pip found no such package" in outcome.failure.message


def test_shards_out_of_the_coordinators_reach_fail_the_job() -> None:
    story = Story().begin()
    for part in sorted(EVERYTHING):
        story.tell(ActorStarted(part, ("a", 1) if part.startswith("shard") else None))
    outcome = story.tell(OpeningFailed("shard 1 at b:2 cannot be reached")).outcome()
    assert isinstance(outcome, Failed)
    assert outcome.failure.kind == "shard_lost"


def test_polls_go_one_at_a_time_and_reports_once_a_second() -> None:
    story = Story().train()
    assert story.asked(TakeSnapshot) == [TakeSnapshot(0, 0, {}, None)]
    assert story.after(5).asked(TakeSnapshot) == []
    story.tell(SnapshotTaken(snapshot("training", "active", "active", logs=log(1, 3))))
    assert len(story.asked(SendReport)) == 1
    story.tell(ReportAnswered(False)).after(0.5)
    assert story.asked(TakeSnapshot) == [TakeSnapshot(0, 3, {}, None)]
    story.tell(SnapshotTaken(snapshot("training", "active", "active")))
    assert story.asked(SendReport) == []
    assert len(story.after(0.5).asked(SendReport)) == 1


def test_what_the_controller_may_not_have_is_fetched_and_sent_again() -> None:
    story = Story().train()
    story.tell(SnapshotTaken(snapshot("training", logs=log(1, 3))), ReportMissed())
    story.asked(SendReport)
    assert story.after(0.5).asked(TakeSnapshot) == [TakeSnapshot(0, 0, {}, None)]


def test_success_waits_for_the_model_and_the_workers_last_words() -> None:
    story = (
        Story()
        .train()
        .take(snapshot("training", "active", "active"))
        .take(snapshot("completed", "finished", "finished"))
    )
    assert story.asked(SaveModel) == [SaveModel(7, 56)]
    story.tell(ModelSaved(1, 4096)).take(snapshot("completed", "finished", "finished"))
    assert all(sent.report.outcome is None for sent in story.asked(SendReport))
    story.tell(WorkerEnded(0), WorkerEnded(1))
    story.take(snapshot("completed", "finished", "finished", logs=log(1, 1)))
    (sent,) = [sent for sent in story.asked(SendReport) if sent.report.outcome is not None]
    assert sent.report.outcome == Succeeded(1, 4096)
    assert sent.report.snapshot is not None
    assert len(sent.report.snapshot.logs) == 1


def test_user_code_that_goes_on_after_its_session_is_not_waited_for_for_ever() -> None:
    story = Story().train().take(snapshot("completed", "finished", "finished")).tell(ModelSaved(1, 4096))
    assert story.after(LAST_WORDS_S).outcome() == Succeeded(1, 4096)


def test_a_model_that_cannot_be_saved_fails_the_job() -> None:
    story = Story().train().take(snapshot("completed", "finished", "finished"))
    outcome = story.tell(SavingFailed("No space left on device")).outcome()
    assert isinstance(outcome, Failed)
    assert outcome.failure.kind == "model_not_saved"


def test_a_failed_job_is_reported_after_its_last_lines() -> None:
    failure = Failure(kind="user_error", message="worker 0, step 50: ValueError: no", worker=0, step=50)
    story = Story().train().take(snapshot("failed", "failed", "active", failure=failure, logs=log(1, PAGE)))
    story.tell(
        SnapshotTaken(snapshot("failed", "failed", "active", failure=failure, logs=log(PAGE + 1, PAGE)))
    )
    assert all(sent.report.outcome is None for sent in story.asked(SendReport))
    story.tell(ReportAnswered(False)).take(
        snapshot("failed", "failed", "active", failure=failure, logs=log(2 * PAGE + 1, 5))
    )
    assert story.outcome() == Failed(failure)


def test_a_failed_jobs_last_lines_are_not_waited_for_for_ever() -> None:
    failure = Failure(kind="user_error", message="no")
    story = Story().train().take(snapshot("failed", failure=failure, logs=log(1, PAGE)))
    assert story.after(DRAIN_S).outcome() == Failed(failure)


def test_a_lost_worker_is_told_to_the_coordinator_until_it_knows() -> None:
    story = Story().train().tell(SnapshotMissed(), ActorLost("worker:1", "killed by signal 9"))
    story.asked(TakeSnapshot)
    assert story.after(1).asked(TakeSnapshot) == [TakeSnapshot(0, 0, {1: "killed by signal 9"}, None)]


def test_the_end_of_a_finished_workers_process_is_no_loss() -> None:
    story = (
        Story().train().take(snapshot("training", "active", "finished")).tell(ActorLost("worker:1", "exited"))
    )
    story.asked(TakeSnapshot)
    assert story.after(1).asked(TakeSnapshot) == [TakeSnapshot(0, 0, {}, None)]


def test_a_worker_that_ends_without_a_word_is_lost_after_a_while() -> None:
    story = Story().train().take(snapshot("training", "active", "active")).tell(WorkerEnded(0))
    story.after(SETTLE_S - 1).tell(SnapshotTaken(snapshot("training", "active", "active")))
    story.asked(TakeSnapshot)
    (poll,) = story.after(1).asked(TakeSnapshot)
    assert list(poll.lost) == [0]


def test_a_lost_shard_ends_the_job_through_the_coordinator() -> None:
    story = Story().train().tell(SnapshotMissed(), ActorLost("shard:1", "out of memory"))
    story.asked(TakeSnapshot)
    (poll,) = story.after(1).asked(TakeSnapshot)
    assert poll.failure is not None
    assert poll.failure.kind == "shard_lost"
    assert "shard 1 was lost: out of memory" in poll.failure.message


@pytest.mark.parametrize("silently", [True, False])
def test_a_lost_coordinator_ends_the_job(silently: bool) -> None:
    story = Story().train()
    if silently:
        story.tell(SnapshotMissed()).after(SILENCE_S)
    else:
        story.tell(ActorLost(COORDINATOR, "its node died"))
    outcome = story.outcome()
    assert isinstance(outcome, Failed)
    assert outcome.failure.kind == "coordinator_lost"


def test_what_is_lost_after_the_model_was_saved_does_not_matter() -> None:
    story = Story().train().take(snapshot("completed", "finished", "finished")).tell(ModelSaved(1, 4096))
    assert story.tell(ActorLost(COORDINATOR, "gone")).outcome() == Succeeded(1, 4096)


def test_the_outcome_is_sent_until_the_controller_has_it() -> None:
    story = Story().train().tell(ActorLost(COORDINATOR, "gone"))
    assert len(story.asked(SendReport)) == 1
    story.tell(ReportMissed())
    assert story.asked(SendReport) == []
    assert len(story.after(1).asked(SendReport)) == 1
    story.tell(ReportAnswered(True))
    assert story.core.stage is Stage.ENDED
    assert story.after(5).asked(SendReport) == []


def test_an_attempt_that_is_not_wanted_any_more_ends() -> None:
    story = Story().train().tell(SnapshotTaken(snapshot("training")), ReportAnswered(True))
    assert story.core.stage is Stage.ENDED
    story.asked(SendReport)
    assert story.after(60).done == []


def test_a_restarted_supervisor_goes_on_with_what_runs() -> None:
    story = Story().resume(EVERYTHING, opened=True)
    assert story.core.stage is Stage.TRAINING
    assert [i for i in story.done if isinstance(i, WatchWorker)] == [WatchWorker(0), WatchWorker(1)]
    assert story.asked(TakeSnapshot) == [TakeSnapshot(0, 0, {}, None)]


def test_a_restarted_supervisor_lets_a_worker_run_that_never_was_told_to() -> None:
    story = Story().resume(EVERYTHING, opened=True).tell(WorkerEnded(1, ran=False))
    assert story.asked(RunWorker) == [RunWorker(1)]


def test_what_a_restarted_supervisor_misses_is_lost() -> None:
    story = Story().resume(EVERYTHING - {"worker:0", "shard:1"}, opened=True)
    assert [i for i in story.done if isinstance(i, WatchWorker)] == [WatchWorker(1)]
    (poll,) = story.asked(TakeSnapshot)
    assert list(poll.lost) == [0]
    assert poll.failure is not None
    assert poll.failure.kind == "shard_lost"


def test_a_restarted_supervisor_without_a_coordinator_ends_the_job() -> None:
    outcome = Story().resume(EVERYTHING - {COORDINATOR}, opened=False).outcome()
    assert isinstance(outcome, Failed)
    assert outcome.failure.kind == "coordinator_lost"


@pytest.mark.parametrize("parts", [frozenset(), frozenset({COORDINATOR, "shard:0"}), EVERYTHING])
def test_a_start_that_was_interrupted_is_made_anew(parts: frozenset[str]) -> None:
    assert Story().resume(parts, opened=False).outcome() == Interrupted()


@pytest.mark.parametrize(("source", "target"), list(itertools.product(Stage, Stage)))
def test_every_move_that_the_table_lacks_is_refused(source: Stage, target: Stage) -> None:
    core = Story().core
    core.stage = source
    if target in TRANSITIONS[source]:
        core._move(target)
        assert core.stage is target
    else:
        with pytest.raises(RuntimeError, match="not a legal move"):
            core._move(target)


def test_a_node_that_is_gone_before_the_start_gives_all_back_at_once() -> None:
    story = Story().begin().after(2.0).tell(ActorStarted("worker:0"), ActorRefused("shard:1"))
    outcome = story.outcome()
    assert isinstance(outcome, Unplaced)
    assert (outcome.missing, outcome.node_gone) == (("shard:1",), True)
    assert story.core.stage is Stage.ENDING


def test_a_refusal_after_the_start_is_too_late_to_matter() -> None:
    story = Story().train().tell(ActorRefused("shard:1"))
    assert story.core.stage is Stage.TRAINING
