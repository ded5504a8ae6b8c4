"""With real shards and a real coordinator: the same job again, a long evaluation, and the file that comes out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from cadenza.plane.link import LinkError
from cadenza.plane.network import NetworkLink
from cadenza.training.inventory import unwrapped
from cadenza.training.session import Session
from cadenza_service.coordination import terms
from cadenza_service.orchestration.model_file import write_model
from tests.harness import LocalCluster, job_spec
from tests.unit.awkward import KINDS, Kind, groups, same, state_of

WORKERS = 3
MODES: list[dict[str, Any]] = [
    {"mode": "sync"},
    {"mode": "local", "local_steps": 2},
    {"mode": "ssp", "local_steps": 2},
    {"mode": "async", "local_steps": 2},
]
modes = pytest.mark.parametrize("sync", MODES, ids=[str(mode["mode"]) for mode in MODES])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# --- the same job again ---


def final_state(sync: dict[str, Any], order: list[int]) -> dict[str, NDArray[np.generic]]:
    """What a job comes to whose workers ask for their first samples in the given order."""
    kind = KINDS["convolution"]
    data = TensorDataset(*kind.batch(5, 200))
    turns = [threading.Event() for _ in range(WORKERS + 1)]
    turns[0].set()

    def body(worker: int, link: NetworkLink) -> None:
        model = kind.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        turn = order.index(worker)
        with Session(model, optimizer, link=link) as session:
            assert turns[turn].wait(20)
            for x, y in session.batches(data, batch_size=4, epochs=2):
                turns[turn + 1].set()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                session.step(loss)

    with LocalCluster(job_spec(sync=sync), workers=WORKERS) as cluster:
        cluster.run(body)
        assert cluster.snapshot().progress.samples == 400
        return cluster.state()


@pytest.mark.parametrize("sync", MODES[:2], ids=["sync", "local"])
def test_the_same_job_comes_to_the_same_bits_whoever_is_first(sync: dict[str, Any]) -> None:
    once, again = final_state(sync, [0, 1, 2]), final_state(sync, [2, 0, 1])
    assert once.keys() == again.keys()
    assert all(np.array_equal(once[name], again[name]) for name in once if not name.startswith("static"))


# --- an evaluation that takes longer than the shards keep rounds ---


def test_rounds_wait_when_an_evaluation_outlasts_the_kept_ones_and_all_end_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = 3
    monkeypatch.setattr(terms, "MOST_HISTORY_ROUNDS", kept)
    kind = KINDS["convolution"]
    others_steps = threading.Semaphore(0)
    away: list[int] = []

    def body(worker: int, link: NetworkLink) -> dict[str, torch.Tensor]:
        model = kind.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=60)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        with Session(model, optimizer, link=link, scheduler=scheduler, scaler=scaler) as session:
            step = 0
            while session.version < 25:
                loss = kind.loss(model, 100 * step + worker)
                overflow = float("inf") if (worker, step) == (1, 7) else 1.0
                scaler.scale(loss * overflow).backward()
                session.step(loss, samples=4 + worker, clip_norm=0.5)
                step += 1
                if away and away[-1] != worker:
                    others_steps.release()
                if not away and session.evaluation_due():
                    away.append(worker)
                    for _ in range(kept):
                        assert others_steps.acquire(timeout=20), "the rounds did not go on"
                    session.report(value=1.0)
            return state_of(model)

    spec = job_spec(sync={"mode": "sync"}, evaluation={"every_samples": 30})
    with LocalCluster(spec, workers=2) as cluster:
        first, second = (
            {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
            for state in cluster.run(body)
        )
    assert away
    assert same(first, second)


# --- data that does not go round ---


@modes
def test_workers_that_get_no_data_end_in_peace(sync: dict[str, Any]) -> None:
    kind = KINDS["shapes"]
    data = TensorDataset(*kind.batch(5, 8))

    def body(worker: int, link: NetworkLink) -> int:
        model = kind.model()
        with Session(model, groups(model), link=link) as session:
            for x, y in session.batches(data, batch_size=8):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                session.step(loss)
            return session.steps

    # More shards than some vectors have elements: some own nothing of them.
    with LocalCluster(job_spec(sync=sync), workers=WORKERS, shards=7) as cluster:
        assert sorted(cluster.run(body)) == [0, 0, 1]
        assert (cluster.snapshot().phase, cluster.snapshot().progress.samples) == ("completed", 8)


def test_a_second_session_in_a_job_is_refused_with_the_way_out() -> None:
    def body(worker: int, link: NetworkLink) -> None:
        for _ in range(2):
            model = KINDS["tied"].model()
            Session(model, groups(model), link=link)

    with (
        LocalCluster(job_spec(), workers=1) as cluster,
        pytest.raises(LinkError, match=r"joined before, and a job trains one model .* one optimizer"),
    ):
        cluster.run(body)


# --- the file ---


@modes
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_the_models_file_loads_strictly_into_a_fresh_model(
    kind: Kind, sync: dict[str, Any], tmp_path: Path
) -> None:
    finished: list[int] = []

    def body(worker: int, link: NetworkLink) -> dict[str, torch.Tensor]:
        model = kind.model(seed=worker)
        strides = [parameter.stride() for parameter in model.parameters()]
        with Session(model, groups(model), link=link) as session:
            for step in range(5):
                loss = kind.loss(model, 10 * step + worker)
                loss.backward()
                session.step(loss, samples=4 + worker)
            session.finish()
            if session.evaluation_due():
                finished.append(worker)
        assert [parameter.stride() for parameter in model.parameters()] == strides
        return state_of(model)

    with LocalCluster(job_spec(sync=sync), workers=2, shards=7) as cluster:
        states = cluster.run(body)
        layout = cluster.coordinator.layout()
        assert layout is not None
        write_model(tmp_path / "model.safetensors", layout, cluster.state(), {})
    fresh = unwrapped(kind.model(seed=9))
    # assign: torch itself does not copy into an expanded buffer.
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True, assign=True)
    assert len(finished) == 1
    assert same(state_of(fresh), states[finished[0]])
