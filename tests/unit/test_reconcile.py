"""One pass of the controller: what should be against what is."""

from __future__ import annotations

from typing import Any

import pytest

from cadenza.spec import JobSpec
from cadenza_service.jobs.lifecycle import TERMINAL, WITHOUT_REASON, JobState
from cadenza_service.jobs.records import Job, Reason
from cadenza_service.orchestration.reconcile import Action, Cancel, Explain, Recover, Remove, Start, plan
from cadenza_service.orchestration.resources import Node, Resources
from cadenza_service.snapshot import Progress, Telemetry

FOUR_CPUS = [Node("a", Resources(4), Resources(4))]
RUNNING_PARTS = {"supervisor", "coordinator", "shard:0", "worker:0"}
LIVING = [state for state in JobState if state not in TERMINAL]


def job(id: str, state: JobState = JobState.QUEUED, **fields: Any) -> Job:
    workers = fields.pop("workers", {})
    spec = JobSpec.model_validate({"name": "job", "entrypoint": "train:main", "workers": workers})
    values: dict[str, Any] = {
        "id": id,
        "name": "job",
        "spec": spec,
        "state": state,
        "reason": None if state in WITHOUT_REASON else Reason(code="r", message="m"),
        "desired": "run",
        "epoch": 1,
        "created_at": 0.0,
        "updated_at": 0.0,
        "started_at": None,
        "finished_at": None,
        "progress": Progress(),
        "telemetry": Telemetry(),
    }
    return Job(**(values | fields))


def passed(
    jobs: list[Job], actors: dict[str, set[str]] | None = None, nodes: list[Node] | None = None
) -> list[Action]:
    return plan(jobs, actors or {}, FOUR_CPUS if nodes is None else nodes, {})


def started(action: Action) -> tuple[Job, int]:
    """The job that is started, and its number of workers."""
    assert isinstance(action, Start)
    return action.job, len(action.placement.workers)


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.UNSCHEDULABLE, JobState.RECOVERING])
def test_a_waiting_job_that_fits_is_started(state: JobState) -> None:
    waiting = job("a", state, workers={"min": 1, "max": 8})
    (start,) = passed([waiting])
    assert started(start) == (waiting, 4)


def test_older_jobs_come_first_and_what_they_get_is_gone() -> None:
    first, second = job("a", workers={"min": 3}), job("b", workers={"min": 2})
    start, explain = passed([first, second])
    assert started(start) == (first, 3)
    assert isinstance(explain, Explain)
    assert explain.state is JobState.QUEUED
    assert explain.reason.code == "waiting_for_resources"
    assert "the cluster has free 1 CPU" in explain.reason.message


def test_a_large_job_that_waits_is_not_starved_by_small_ones() -> None:
    busy = [Node("a", Resources(4), Resources(2))]
    large, small = job("a", workers={"min": 3}), job("b", workers={"min": 1})
    actions = passed([large, small], nodes=busy)
    assert [type(action) for action in actions] == [Explain, Explain]


def test_a_job_that_can_never_fit_is_unschedulable_and_holds_up_nobody() -> None:
    impossible, possible = job("a", workers={"min": 2, "cpus": 16}), job("b")
    explain, start = passed([impossible, possible])
    assert isinstance(explain, Explain)
    assert explain.state is JobState.UNSCHEDULABLE
    assert "missing 28 CPU" in explain.reason.message
    assert started(start) == (possible, 1)


def test_a_recovering_job_that_no_longer_fits_goes_through_the_queue() -> None:
    (explain,) = passed([job("a", JobState.RECOVERING, workers={"min": 9})])
    assert isinstance(explain, Explain)
    assert explain.state is JobState.QUEUED


def test_what_a_job_gets_is_gone_on_its_own_nodes() -> None:
    nodes = [Node("a", Resources(2), Resources(2)), Node("b", Resources(3), Resources(3))]
    first, second = job("a", workers={"min": 2}), job("b", workers={"min": 1, "max": 9})
    one, other = passed([first, second], nodes=nodes)
    assert isinstance(one, Start)
    assert isinstance(other, Start)
    assert one.taken == {"a": Resources(1), "b": Resources(1)}
    assert other.taken == {"a": Resources(1), "b": Resources(2)}


def test_what_a_starting_job_was_promised_is_kept_for_it() -> None:
    starting = job("a", JobState.STARTING, workers={"min": 4})
    promised = {"a": {"a": Resources(4)}}
    (explain,) = plan([starting, job("b")], {"a": {"supervisor"}}, FOUR_CPUS, promised)
    assert isinstance(explain, Explain)
    assert explain.job.id == "b"


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING])
@pytest.mark.parametrize("parts", [set(), {"coordinator", "worker:0"}])
def test_a_started_job_without_its_supervisor_recovers(state: JobState, parts: set[str]) -> None:
    lost = job("a", state)
    assert passed([lost], {"a": parts} if parts else {}) == [Recover(lost)]


@pytest.mark.parametrize("state", [JobState.STARTING, JobState.RUNNING, JobState.RECOVERING])
def test_a_supervised_job_is_left_alone(state: JobState) -> None:
    assert passed([job("a", state)], {"a": RUNNING_PARTS}) == []


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.UNSCHEDULABLE])
def test_a_waiting_job_does_not_start_beside_an_earlier_attempt(state: JobState) -> None:
    assert passed([job("a", state)], {"a": {"supervisor", "worker:0"}}) == [
        Remove("a", frozenset({"supervisor", "worker:0"}))
    ]


def test_a_recovering_job_does_not_start_beside_an_earlier_attempt() -> None:
    assert passed([job("a", JobState.RECOVERING)], {"a": {"worker:0"}}) == [
        Remove("a", frozenset({"worker:0"}))
    ]


@pytest.mark.parametrize("state", LIVING)
def test_a_job_to_be_cancelled_loses_its_actors_and_then_is(state: JobState) -> None:
    unwanted = job("a", state, desired="cancelled")
    assert passed([unwanted], {"a": RUNNING_PARTS}) == [Remove("a", frozenset(RUNNING_PARTS))]
    assert passed([unwanted]) == [Cancel(unwanted)]


def test_actors_without_a_job_are_removed() -> None:
    assert passed([], {"gone": {"shard:0"}}) == [Remove("gone", frozenset({"shard:0"}))]
