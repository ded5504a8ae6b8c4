"""Jobs in the forms of the data plane that are not the defaults, submitted over REST, and their models back."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from cadenza.spec import JobSpec
from cadenza_api.client.client import Client
from tests.integration.test_service_followers import TOKEN
from tests.integration.test_service_followers import service as serving

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

SPEC: dict[str, Any] = {
    "name": "forms",
    "entrypoint": "digits:train",
    "config": {"lr": 0.003},
    "workers": {"min": 2, "cpus": 0.25},
    "servers": {"count": 2},
}

FORMS: dict[str, tuple[dict[str, Any], int]] = {
    "int8 gradients as they come": ({"mode": "sync", "codec": "int8", "overlap": "auto"}, 3),
    "sparse deltas under overlap": (
        {"mode": "local", "local_steps": 8, "codec": "topk:0.1", "overlap": "on"},
        6,
    ),
    "groups and momentum": ({"mode": "local", "groups": 4, "outer": {"name": "nesterov"}}, 6),
}
"""By name, what is asked of the rounds, and epochs."""

LEAST_ACCURACY = 0.85


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "empty").mkdir()
    # The code under test, where that is not the installed one.
    path = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    with (
        serving(folder / "home", folder / "empty", **path) as running,
        Client(running.url, token=TOKEN) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def jobs(client: Client) -> dict[str, str]:
    """All of them at once, since most of a short job's time is its processes' start; the id of each."""
    package = client.upload_package(EXAMPLES)
    common = SPEC | {"runtime_env": {"working_dir": package.reference}}
    return {
        form: client.submit(JobSpec.model_validate(common | {"sync": sync, "data": {"epochs": epochs}})).id
        for form, (sync, epochs) in FORMS.items()
    }


@pytest.mark.parametrize("form", FORMS)
def test_digits_are_learnt(
    client: Client, jobs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    job_id = jobs[form]
    story = [f"{event.kind}: {event.message}" for event in client.events(job_id, follow=True)]
    job = client.job(job_id)
    assert job.state == "SUCCEEDED", story
    client.download_model(job_id, tmp_path / "model.safetensors")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    digits = importlib.import_module("digits")
    model = digits.build()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    figures = digits.evaluate(model, digits.load()[1], torch.device("cpu"))
    assert figures["accuracy"] >= LEAST_ACCURACY, story
    # What the last worker evaluated is what was stored.
    assert figures["accuracy"] == pytest.approx(job.progress.metrics["accuracy"], abs=1e-6)
    assert figures["test_loss"] == pytest.approx(job.progress.metrics["test_loss"], rel=1e-4)


def test_an_unknown_codec_is_refused_by_name(client: Client) -> None:
    answer = httpx.post(
        f"{client.url}/v1/jobs",
        json=SPEC | {"sync": {"codec": "gzip"}},
        headers={"Authorization": f"Bearer {TOKEN}"},
        trust_env=False,
    )
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == "sync.codec"
    assert "gzip" in str(error)
    assert "int8" in str(error)
