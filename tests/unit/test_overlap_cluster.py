"""Overlap and streaming with real shards, a real coordinator and several workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cadenza.plane.network import NetworkLink
from cadenza.training.session import Session
from tests.harness import LocalCluster, job_spec
from tests.unit.awkward import KINDS, Kind, groups, same, state_of

State = dict[str, Tensor]

WORKERS = 2
SAMPLES = 384


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def learned_of(state: State) -> State:
    return {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}


def trained(worker: int, link: NetworkLink) -> State:
    """Two epochs of leased data, evaluating when asked."""
    kind = KINDS["convolution"]
    model = kind.model(seed=worker)
    data = TensorDataset(*kind.batch(5, SAMPLES // 2))
    with Session(model, torch.optim.AdamW(model.parameters(), lr=0.01), link=link) as session:
        for x, y in session.batches(data, batch_size=4, epochs=2):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            session.step(loss, clip_norm=1.0)
            if session.evaluation_due():
                session.report(value=loss.item())
        session.finish()
    return state_of(model)


def run(sync: dict[str, Any], **spec: Any) -> tuple[list[State], Any, dict[str, Any]]:
    with LocalCluster(job_spec(sync=sync, **spec), workers=WORKERS, shards=2) as cluster:
        return cluster.run(trained), cluster.snapshot(), cluster.state()


@pytest.mark.parametrize(
    "sync",
    [
        {"mode": "local", "local_steps": 8},
        {"mode": "local", "local_steps": 8, "overlap": "on"},
        {"mode": "local", "local_steps": 8, "overlap": "on", "overlap_mix": 0.5},
        {"mode": "ssp", "local_steps": 4, "staleness": 2, "overlap": "on"},
        {"mode": "async", "local_steps": 1, "overlap": "on"},
    ],
    ids=["auto", "on", "mixed", "ssp", "async"],
)
def test_every_sample_is_committed_once_and_the_last_worker_ends_with_the_committed_weights(
    sync: dict[str, Any],
) -> None:
    states, job, vectors = run(sync, evaluation={"every_samples": 100})
    assert (job.phase, job.progress.samples) == ("completed", SAMPLES)
    committed = torch.tensor(vectors["parameters.float32"])
    ends = [
        torch.cat([value.reshape(-1) for name, value in state.items() if name.endswith(("weight", "bias"))])
        for state in states
    ]
    assert any(torch.equal(end, committed) for end in ends)
    assert committed.isfinite().all()


def test_auto_in_local_mode_repeats_to_the_bit() -> None:
    first, second = (run({"mode": "local", "local_steps": 8})[0] for _ in range(2))
    assert all(same(one, other) for one, other in zip(first, second, strict=True))


def test_a_poisoned_batch_ends_in_finite_weights_and_its_samples_are_accounted_for() -> None:
    kind = KINDS["tied"]
    data = TensorDataset(*kind.batch(5, 240))

    def body(worker: int, link: NetworkLink) -> State:
        model = kind.model()
        with Session(model, torch.optim.Adam(model.parameters(), lr=0.01), link=link) as session:
            for x, y in session.batches(data, batch_size=4):
                poisoned = worker == 1 and session.steps == 10
                loss = F.mse_loss(model(x * float("nan") if poisoned else x), y)
                loss.backward()
                session.step(loss)
        return state_of(model)

    spec = job_spec(sync={"mode": "local", "local_steps": 8, "overlap": "auto"})
    with LocalCluster(spec, workers=2) as cluster:
        states = cluster.run(body)
        job = cluster.snapshot()
    assert all(value.isfinite().all() for state in states for value in state.values())
    # Eight steps in the contribution, and two that followed it.
    assert (job.phase, job.progress.samples) == ("completed", 200)


# --- streaming ---


@pytest.mark.parametrize("name", ["convolution", "mixed", "shapes", "unused"])
def test_streamed_gradients_give_the_same_bits_as_gradients_after_the_backward_pass(name: str) -> None:
    kind = KINDS[name]

    def body(worker: int, link: NetworkLink) -> State:
        model = kind.model(seed=worker)
        with Session(model, groups(model), link=link) as session:
            for step in range(6):
                loss = kind.loss(model, 10 * step + worker)
                loss.backward()
                session.step(loss, samples=4 + worker)
        return state_of(model)

    results = []
    for overlap in ("off", "auto"):
        spec = job_spec(sync={"mode": "sync", "overlap": overlap})
        with LocalCluster(spec, workers=2, shards=3) as cluster:
            results.append(cluster.run(body))
    for plain, streamed in zip(*results, strict=True):
        assert same(plain, streamed)


WIDE = Kind(
    lambda: nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Linear(256, 6)), width=256
)
"""Several units a shard, of which most hold one parameter only."""


@pytest.mark.parametrize("ending", ["finished", "in the middle"])
def test_gradients_that_change_after_they_left_are_averaged_as_they_are(ending: str) -> None:
    def body(worker: int, link: NetworkLink) -> State:
        model = WIDE.model()
        with Session(model, torch.optim.SGD(model.parameters(), lr=0.1), link=link) as session:
            for step in range(6):
                loss = WIDE.loss(model, 10 * step + worker)
                loss.backward()
                if step == 4 and worker == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                session.step(loss, samples=4)
            if ending == "in the middle":
                WIDE.loss(model, 99).backward()  # its gradients leave, and no step follows
        return state_of(model)

    results = []
    for overlap in ("off", "auto"):
        spec = job_spec(sync={"mode": "sync", "overlap": overlap})
        with LocalCluster(spec, workers=2, shards=2) as cluster:
            results.append(cluster.run(body))
            assert cluster.snapshot().phase == "completed"
    assert same(results[0][0], results[1][0])
    assert same(results[1][0], results[1][1])
