from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, text

from cadenza.spec import JobSpec
from cadenza_service.jobs.lifecycle import TERMINAL, TRANSITIONS, WITHOUT_REASON, IllegalTransition, JobState
from cadenza_service.jobs.records import (
    IdempotencyConflict,
    InvalidCursor,
    Job,
    JobEnded,
    JobNotFound,
    Reason,
    SchemaTooNew,
    StaleEpoch,
)
from cadenza_service.jobs.store import Store
from cadenza_service.snapshot import Event, JobSnapshot, LogLine, Progress, Telemetry

Result = TypeVar("Result")

WHY = Reason(code="test", message="because of the test")


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/jobs.db"


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[Store]:
    store = Store(url, log_lines_kept=5, clock=clock)
    yield store
    store.close()


def spec(name: str = "digits", **more: object) -> JobSpec:
    return JobSpec.model_validate({"name": name, "entrypoint": "train:main", **more})


def create(store: Store, name: str = "digits") -> str:
    return store.create(spec(name))[0].id


def move(store: Store, job_id: str, to: JobState) -> Job:
    return store.move(job_id, to, None if to in WITHOUT_REASON else WHY, message=f"to {to}")


def bring(store: Store, job_id: str, state: JobState) -> None:
    """Bring a new job to ``state`` on a legal way."""
    ways: dict[JobState, list[JobState]] = {
        JobState.QUEUED: [],
        JobState.UNSCHEDULABLE: [JobState.UNSCHEDULABLE],
        JobState.STARTING: [JobState.STARTING],
        JobState.RUNNING: [JobState.STARTING, JobState.RUNNING],
        JobState.RECOVERING: [JobState.STARTING, JobState.RECOVERING],
        JobState.SUCCEEDED: [JobState.STARTING, JobState.SUCCEEDED],
        JobState.FAILED: [JobState.FAILED],
        JobState.CANCELLED: [JobState.CANCELLED],
    }
    for step in ways[state]:
        move(store, job_id, step)


def snapshot(*, events: list[int] = (), logs: list[int] = (), loss: float | None = None) -> JobSnapshot:  # type: ignore[assignment]
    return JobSnapshot(
        phase="training",
        progress=Progress(samples=7, loss=loss),
        telemetry=Telemetry(sync_bytes={"push": 3}),
        events=[Event(number=n, time=n, kind="told", message=f"event {n}", data={"n": n}) for n in events],
        logs=[LogLine(number=n, time=n, worker=0, stream="stdout", text=f"line {n}") for n in logs],
    )


def at_once(count: int, action: Callable[[int], Result]) -> list[Result | Exception]:
    """What ``action`` gives in ``count`` threads that begin together."""
    barrier = threading.Barrier(count, timeout=30)

    def run(index: int) -> Result | Exception:
        barrier.wait()
        try:
            return action(index)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


class TestCreate:
    def test_a_new_job_waits_and_says_so(self, store: Store) -> None:
        job, created = store.create(spec(labels={"team": "ml"}))
        assert created
        assert (job.state, job.desired, job.epoch) == (JobState.QUEUED, "run", 0)
        assert job.reason is not None
        assert job.reason.code == "accepted"
        assert (job.created_at, job.started_at, job.finished_at) == (1_000.0, None, None)
        assert store.job(job.id) == job
        assert job.spec.labels == {"team": "ml"}
        (event,) = store.events(job.id)
        assert (event.seq, event.kind, event.state) == (1, "state", JobState.QUEUED)

    @pytest.mark.parametrize("name", ["digits", "Char_LM.v2", "x" * 63, "a" + "-" * 53 + "b", "A"])
    def test_an_id_is_short_and_lower_case(self, store: Store, name: str) -> None:
        job_id = create(store, name)
        assert re.fullmatch(r"[a-z0-9][a-z0-9-]*-[a-z2-7]{8}", job_id)
        assert len(job_id) <= 63

    def test_the_same_key_gives_the_first_job(self, store: Store) -> None:
        first, _ = store.create(spec(), idempotency_key="k")
        assert store.create(spec(), idempotency_key="k") == (first, False)
        assert store.create(spec(), idempotency_key="other")[1]
        assert len(store.events(first.id)) == 1

    def test_the_same_key_with_another_spec_is_refused(self, store: Store) -> None:
        first, _ = store.create(spec(), idempotency_key="k")
        with pytest.raises(IdempotencyConflict, match=first.id):
            store.create(spec(seed=1), idempotency_key="k")

    def test_many_writers_with_one_key_make_one_job(self, store: Store) -> None:
        results = at_once(8, lambda _: store.create(spec(), idempotency_key="k"))
        jobs = [result for result in results if isinstance(result, tuple)]
        assert len(jobs) == 8
        assert len({job.id for job, _ in jobs}) == 1
        assert sum(created for _, created in jobs) == 1

    def test_without_a_key_every_job_is_new(self, store: Store) -> None:
        assert len({create(store) for _ in range(3)}) == 3


class TestRead:
    def test_an_unknown_job(self, store: Store) -> None:
        for ask in (store.job, store.events, store.logs, store.latest, store.cancel, store.begin_attempt):
            with pytest.raises(JobNotFound, match="nothing-here"):
                ask("nothing-here")
        with pytest.raises(JobNotFound):
            store.record("nothing-here", 1, snapshot())
        with pytest.raises(JobNotFound):
            store.add_event("nothing-here", "kind", "message")
        with pytest.raises(JobNotFound):
            move(store, "nothing-here", JobState.STARTING)
        with pytest.raises(JobNotFound):
            store.explain("nothing-here", WHY)

    def test_pages_go_from_new_to_old(self, store: Store) -> None:
        made = [create(store) for _ in range(5)]
        seen, cursor = [], None
        while True:
            page = store.jobs(limit=2, cursor=cursor)
            seen += [job.id for job in page.items]
            cursor = page.next_cursor
            if cursor is None:
                break
            create(store)  # a newer one does not shift the pages after it
        assert seen == made[::-1]

    def test_a_full_last_page_has_no_next(self, store: Store) -> None:
        create(store)
        assert store.jobs(limit=1).next_cursor is None

    @pytest.mark.parametrize("cursor", ["", "x", "5", "YmVmb3JlOg==", "YmVmb3JlOi0x", "é", "YmVmb3JlOjE=x"])
    def test_a_strange_cursor_is_refused(self, store: Store, cursor: str) -> None:
        with pytest.raises(InvalidCursor):
            store.jobs(cursor=cursor)

    def test_jobs_by_state(self, store: Store, clock: Clock) -> None:
        running, failed, queued = create(store), create(store), create(store)
        bring(store, running, JobState.RUNNING)
        bring(store, failed, JobState.FAILED)
        assert [job.id for job in store.jobs(state=JobState.RUNNING).items] == [running]
        assert [job.id for job in store.unfinished()] == [running, queued]
        assert store.counts()[JobState.FAILED] == 1
        assert store.counts()[JobState.CANCELLED] == 0
        assert len(store.active_since(clock.now)) == 3
        assert [job.id for job in store.active_since(clock.now + 1)] == [running, queued]


class TestMove:
    @pytest.mark.parametrize("source", JobState)
    def test_every_pair_is_as_the_table_says(self, store: Store, source: JobState) -> None:
        for target in JobState:
            job_id = create(store)
            bring(store, job_id, source)
            before = store.job(job_id), store.events(job_id)
            if (source, target) in TRANSITIONS:
                assert move(store, job_id, target).state is target
                assert store.events(job_id)[-1].state is target
            else:
                with pytest.raises(IllegalTransition, match=f"{job_id}: {source} -> {target}"):
                    move(store, job_id, target)
                assert (store.job(job_id), store.events(job_id)) == before

    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(targets=st.lists(st.sampled_from(JobState), max_size=12))
    def test_any_sequence_keeps_the_rules(self, store: Store, targets: list[JobState]) -> None:
        job_id = create(store)
        state, entered = JobState.QUEUED, [JobState.QUEUED]
        for target in targets:
            if (state, target) in TRANSITIONS:
                move(store, job_id, target)
                state = target
                entered.append(target)
            else:
                with pytest.raises(IllegalTransition):
                    move(store, job_id, target)
        job, events = store.job(job_id), store.events(job_id)
        assert job.state is state
        assert (job.reason is None) is (state in WITHOUT_REASON)
        assert (job.finished_at is not None) is (state in TERMINAL)
        assert (job.started_at is not None) is (JobState.RUNNING in entered)
        assert [event.state for event in events] == entered
        assert [event.seq for event in events] == list(range(1, len(entered) + 1))

    def test_a_reason_goes_with_its_state(self, store: Store) -> None:
        job_id = create(store)
        with pytest.raises(ValueError, match="reason"):
            store.move(job_id, JobState.STARTING, message="no reason")
        move(store, job_id, JobState.STARTING)
        with pytest.raises(ValueError, match="reason"):
            store.move(job_id, JobState.RUNNING, WHY, message="one too many")

    def test_times_of_the_first_run_and_the_end(self, store: Store, clock: Clock) -> None:
        job_id = create(store)
        move(store, job_id, JobState.STARTING)
        clock.now = 1_010
        assert move(store, job_id, JobState.RUNNING).started_at == 1_010
        clock.now = 1_020
        move(store, job_id, JobState.RECOVERING)
        job = move(store, job_id, JobState.RUNNING)
        assert (job.started_at, job.updated_at, job.finished_at) == (1_010, 1_020, None)
        clock.now = 1_030
        assert move(store, job_id, JobState.SUCCEEDED).finished_at == 1_030

    def test_of_many_writers_one_wins(self, store: Store) -> None:
        job_id = create(store)
        results = at_once(8, lambda _: move(store, job_id, JobState.STARTING))
        assert sum(isinstance(result, Job) for result in results) == 1
        assert sum(isinstance(result, IllegalTransition) for result in results) == 7
        assert [event.state for event in store.events(job_id)] == [JobState.QUEUED, JobState.STARTING]

    def test_a_start_and_a_cancellation_race(self, store: Store) -> None:
        for _ in range(10):
            job_id = create(store)
            actions = [lambda: move(store, job_id, JobState.STARTING), lambda: store.cancel(job_id)]  # noqa: B023
            started, cancelled = at_once(2, lambda index: actions[index]())  # noqa: B023
            job = store.job(job_id)
            assert isinstance(cancelled, Job)
            assert job.desired == "cancelled"
            if isinstance(started, Job):
                assert job.state is JobState.STARTING
            else:
                assert isinstance(started, IllegalTransition)
                assert job.state is JobState.CANCELLED


class TestExplain:
    def test_the_reason_changes_and_an_event_tells_it_once(self, store: Store) -> None:
        job_id = create(store)
        nodes = Reason(code="waiting_for_nodes", message="2 CPUs are missing", remedy="add a node")
        store.explain(job_id, nodes)
        store.explain(job_id, Reason(code=nodes.code, message=nodes.message, details={"seconds": 5}))
        job = store.job(job_id)
        assert job.state is JobState.QUEUED
        assert job.reason is not None
        assert job.reason.details == {"seconds": 5}
        told = [event for event in store.events(job_id) if event.kind == "reason"]
        assert [(event.message, event.data["code"]) for event in told] == [("2 CPUs are missing", nodes.code)]

    @pytest.mark.parametrize("state", [JobState.RUNNING, *sorted(TERMINAL)])
    def test_other_states_are_refused(self, store: Store, state: JobState) -> None:
        job_id = create(store)
        bring(store, job_id, state)
        with pytest.raises(IllegalTransition):
            store.explain(job_id, WHY)


class TestCancel:
    @pytest.mark.parametrize("state", [JobState.QUEUED, JobState.UNSCHEDULABLE])
    def test_a_waiting_job_ends_at_once(self, store: Store, state: JobState) -> None:
        job_id = create(store)
        bring(store, job_id, state)
        job = store.cancel(job_id)
        assert (job.state, job.desired) == (JobState.CANCELLED, "cancelled")
        assert job.reason is not None
        assert job.reason.code == "cancelled_by_user"
        assert store.cancel(job_id) == job

    @pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING, JobState.RECOVERING])
    def test_any_other_is_asked_for(self, store: Store, state: JobState) -> None:
        job_id = create(store)
        bring(store, job_id, state)
        job = store.cancel(job_id)
        assert (job.state, job.desired) == (state, "cancelled")
        assert store.events(job_id)[-1].kind == "cancel_requested"
        assert store.cancel(job_id) == job
        assert [event.kind for event in store.events(job_id)].count("cancel_requested") == 1

    @pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED])
    def test_an_ended_job_is_refused(self, store: Store, state: JobState) -> None:
        job_id = create(store)
        bring(store, job_id, state)
        with pytest.raises(JobEnded, match=state):
            store.cancel(job_id)


class TestRecord:
    def test_a_snapshot_is_stored(self, store: Store) -> None:
        job_id = create(store)
        epoch = store.begin_attempt(job_id)
        store.record(job_id, epoch, snapshot(events=[1, 2], logs=[1], loss=0.5))
        job = store.job(job_id)
        assert (epoch, job.epoch, job.state) == (1, 1, JobState.QUEUED)
        assert (job.progress.samples, job.progress.loss) == (7, 0.5)
        assert job.telemetry.sync_bytes == {"push": 3}
        assert [(event.seq, event.message) for event in store.events(job_id, after=1)] == [
            (2, "event 1"),
            (3, "event 2"),
        ]
        assert [(log.seq, log.text, log.worker, log.stream) for log in store.logs(job_id)] == [
            (1, "line 1", 0, "stdout")
        ]

    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(sends=st.lists(st.lists(st.integers(1, 6), max_size=6), max_size=6))
    def test_sending_again_changes_nothing(self, store: Store, sends: list[list[int]]) -> None:
        job_id = create(store)
        epoch = store.begin_attempt(job_id)
        for numbers in sends:
            store.record(job_id, epoch, snapshot(events=numbers))
            store.record(job_id, epoch, snapshot(events=numbers))
        events = store.events(job_id)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        told = [event.data["n"] for event in events if event.kind == "told"]
        assert len(told) == len(set(told))
        assert set(told) == {number for numbers in sends for number in numbers}

    def test_a_new_attempt_counts_from_one_again(self, store: Store) -> None:
        job_id = create(store)
        for _ in range(2):
            store.record(job_id, store.begin_attempt(job_id), snapshot(events=[1], logs=[1]))
        assert [event.seq for event in store.events(job_id)] == [1, 2, 3]
        assert [log.seq for log in store.logs(job_id)] == [1, 2]

    def test_only_the_latest_lines_are_kept(self, store: Store) -> None:
        job_id = create(store)
        epoch = store.begin_attempt(job_id)
        store.record(job_id, epoch, snapshot(logs=list(range(1, 9))))
        assert [log.text for log in store.logs(job_id)] == [f"line {n}" for n in range(4, 9)]
        store.record(job_id, epoch, snapshot(logs=list(range(1, 11))))  # 1 to 3 are gone, and stay so
        assert [(log.seq, log.text) for log in store.logs(job_id)] == [(n, f"line {n}") for n in range(6, 11)]
        assert store.latest(job_id).log_seq == 10

    def test_a_replaced_attempt_is_refused(self, store: Store) -> None:
        job_id = create(store)
        old, new = store.begin_attempt(job_id), store.begin_attempt(job_id)
        with pytest.raises(StaleEpoch, match="epoch 1 has been replaced by 2"):
            store.record(job_id, old, snapshot(events=[1]))
        assert len(store.events(job_id)) == 1
        with pytest.raises(ValueError, match="never issued"):
            store.record(job_id, new + 1, snapshot())

    def test_an_ended_job_takes_its_last_lines(self, store: Store) -> None:
        job_id = create(store)
        epoch = store.begin_attempt(job_id)
        bring(store, job_id, JobState.SUCCEEDED)
        store.record(job_id, epoch, snapshot(logs=[1]))
        assert store.latest(job_id).log_seq == 1
        assert store.job(job_id).state is JobState.SUCCEEDED

    def test_numbers_that_are_not_finite_come_back(self, store: Store) -> None:
        job_id = create(store)
        bad = snapshot(events=[1], loss=math.inf)
        bad.progress.metrics["x"] = math.nan
        bad.events[0].data["x"] = math.nan
        store.record(job_id, store.begin_attempt(job_id), bad)
        assert store.job(job_id).progress.loss == math.inf
        assert math.isnan(store.job(job_id).progress.metrics["x"])
        assert math.isnan(store.events(job_id)[-1].data["x"])

    def test_text_that_is_no_text_is_kept_as_far_as_it_goes(self, store: Store) -> None:
        job_id = create(store)
        odd = snapshot(events=[1], logs=[1])
        odd.events[0].message = odd.logs[0].text = "caf\udce9"
        store.record(job_id, store.begin_attempt(job_id), odd)
        assert store.events(job_id)[-1].message == store.logs(job_id)[0].text == "caf?"

    def test_writers_in_parallel_leave_no_gap(self, store: Store) -> None:
        job_id = create(store)
        done = at_once(8, lambda index: store.add_event(job_id, "note", f"from {index}", data={"n": index}))
        assert done == [None] * 8
        assert [event.seq for event in store.events(job_id)] == list(range(1, 10))


class TestFollow:
    def test_latest_of_several_jobs(self, store: Store) -> None:
        one, two = create(store), create(store)
        store.add_event(two, "note", "hello", severity="warning")
        found = store.latest_of([one, two, "nothing-here"])
        assert {job_id: latest.event_seq for job_id, latest in found.items()} == {one: 1, two: 2}
        assert store.events(two)[-1].severity == "warning"
        assert store.latest_of([]) == {}

    def test_rows_come_in_pages(self, store: Store) -> None:
        job_id = create(store)
        for number in range(4):
            store.add_event(job_id, "note", str(number))
        assert [event.seq for event in store.events(job_id, after=1, limit=2)] == [2, 3]

    def test_the_controllers_sign_of_life(self, store: Store, clock: Clock) -> None:
        assert store.controller_seen_at() is None
        store.heartbeat()
        clock.now += 5
        store.heartbeat()
        assert store.controller_seen_at() == clock.now


class TestOpen:
    def test_jobs_outlive_the_process(self, store: Store, url: str) -> None:
        job_id = create(store)
        store.close()
        again = Store(url)
        assert again.job(job_id).name == "digits"
        again.close()

    def test_several_may_open_a_new_file_at_once(self, url: str) -> None:
        stores = at_once(4, lambda _: Store(url))
        assert [type(opened) for opened in stores] == [Store] * 4
        for opened in stores:
            assert isinstance(opened, Store)
            opened.close()

    def test_a_later_schema_is_refused(self, store: Store, url: str) -> None:
        store.close()
        with create_engine(url).begin() as connection:
            connection.execute(text("UPDATE schema_version SET version = 99"))
        with pytest.raises(SchemaTooNew, match="99"):
            Store(url)

    def test_the_file_is_in_wal_mode_and_checks_references(self, store: Store) -> None:
        with store._writing.begin() as connection:
            assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
            assert connection.scalar(text("PRAGMA foreign_keys")) == 1
