"""Processes that are killed in the middle of a job."""

from __future__ import annotations

import os
import signal

import pytest
import ray

from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.jobs.records import Job
from cadenza_service.orchestration import cluster
from cadenza_service.orchestration.cluster import CONTROLLER, NAMESPACE
from tests.integration.code import TRAIN
from tests.integration.support import Service

pytestmark = pytest.mark.ray


def running(service: Service, *, epochs: int) -> Job:
    """A job of two workers and two shards that has done some rounds; an epoch takes about a second."""
    job = service.submit(
        {"regression.py": TRAIN},
        entrypoint="regression:train",
        config={"pause_s": 0.03},
        workers={"min": 2, "cpus": 1},
        servers={"count": 2},
        data={"epochs": epochs},
        sync={"mode": "local", "local_steps": 2},
    )
    return service.wait_rounds(job.id, 5)


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def test_a_job_outlives_its_supervisor(service: Service) -> None:
    job = running(service, epochs=6)
    first = service.pid(job.id, "supervisor")
    kill(first)
    job = service.wait(job.id, JobState.SUCCEEDED)
    assert job.epoch == 1, service.story(job.id)
    assert job.progress.samples == 6 * 512
    service.assert_nothing_left(job.id)


def test_a_job_outlives_the_controller(service: Service) -> None:
    job = running(service, epochs=6)
    controller = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    kill(service.pid_of(controller))
    job = service.wait(job.id, JobState.SUCCEEDED)
    assert job.epoch == 1, service.story(job.id)
    assert job.progress.samples == 6 * 512
    assert [event.seq for event in service.store.events(job.id)] == list(
        range(1, len(service.store.events(job.id)) + 1)
    )
    service.assert_nothing_left(job.id)


def test_a_job_whose_processes_are_all_gone_starts_again(service: Service) -> None:
    """What a service finds that was left while its job ran."""
    job = running(service, epochs=3)
    cluster.remove(job.id, set(service.parts(job.id)))
    service.until(lambda: service.store.job(job.id).epoch == 2)
    job = service.wait(job.id, JobState.SUCCEEDED)
    states = [event.state for event in service.store.events(job.id) if event.kind == "state"]
    assert JobState.RECOVERING in states
    assert job.progress.samples == 3 * 512
    service.assert_nothing_left(job.id)


@pytest.mark.parametrize(
    ("part", "code", "name"),
    [
        ("worker:1", "worker_lost", "worker 1"),
        ("shard:1", "shard_lost", "parameter server 1"),
        ("coordinator", "coordinator_lost", "coordinator"),
    ],
)
def test_a_lost_process_ends_the_job_and_is_named(service: Service, part: str, code: str, name: str) -> None:
    job = running(service, epochs=100)
    kill(service.pid(job.id, part))
    job = service.wait(job.id, JobState.FAILED)
    assert job.reason is not None
    assert job.reason.code == code
    assert name in job.reason.message
    assert job.reason.remedy
    service.assert_nothing_left(job.id)


def test_a_job_of_unknown_origin_is_removed(service: Service) -> None:
    """Actors of a job that the store does not know, as after a database was put back from a copy."""

    class Stray:
        pass

    name = cluster.actor_name("no-such-job", "worker:0")
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    ray.remote(Stray).options(**options).remote()
    service.until(lambda: "no-such-job" not in cluster.job_actors())
