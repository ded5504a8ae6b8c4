"""The coordinator over real connections: how an attempt begins, ends, and lets everybody go."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import pytest

from cadenza.plane import messages
from cadenza.plane.connection import RefusedError
from cadenza.plane.control import Control
from cadenza.plane.layout import Layout
from cadenza.plane.link import LinkError
from cadenza.plane.messages import (
    Answer,
    Done,
    Exhausted,
    Failed,
    Finish,
    Finished,
    Join,
    Lease,
    Leased,
    Log,
    Message,
    Notice,
    Published,
    Ready,
    Report,
    Request,
    Span,
    Telemetry,
)
from cadenza.plane.network import NetworkLink
from cadenza.plane.wire import HandshakeError
from cadenza.spec import JobSpec
from cadenza_service.coordination.coordinator import LEGAL_PHASES, CoordinatorServer, Phase
from cadenza_service.coordination.rounds import MOST_NON_FINITE_IN_A_ROW
from cadenza_service.snapshot import Failure, JobSnapshot
from tests.harness import LocalCluster, job_spec
from tests.memory import VECTOR, vector_layout

T = TypeVar("T")
LENGTH = 6
SOON_S = 5.0
PROMPTLY_S = 5.0
"""Far below the deadlines of rounds (30 s) and workers (60 s), which a worker that is let go must not need."""


class Crew:
    """Workers of a job, each with its link, driven by the test's own thread."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.controls = [cluster.connect(worker) for worker in range(cluster.workers)]
        self.links = [NetworkLink(control) for control in self.controls]
        self.seq = itertools.count(1)

    def join(self, layout: Layout | None = None) -> None:
        """Everyone joins, and worker 0 publishes."""
        layout = layout or vector_layout(LENGTH)
        joining = [Background(link.join, layout, node="n", device="cpu") for link in self.links]
        first = joining[0].result()
        assert first.publish
        self.links[0].publish((VECTOR,), {VECTOR: np.zeros(LENGTH)})
        self.links[0].ready()
        assert not any(other.result().publish for other in joining[1:])

    def push(self, worker: int, value: float = 1.0, **fields: Any) -> Background[Answer]:
        request = Request("update", next(self.seq), 0, (VECTOR,), samples=1, steps=1, **fields)
        values = {VECTOR: np.full(LENGTH, value)}
        return Background(self.links[worker].exchange, request, values, {VECTOR: np.empty(LENGTH)})

    def ask(self, worker: int, message: Message) -> Message:
        return self.controls[worker]._connection.call(message).result(SOON_S)

    def close(self) -> None:
        for link, control in zip(self.links, self.controls, strict=True):
            link.close()
            control.close()


class Background(Generic[T]):
    """A call on a thread of its own."""

    def __init__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> None:
        self._outcome: list[T | BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(call, arguments, named), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[..., T], arguments: Any, named: Any) -> None:
        try:
            self._outcome.append(call(*arguments, **named))
        except BaseException as error:  # noqa: BLE001  (raised again in result)
            self._outcome.append(error)

    def result(self, timeout_s: float = SOON_S) -> T:
        self._thread.join(timeout_s)
        assert self._outcome, "it still waits"
        (outcome,) = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def waits(self) -> bool:
        return not self._outcome


@contextmanager
def crew(workers: int = 2, spec: JobSpec | None = None, **options: Any) -> Iterator[Crew]:
    with LocalCluster(spec or job_spec(), workers=workers, **options) as cluster:
        crew = Crew(cluster)
        yield crew
        crew.close()


def failure_of(crew: Crew) -> Failure:
    snapshot = crew.cluster.snapshot()
    assert snapshot.phase == "failed"
    assert snapshot.failure is not None
    assert [event.kind for event in snapshot.events].count("failed") == 1
    assert snapshot.telemetry.failures == {snapshot.failure.kind: 1}
    return snapshot.failure


def eventually(crew: Crew, holds: Callable[[JobSnapshot], bool]) -> JobSnapshot:
    deadline = time.monotonic() + SOON_S
    while not holds(snapshot := crew.cluster.snapshot()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return snapshot


def until_failed(crew: Crew) -> Failure:
    eventually(crew, lambda snapshot: snapshot.phase == "failed")
    return failure_of(crew)


# --- phases ---


@pytest.mark.parametrize(("source", "target"), list(itertools.product(Phase, Phase)))
def test_an_attempt_moves_as_the_table_says_and_not_otherwise(source: Phase, target: Phase) -> None:
    coordinator = CoordinatorServer.__new__(CoordinatorServer)
    coordinator._phase = source
    if (source, target) in LEGAL_PHASES:
        coordinator._move(target)
        assert coordinator._phase is target
        return
    with pytest.raises(ValueError, match=f"cannot go from {source} to {target}"):
        coordinator._move(target)
    assert coordinator._phase is source


def test_an_attempt_ends_once() -> None:
    assert {source for source, _ in LEGAL_PHASES} == {Phase.JOINING, Phase.TRAINING}
    assert (Phase.JOINING, Phase.COMPLETED) not in LEGAL_PHASES
    with crew() as job:
        for kind in ("first", "second"):
            job.cluster.coordinator.fail(Failure(kind=kind, message=f"the {kind} failure"))
        assert failure_of(job).kind == "first"


# --- joining ---


def test_a_failure_lets_everybody_who_joins_go_with_the_reason() -> None:
    with crew(3) as job:
        joining = [
            Background(job.links[w].join, vector_layout(LENGTH), node="n", device="cpu") for w in (0, 1)
        ]
        eventually(job, lambda snapshot: [w.state for w in snapshot.progress.workers].count("joining") == 2)
        job.controls[2].failed(Failed("user_error", "ValueError: no such file", "Traceback …", None, "look"))
        for call in joining:
            with pytest.raises(LinkError, match="worker 2: ValueError: no such file"):
                call.result(PROMPTLY_S)
        failure = until_failed(job)
        assert (failure.worker, failure.traceback, failure.remedy) == (2, "Traceback …", "look")
        with pytest.raises(RefusedError, match="worker 2: ValueError") as caught:
            job.ask(2, Join(vector_layout(LENGTH), "n", "cpu"))
        assert caught.value.code == "job_failed"


def test_a_worker_lost_before_it_joins_fails_the_job() -> None:
    with crew(2) as job:
        joining = Background(job.links[0].join, vector_layout(LENGTH), node="n", device="cpu")
        job.controls[1].close()
        with pytest.raises(LinkError, match="worker 1 was lost"):
            joining.result(PROMPTLY_S)
        assert until_failed(job).kind == "worker_lost"


def test_another_model_is_refused_and_everybody_else_let_go() -> None:
    with crew(3) as job:
        joining = Background(job.links[0].join, vector_layout(LENGTH), node="n", device="cpu")
        eventually(job, lambda snapshot: snapshot.progress.workers[0].state == "joining")
        with pytest.raises(LinkError, match="worker 1's model differs"):
            job.links[1].join(vector_layout(LENGTH + 1), node="n", device="cpu")
        with pytest.raises(LinkError, match="worker 1's model differs"):
            joining.result(PROMPTLY_S)
        assert failure_of(job).kind == "model_mismatch"


@pytest.mark.parametrize("message", [Ready(), Published(), Finish(), Lease(8, 4, True, 1)])
def test_nothing_but_joining_is_possible_before_all_have_joined(message: Message) -> None:
    with crew(2) as job:
        with pytest.raises(RefusedError):
            job.ask(1, message)
        assert job.cluster.snapshot().phase == "joining"
        job.join()
        assert job.cluster.snapshot().phase == "training"


def test_only_the_publisher_says_ready() -> None:
    with crew(2) as job:
        joining = [Background(link.join, vector_layout(LENGTH), node="n", device="cpu") for link in job.links]
        assert joining[0].result().publish
        with pytest.raises(RefusedError) as caught:
            job.ask(1, Ready())
        assert caught.value.code == "not_publisher"
        assert joining[1].waits()
        job.links[0].ready()
        assert not joining[1].result().publish


def test_a_publisher_that_never_publishes_is_named_and_everybody_let_go() -> None:
    with crew(2, round_timeout_s=0.1) as job:
        joining = [Background(link.join, vector_layout(LENGTH), node="n", device="cpu") for link in job.links]
        joining[0].result()
        with pytest.raises(LinkError, match="worker 0 had not published its model"):
            joining[1].result(PROMPTLY_S)
        failure = until_failed(job)
        assert (failure.kind, failure.worker) == ("timeout", 0)


def test_a_shard_that_does_not_take_the_layout_is_to_blame() -> None:
    with crew(1) as job:
        shards = job.cluster.coordinator._shards
        shards[1].call(messages.Assign(vector_layout(1), 1, 2, "local", {"name": "average"})).result(SOON_S)
        with pytest.raises(LinkError, match="shard 1: this shard already holds another layout"):
            job.links[0].join(vector_layout(LENGTH), node="n", device="cpu")
        failure = failure_of(job)
        assert (failure.kind, failure.worker) == ("shard_lost", None)


def test_a_failure_while_the_shards_are_told_is_not_overwritten() -> None:
    with crew(1) as job:
        coordinator = job.cluster.coordinator
        assign = coordinator._assign

        def fail_meanwhile(layout: Layout) -> bool:
            assigned = assign(layout)
            coordinator.fail(Failure(kind="cancelled", message="cancelled meanwhile"))
            return assigned

        coordinator._assign = fail_meanwhile  # type: ignore[method-assign]
        with pytest.raises(LinkError, match="cancelled meanwhile"):
            job.links[0].join(vector_layout(LENGTH), node="n", device="cpu")
        assert failure_of(job).kind == "cancelled"


def test_who_is_not_of_this_attempt_is_not_let_in() -> None:
    with crew(1) as job:
        host, port = job.cluster.coordinator.address
        for worker, incarnation in ((0, 0), (0, 2), (1, 1)):
            with pytest.raises(HandshakeError):
                Control.connect(host, port, job.cluster.key, worker=worker, incarnation=incarnation)
        with pytest.raises(HandshakeError, match="key does not match"):
            Control.connect(host, port, bytes(32), worker=0, incarnation=1)


# --- training ---


def test_a_failure_lets_everybody_who_waits_in_a_round_go_with_the_reason() -> None:
    with crew(3) as job:
        job.join()
        waiting = [job.push(0), job.push(1)]
        job.controls[2].close()
        for call in waiting:
            with pytest.raises(LinkError, match="the job failed: worker 2 was lost"):
                call.result(PROMPTLY_S)
        failure = until_failed(job)
        assert (failure.kind, failure.worker) == ("worker_lost", 2)


def test_the_worker_that_is_to_blame_is_let_go_too() -> None:
    with crew(2, round_timeout_s=0.1) as job:
        job.join()
        with pytest.raises(LinkError, match=r"the job failed: round 1 waited \d+ s for worker 1"):
            job.push(0).result(PROMPTLY_S)
        with pytest.raises(LinkError, match="the job failed"):
            job.push(1).result(PROMPTLY_S)


def test_a_worker_that_is_never_finite_fails_the_job_and_all_are_let_go() -> None:
    with crew(2) as job:
        job.join()
        for _ in range(MOST_NON_FINITE_IN_A_ROW):
            calls = [job.push(0), job.push(1, np.nan)]
            assert until_failed_or_answered(job, calls)
        failure = until_failed(job)
        assert (failure.kind, failure.worker) == ("non_finite", 1)
        for worker in (0, 1):
            with pytest.raises(LinkError, match="worker 1 sent 10 contributions in a row"):
                job.push(worker).result(PROMPTLY_S)
        assert job.cluster.snapshot().telemetry.dropped == {"non_finite": MOST_NON_FINITE_IN_A_ROW}


def until_failed_or_answered(job: Crew, calls: list[Background[Answer]]) -> bool:
    for call in calls:
        try:
            call.result()
        except LinkError as error:
            return "10 contributions in a row" in str(error)
    return True


def test_a_lost_shard_lets_everybody_go() -> None:
    with crew(2) as job:
        job.join()
        waiting = job.push(0)
        job.cluster.shards[1].close()
        with pytest.raises(LinkError):
            waiting.result(PROMPTLY_S)
        failure = until_failed(job)
        assert (failure.kind, failure.worker) == ("shard_lost", None)
        assert "parameter server 1 was lost" in failure.message


def test_a_lost_coordinator_lets_everybody_go() -> None:
    with crew(2) as job:
        job.join()
        waiting = job.push(0)
        job.cluster.coordinator.close()
        with pytest.raises(LinkError, match="the connection to the coordinator ended"):
            waiting.result(PROMPTLY_S)
        with pytest.raises(LinkError):
            job.links[1].lease(Lease(8, 4, True, 1))


@pytest.mark.parametrize(
    ("worker", "start", "stop"), [(0, 0, 5), (0, 3, 9), (1, 0, 4)], ids=["beyond", "after", "of_another"]
)
def test_samples_that_a_worker_does_not_hold_fail_the_job_by_name(worker: int, start: int, stop: int) -> None:
    with crew(2) as job:
        job.join()
        lease = job.links[0].lease(Lease(8, 4, True, 1))
        assert isinstance(lease, Leased)
        calls = [job.push(other) for other in (0, 1) if other != worker]
        calls.append(job.push(worker, spans=(Span(lease.lease, start, stop),)))
        for call in calls:
            with pytest.raises(LinkError, match=f"worker {worker} contributed samples that it does not hold"):
                call.result(PROMPTLY_S)
        failure = until_failed(job)
        assert (failure.kind, failure.worker) == ("protocol", worker)


def test_a_request_of_a_worker_that_nobody_knows_disturbs_nobody() -> None:
    with crew(2) as job:
        job.join()
        for key in (messages.Key(77, 1, 1), messages.Key(0, 9, 1)):
            job.cluster.coordinator.received(
                messages.Received(0, key, "update", 0, 1, 1, None, True, b"", (), "")
            )
        calls = [job.push(0), job.push(1)]
        assert {call.result().note.version for call in calls} == {1}
        assert job.cluster.snapshot().telemetry.dropped == {"stale_incarnation": 2}


def test_a_receipt_that_comes_twice_counts_once() -> None:
    with crew(1) as job:
        job.join()
        lease = job.links[0].lease(Lease(8, 4, True, 1))
        assert isinstance(lease, Leased)
        received = job.cluster.coordinator.received
        heard: list[messages.Received] = []

        def twice(message: messages.Received) -> None:
            heard.append(message)
            for _ in range(2):
                received(message)

        job.cluster.coordinator.received = twice  # type: ignore[method-assign]
        spans = (Span(lease.lease, lease.start, lease.stop),)
        assert job.push(0, spans=spans).result().note.version == 1
        for message in heard:
            received(message)
        assert job.push(0).result().note.version == 2
        snapshot = job.cluster.snapshot()
        assert snapshot.phase == "training"
        assert snapshot.progress.samples == 2


@pytest.mark.parametrize(
    "message",
    [
        Lease(8, 0, True, 1),
        Lease(-1, 4, True, 1),
        Lease(8, 4, True, 0),
        Telemetry(1, 1, 1.0, 1, 1, 1, 1, {"send": ((1, 2), 0.5)}),
        Telemetry(1, 1, 1.0, 1, 1, 1, 1, {"sleep": ((0,) * messages.BUCKETS, 0.5)}),  # type: ignore[dict-item]
        Log(((0.0, "stdlog", "text"),)),  # type: ignore[arg-type]
        Request("fetch", 1, -1, ()),
        Done(),
    ],
    ids=["batch_size", "size", "epochs", "buckets", "phase", "stream", "request", "reply"],
)
def test_what_a_worker_may_not_send_loses_that_worker_and_nothing_else_breaks(message: Message) -> None:
    with crew(2) as job:
        job.join()
        with pytest.raises(ConnectionError):
            job.ask(1, message)
        failure = until_failed(job)
        assert (failure.kind, failure.worker) == ("worker_lost", 1)
        assert job.cluster.snapshot().progress.samples == 0


def test_datasets_that_differ_are_refused_and_everybody_let_go() -> None:
    with crew(2) as job:
        job.join()
        job.links[0].lease(Lease(8, 4, True, 1))
        waiting = job.push(0)
        with pytest.raises(
            LinkError, match="worker 1 asks for batches of a dataset with size 9 instead of 8"
        ):
            job.links[1].lease(Lease(9, 4, True, 1))
        with pytest.raises(LinkError, match="size 9 instead of 8"):
            waiting.result(PROMPTLY_S)


def test_whatever_a_worker_tells_can_be_shown() -> None:
    with crew(1) as job:
        job.join()
        data = {"nan": float("nan"), "bytes": b"\xff", "nested": {"list": [float("inf"), None, True, 1]}}
        job.controls[0].tell(Notice("odd", "odd things", "catastrophic", data))
        job.controls[0].tell(Report({"loss": float("nan"), "accuracy": 0.5}, 1))
        job.controls[0].tell(Telemetry(3, 9, 1.0, 10, 20, 30, 40, {"send": ((1,) * messages.BUCKETS, 0.5)}))
        snapshot = eventually(job, lambda snapshot: snapshot.progress.wire_bytes == 30)
        odd = next(event for event in snapshot.events if event.kind == "odd")
        assert odd.severity == "warning"
        assert odd.data == {
            "nan": "nan",
            "bytes": "b'\\xff'",
            "nested": {"list": ["inf", None, True, 1]},
            "worker": 0,
        }
        assert snapshot.progress.metrics == {"accuracy": 0.5}
        assert JobSnapshot.model_validate_json(snapshot.model_dump_json()) == snapshot


def test_no_data_is_given_once_training_stops() -> None:
    with crew(1, job_spec(stop={"samples": 1})) as job:
        job.join()
        assert isinstance(job.links[0].lease(Lease(8, 4, True, 1)), Leased)
        assert "stop.samples" in job.push(0).result().note.stop
        exhausted = job.links[0].lease(Lease(8, 4, True, 1))
        assert isinstance(exhausted, Exhausted)
        assert "stop.samples" in exhausted.reason


# --- the end ---


def test_of_workers_that_finish_at_once_exactly_one_is_the_last() -> None:
    for _ in range(5):
        with crew(4) as job:
            job.join()
            calls = [Background(link.finish) for link in job.links]
            assert sorted(call.result() for call in calls) == [False, False, False, True]


def test_only_the_last_completes_the_job_and_then_nothing_can_fail() -> None:
    with crew(2) as job:
        job.join()
        assert not job.links[0].finish()
        with pytest.raises(RefusedError) as caught:
            job.ask(0, Published())
        assert caught.value.code == "not_last"
        job.controls[0].close()
        assert job.links[1].finish()
        job.links[1].published()
        assert job.cluster.snapshot().phase == "completed"
        job.cluster.coordinator.lost(1, "it exited")
        job.cluster.coordinator.fail(Failure(kind="late", message="too late"))
        snapshot = job.cluster.snapshot()
        assert (snapshot.phase, snapshot.failure) == ("completed", None)


def test_a_worker_that_is_lost_after_it_finished_is_missed_only_where_it_had_to_publish() -> None:
    for last in (0, 1):
        with crew(2) as job:
            job.join()
            job.links[1 - last].finish()
            assert job.links[last].finish()
            job.cluster.coordinator.lost(1 - last, "it exited")
            assert job.cluster.snapshot().phase == "training"
            job.controls[last].close()
            failure = until_failed(job)
            assert (failure.kind, failure.worker) == ("worker_lost", last)


def test_a_round_goes_on_without_a_worker_that_finished() -> None:
    with crew(3) as job:
        job.join()
        calls = [job.push(0), job.push(1)]
        job.links[2].finish()
        assert {call.result().note.version for call in calls} == {1}


def test_a_worker_that_breaks_off_its_lease_gives_it_back() -> None:
    with crew(2) as job:
        job.join()
        first = job.links[0].lease(Lease(8, 4, True, 1))
        assert isinstance(first, Leased)
        job.links[0].finish()
        again = [job.links[1].lease(Lease(8, 4, True, 1)) for _ in range(2)]
        assert {(lease.start, lease.stop) for lease in again if isinstance(lease, Leased)} == {(0, 4), (4, 8)}
        job.links[1].finish()
        job.links[1].published()
        left = next(event for event in job.cluster.snapshot().events if event.kind == "data_left")
        assert left.data["samples"] == 8


def test_events_are_numbered_and_told_once() -> None:
    with crew(1) as job:
        job.join()
        first = job.cluster.coordinator.snapshot()
        assert [event.number for event in first.events] == list(range(1, len(first.events) + 1))
        assert [event.kind for event in first.events] == ["worker_joined", "training_started"]
        again = job.cluster.coordinator.snapshot(after_event=first.events[-1].number)
        assert again.events == []


def test_after_the_end_no_thread_remains() -> None:
    before = set(threading.enumerate())
    with crew(3) as job:
        job.join()
        job.push(0)
        job.cluster.coordinator.fail(Failure(kind="cancelled", message="cancelled"))
    deadline = time.monotonic() + SOON_S
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.005)


def test_finishing_twice_loses_nothing() -> None:
    with crew(2) as job:
        job.join()
        assert job.ask(0, Finish()) == Finished(last=False)
        with pytest.raises(ConnectionError):
            job.ask(0, Finish())
        assert job.links[1].finish()
        assert job.cluster.snapshot().phase == "training"
