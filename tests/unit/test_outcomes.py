"""A supervisor's reports, against a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cadenza.spec import JobSpec
from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.jobs.records import Job, Reason
from cadenza_service.jobs.store import Store
from cadenza_service.orchestration.instructions import (
    Failed,
    Interrupted,
    Outcome,
    Report,
    Succeeded,
    Unplaced,
)
from cadenza_service.orchestration.outcomes import Verdict, take
from cadenza_service.snapshot import Failure, JobSnapshot, LogLine, Phase, Progress, Telemetry

FAILURE = Failure(
    kind="user_error", message="worker 1, step 5: no", remedy="look", worker=1, step=5, traceback="T"
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'jobs.db'}")
    yield store
    store.close()


@pytest.fixture
def job(store: Store) -> Job:
    """A job in its first attempt, starting."""
    job, _ = store.create(JobSpec(name="job", entrypoint="train:main"))
    store.begin_attempt(job.id)
    return store.move(
        job.id, JobState.STARTING, Reason(code="starting", message="starting"), message="starting"
    )


def snapshot(phase: Phase, **changes: Any) -> JobSnapshot:
    return JobSnapshot(phase=phase, progress=Progress(rounds=3), telemetry=Telemetry(), **changes)


def test_training_makes_the_job_run_and_joining_does_not(store: Store, job: Job) -> None:
    assert take(store, job.id, 1, Report(snapshot("joining"))) is Verdict.GO_ON
    assert store.job(job.id).state is JobState.STARTING
    assert take(store, job.id, 1, Report(snapshot("training"))) is Verdict.GO_ON
    assert take(store, job.id, 1, Report(snapshot("training"))) is Verdict.GO_ON
    assert store.job(job.id).state is JobState.RUNNING
    assert store.job(job.id).progress.rounds == 3


@pytest.mark.parametrize(
    ("outcome", "state", "code"),
    [
        (Succeeded(1, 4096), JobState.SUCCEEDED, None),
        (Failed(FAILURE), JobState.FAILED, "user_error"),
        (Unplaced(("worker:1",), 300.0), JobState.QUEUED, "not_placed"),
        (Unplaced(("worker:1",), 1.0, node_gone=True), JobState.QUEUED, "not_placed"),
        (Interrupted(), JobState.RECOVERING, "supervisor_lost"),
    ],
)
def test_each_outcome_has_its_state(
    store: Store, job: Job, outcome: Outcome, state: JobState, code: str | None
) -> None:
    assert take(store, job.id, 1, Report(None, outcome)) is Verdict.OVER
    assert take(store, job.id, 1, Report(None, outcome)) is Verdict.UNWANTED
    after = store.job(job.id)
    assert after.state is state
    assert (after.reason.code if after.reason else None) == code


def test_a_job_whose_node_is_gone_says_so(store: Store, job: Job) -> None:
    take(store, job.id, 1, Report(None, Unplaced(("shard:0",), 1.0, node_gone=True)))
    reason = store.job(job.id).reason
    assert reason is not None
    assert "the node chosen for shard:0 was lost before the job had started there" in reason.message


def test_a_failures_details_are_kept(store: Store, job: Job) -> None:
    take(store, job.id, 1, Report(snapshot("failed", failure=FAILURE), Failed(FAILURE)))
    reason = store.job(job.id).reason
    assert reason == Reason(
        code="user_error",
        message="worker 1, step 5: no",
        remedy="look",
        details={"worker": 1, "step": 5, "traceback": "T"},
    )


def test_a_job_that_ran_so_shortly_that_nobody_saw_it_has_run(store: Store, job: Job) -> None:
    take(store, job.id, 1, Report(snapshot("completed"), Succeeded(1, 4096)))
    states = [event.state for event in store.events(job.id)]
    assert states == [JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.SUCCEEDED]


def test_the_same_end_twice_changes_nothing_but_late_lines_are_kept(store: Store, job: Job) -> None:
    line = LogLine(number=1, time=0.0, worker=0, stream="stdout", text="late")
    take(store, job.id, 1, Report(snapshot("completed"), Succeeded(1, 4096)))
    before = store.job(job.id)
    report = Report(snapshot("completed", logs=[line]), Succeeded(1, 4096))
    assert take(store, job.id, 1, report) is Verdict.UNWANTED
    assert store.job(job.id).finished_at == before.finished_at
    assert [stored.text for stored in store.logs(job.id)] == ["late"]


def test_an_older_attempt_is_told_to_stop_and_changes_nothing(store: Store, job: Job) -> None:
    store.begin_attempt(job.id)
    assert take(store, job.id, 1, Report(snapshot("completed"), Succeeded(1, 4096))) is Verdict.UNWANTED
    assert store.job(job.id).state is JobState.STARTING
    assert store.job(job.id).progress.rounds == 0
