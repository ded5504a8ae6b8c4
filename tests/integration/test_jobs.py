"""Jobs from the queue to their end, with everything real but the API."""

from __future__ import annotations

import pytest
import torch
from safetensors.numpy import load_file

from cadenza_service.jobs.lifecycle import JobState
from tests.integration.code import TRAIN
from tests.integration.support import Service

pytestmark = pytest.mark.ray

CODE = {"regression.py": TRAIN}
TWO = {"min": 2, "cpus": 1}


@pytest.mark.parametrize("mode", ["sync", "local", "ssp", "async"])
def test_a_job_trains_and_its_model_comes_back(service: Service, mode: str) -> None:
    job = service.submit(
        CODE,
        entrypoint="regression:train",
        workers=TWO,
        servers={"count": 2},
        sync={"mode": mode},
        data={"epochs": 2},
    )
    job = service.wait(job.id, JobState.SUCCEEDED)
    assert job.progress.samples == job.progress.total_samples == 1024
    assert job.progress.metrics["evaluated"] == 1.0
    assert [worker.state for worker in job.progress.workers] == ["finished", "finished"]
    (checkpoint,) = service.storage.checkpoints(job.id)
    assert checkpoint.round == job.progress.rounds
    assert checkpoint.samples == 1024
    model = load_file(service.storage.model_path(job.id, checkpoint.n))
    shapes = {name: tensor.shape for name, tensor in model.items()}
    assert shapes == {"0.weight": (16, 8), "0.bias": (16,), "2.weight": (1, 16), "2.bias": (1,)}
    said = sorted(
        line.text.partition(" took ")[0] for line in service.store.logs(job.id) if "took" in line.text
    )
    assert said == ["worker 0", "worker 1"]
    states = [event.state for event in service.store.events(job.id) if event.kind == "state"]
    assert states == [JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.SUCCEEDED]
    service.assert_nothing_left(job.id)


def test_as_many_workers_start_as_fit(service: Service) -> None:
    job = service.submit(CODE, entrypoint="regression:train", workers={"min": 1, "max": 9, "cpus": 2})
    job = service.wait(job.id, JobState.SUCCEEDED)
    assert len(job.progress.workers) == 2


def test_a_worker_gets_the_gpu_that_it_asks_for(service: Service) -> None:
    """Ray's part of it: the card is the worker's alone. Without one, PyTorch sees none, and the job is told so."""
    job = service.submit(
        CODE, entrypoint="regression:shows_its_gpu", workers={"min": 1, "cpus": 1, "gpus": 1}
    )
    job = service.wait(job.id, JobState.SUCCEEDED)
    assert "this worker's cards: 0" in [line.text for line in service.store.logs(job.id)]
    told = {event.kind for event in service.store.events(job.id)}
    assert ("no_gpu" in told) is not torch.cuda.is_available()


def test_the_package_may_name_its_modules_like_ours(service: Service) -> None:
    """A single top-level folder, a module that exists nowhere else, and two named like modules of the service."""
    folder = "examples_of_mine"
    code = {
        f"{folder}/store.py": TRAIN.replace("import helpers", f"from {folder} import wire as helpers"),
        f"{folder}/wire.py": "GREETING = 'hello from the package'\n",
        f"{folder}/__init__.py": "",
    }
    job = service.submit(code, entrypoint=f"{folder}.store:imports_helpers", workers=TWO)
    job = service.wait(job.id, JobState.SUCCEEDED)
    assert "helpers say hello from the package" in [line.text for line in service.store.logs(job.id)]


def test_too_many_resources_are_named_and_the_job_can_be_cancelled(service: Service) -> None:
    job = service.submit(CODE, entrypoint="regression:train", workers={"min": 4, "cpus": 16, "gpus": 1})
    job = service.wait(job.id, JobState.UNSCHEDULABLE)
    assert job.reason is not None
    assert "missing 60 CPU and 3 GPU" in job.reason.message
    assert service.store.cancel(job.id).state is JobState.CANCELLED


def test_a_job_waits_for_resources_and_starts_by_itself(service: Service) -> None:
    config = {"pause_s": 0.05}
    first = service.submit(CODE, entrypoint="regression:train", config=config, workers={"min": 3, "cpus": 1})
    second = service.submit(CODE, entrypoint="regression:train", workers=TWO)
    service.wait(first.id, JobState.RUNNING)
    waiting = service.store.job(second.id)
    assert waiting.state is JobState.QUEUED
    assert waiting.reason is not None
    assert waiting.reason.code == "waiting_for_resources"
    service.wait(first.id, JobState.SUCCEEDED)
    service.wait(second.id, JobState.SUCCEEDED)


def test_a_running_job_is_cancelled(service: Service) -> None:
    job = service.submit(
        CODE, entrypoint="regression:train", config={"pause_s": 0.05}, workers=TWO, data={"epochs": 100}
    )
    service.wait(job.id, JobState.RUNNING)
    service.store.cancel(job.id)
    job = service.wait(job.id, JobState.CANCELLED)
    assert job.reason is not None
    assert job.reason.code == "cancelled_by_user"
    service.assert_nothing_left(job.id)


@pytest.mark.parametrize(
    ("entrypoint", "kind", "text", "remedy"),
    [
        ("nowhere:train", "entrypoint", "there is no module 'nowhere'", "submit the folder"),
        ("regression:trian", "entrypoint", "has no function 'trian'", "did you mean regression:train?"),
        ("regression:returns_early", "never_joined", "returned without joining", "cadenza.join"),
        ("regression:never_steps", "never_stepped", "session.step was never called", ""),
    ],
)
def test_code_that_cannot_train_says_why(
    service: Service, entrypoint: str, kind: str, text: str, remedy: str
) -> None:
    job = service.submit(CODE, entrypoint=entrypoint, workers=TWO)
    job = service.wait(job.id, JobState.FAILED)
    assert job.reason is not None
    assert job.reason.code == kind, service.story(job.id)
    assert text in job.reason.message
    assert remedy in job.reason.remedy
    service.assert_nothing_left(job.id)


def test_a_users_error_reaches_the_reason_the_events_and_the_log(service: Service) -> None:
    job = service.submit(
        CODE,
        entrypoint="regression:train",
        config={"raise_at": 50},
        workers=TWO,
        data={"epochs": 10},
        sync={"mode": "sync"},
    )
    job = service.wait(job.id, JobState.FAILED)
    assert job.reason is not None
    assert job.reason.code == "user_error"
    assert "worker 1, step 50: ValueError: no luck at all" in job.reason.message
    assert (job.reason.details["worker"], job.reason.details["step"]) == (1, 50)
    assert 'File "regression.py", line ' in job.reason.details["traceback"]
    assert "raise ValueError" in job.reason.details["traceback"]
    (failed,) = [event for event in service.store.events(job.id) if event.kind == "failed"]
    assert failed.data["traceback"] == job.reason.details["traceback"]
    told = [(line.worker, line.text) for line in service.store.logs(job.id)]
    assert (1, "ValueError: no luck at all") in told
    service.assert_nothing_left(job.id)


def test_a_package_that_is_not_there_fails_the_job(service: Service) -> None:
    job = service.submit(
        CODE, entrypoint="regression:train", workers=TWO, runtime_env={"working_dir": f"sha256:{'0' * 64}"}
    )
    job = service.wait(job.id, JobState.FAILED)
    assert job.reason is not None
    assert job.reason.code == "package"
    assert "0" * 64 in job.reason.message
