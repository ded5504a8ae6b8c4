"""Every awkward kind of model trains: alone, and with real shards, a real coordinator and two workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from cadenza.plane.network import NetworkLink
from cadenza.training.session import Session
from cadenza.training.solo import SoloLink
from tests.harness import LocalCluster, job_spec
from tests.unit.awkward import KINDS, Kind, groups, same, state_of

STEPS = 6

State = dict[str, Tensor]

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def together(
    body: Callable[[int, NetworkLink], Any], sync: dict[str, Any], workers: int = 2, **spec: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Each worker's result, and the vectors that the shards held in the end."""
    with LocalCluster(job_spec(sync=sync, **spec), workers=workers) as cluster:
        return cluster.run(body), cluster.state()


# --- alone ---


@kinds
def test_alone_each_kind_trains_as_in_plain_torch_to_the_bit(kind: Kind) -> None:
    model, plain = kind.model(), kind.model()
    optimizer = groups(plain)
    with Session(model, groups(model), link=SoloLink()) as session:
        for step in range(STEPS):
            loss = kind.loss(model, step)
            loss.backward()
            session.step(loss, samples=4)
    for step in range(STEPS):
        optimizer.zero_grad()
        kind.loss(plain, step).backward()
        optimizer.step()
    assert same(state_of(model), state_of(plain))
    assert not same(state_of(model), state_of(kind.model()))


# --- together ---


def trained(kind: Kind, worker: int, link: NetworkLink, scheduled: bool = False) -> State:
    model = kind.model(seed=worker)  # begins unlike the others: all get worker 0's
    optimizer = groups(model)
    scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if scheduled else None
    with Session(model, optimizer, link=link, scheduler=scheduler) as session:
        for step in range(STEPS):
            loss = kind.loss(model, 10 * step + worker)
            loss.backward()
            session.step(loss, samples=4)
    return state_of(model)


@kinds
@pytest.mark.parametrize(
    "sync", [{"mode": "sync"}, {"mode": "local", "local_steps": 2}], ids=["sync", "local"]
)
def test_two_workers_train_each_kind_to_the_same_bits(kind: Kind, sync: dict[str, Any]) -> None:
    (first, second), _ = together(lambda worker, link: trained(kind, worker, link), sync)
    static = [
        name for name, value in first.items() if not value.is_floating_point() and not value.is_complex()
    ]
    assert same(
        {n: v for n, v in first.items() if n not in static},
        {n: v for n, v in second.items() if n not in static},
    )
    assert not same(first, state_of(kind.model(seed=0)))
    assert all(value.isfinite().all() for value in first.values())


def means(kind: Kind, step: int, model: nn.Module) -> None:
    """Give the model the mean gradient of both workers' batches, summed as shards do: in float32, then rounded."""
    gradients: list[list[Tensor | None]] = []
    for worker in range(2):
        model.zero_grad()
        kind.loss(model, 10 * step + worker).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for parameter, *pair in zip(model.parameters(), *gradients, strict=True):
        if pair[0] is not None and pair[1] is not None:
            wide = [
                gradient if gradient.dtype not in (torch.bfloat16,) else gradient.float() for gradient in pair
            ]
            parameter.grad = (0.5 * wide[0] + 0.5 * wide[1]).to(parameter.dtype)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "convolution"])
def test_sync_mode_is_one_process_with_the_mean_gradient(name: str) -> None:
    kind = KINDS[name]
    (state, _), _ = together(
        lambda worker, link: trained(kind, worker, link, scheduled=True), {"mode": "sync"}
    )
    model = kind.model(seed=0)
    optimizer = groups(model)
    scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(STEPS):
        means(kind, step, model)
        optimizer.step()
        scheduler.step()
    assert same(state, state_of(model))


def test_the_shards_hold_the_whole_model_in_the_end() -> None:
    kind = KINDS["convolution"]
    states, vectors = together(lambda worker, link: trained(kind, worker, link), {"mode": "sync"})
    weights = torch.cat(
        [value.reshape(-1) for name, value in states[0].items() if name.endswith(("weight", "bias"))]
    )
    assert torch.equal(torch.tensor(vectors["parameters.float32"]), weights)
    statistics = torch.cat([states[0]["2.running_mean"], states[0]["2.running_var"]])
    assert torch.equal(torch.tensor(vectors["buffers.float32"]), statistics)
    assert vectors["static.uint8"].view("int64").tolist() == [STEPS]


def test_batch_norm_statistics_are_the_mean_of_the_workers() -> None:
    kind = KINDS["convolution"]

    def one_step(worker: int, link: NetworkLink) -> Tensor:
        model = kind.model()
        with Session(model, groups(model, lr=0.0), link=link) as session:
            loss = kind.loss(model, worker)
            loss.backward()
            session.step(loss, samples=4)
        return state_of(model)["2.running_mean"]

    (first, second), _ = together(one_step, {"mode": "local", "local_steps": 1})
    alone = []
    for worker in range(2):
        model = kind.model()
        kind.loss(model, worker)
        alone.append(state_of(model)["2.running_mean"])
    assert torch.equal(first, second)
    assert torch.allclose(first, (alone[0] + alone[1]) / 2, atol=1e-6)


def test_local_buffers_stay_each_workers_own() -> None:
    kind = KINDS["convolution"]

    def body(worker: int, link: NetworkLink) -> State:
        model = kind.model()
        with Session(model, groups(model), link=link, buffers="local") as session:
            for step in range(4):
                loss = kind.loss(model, 10 * step + worker)
                loss.backward()
                session.step(loss, samples=4)
        return state_of(model)

    (first, second), _ = together(body, {"mode": "local", "local_steps": 2})
    assert torch.equal(first["1.weight"], second["1.weight"])
    assert not torch.equal(first["2.running_mean"], second["2.running_mean"])


# --- what loops do ---


def batch(step: int, worker: int, size: int = 8) -> tuple[Tensor, Tensor]:
    return KINDS["tied"].batch(100 * step + worker, size)


@pytest.mark.parametrize(
    "sync", [{"mode": "sync"}, {"mode": "local", "local_steps": 1}], ids=["sync", "local"]
)
def test_accumulated_micro_batches_are_one_batch(sync: dict[str, Any]) -> None:
    kind = KINDS["tied"]

    def body(worker: int, link: NetworkLink, parts: int) -> Tensor:
        model = kind.model().double()
        with Session(model, torch.optim.SGD(model.parameters(), lr=0.1), link=link) as session:
            for step in range(4):
                x, y = (tensor.double() for tensor in batch(step, worker))
                pieces = list(zip(x.chunk(parts), y.chunk(parts), strict=True))
                for number, (px, py) in enumerate(pieces, 1):
                    loss = F.mse_loss(model(px), py)
                    (loss / parts).backward()
                    if number < parts:
                        with session.accumulate():
                            session.step(loss, samples=len(px))
                    else:
                        session.step(loss, samples=len(px))
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    (whole, _), _ = together(lambda worker, link: body(worker, link, 1), sync)
    (parts, other), _ = together(lambda worker, link: body(worker, link, 4), sync)
    assert torch.equal(parts, other)
    assert torch.allclose(whole, parts, atol=1e-12)


@pytest.mark.parametrize(
    "sync", [{"mode": "sync"}, {"mode": "local", "local_steps": 3}], ids=["sync", "local"]
)
def test_a_scaler_that_skips_a_step_of_one_worker_leaves_all_together(sync: dict[str, Any]) -> None:
    def body(worker: int, link: NetworkLink) -> tuple[State, float]:
        model = KINDS["tied"].model()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with Session(
            model, torch.optim.Adam(model.parameters(), lr=0.01), link=link, scaler=scaler
        ) as session:
            for step in range(6):
                x, y = batch(step, worker)
                if worker == 1 and step == 2:
                    x = x * float("inf")
                loss = F.mse_loss(model(x), y)
                scaler.scale(loss).backward()
                session.step(loss, samples=8, clip_norm=1.0)
        return state_of(model), scaler.get_scale()

    ((first, scale), (second, other_scale)), _ = together(body, sync)
    assert same(first, second)
    assert all(value.isfinite().all() for value in first.values())
    assert (scale, other_scale) == (8.0, 4.0)


def test_a_poisoned_worker_returns_to_the_committed_weights() -> None:
    def body(worker: int, link: NetworkLink) -> State:
        model = KINDS["tied"].model()
        with Session(model, torch.optim.Adam(model.parameters(), lr=0.01), link=link) as session:
            for step in range(6):
                x, y = batch(step, worker)
                loss = F.mse_loss(model(x * float("nan") if worker == 1 and step == 2 else x), y)
                loss.backward()
                session.step(loss, samples=8)
        return state_of(model)

    for sync in ({"mode": "local", "local_steps": 2}, {"mode": "sync"}):
        (first, second), _ = together(body, sync)
        assert same(first, second)
        assert all(value.isfinite().all() for value in first.values())


# --- evaluation beside the rounds ---


class Progress:
    """Lets one worker's thread wait for steps of the other's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps = [0, 0]
        self._ended = [False, False]

    def step(self, worker: int, *, ended: bool = False) -> None:
        with self._changed:
            self._steps[worker] += 1
            self._ended[worker] |= ended
            self._changed.notify_all()

    def wait_for_other(self, worker: int, steps: int) -> int:
        """Wait until the other worker has made so many more steps, or has ended; returns how many it made."""
        other = 1 - worker
        with self._changed:
            start = self._steps[other]
            reached = self._changed.wait_for(
                lambda: self._ended[other] or self._steps[other] >= start + steps, timeout=30
            )
            assert reached, "the other worker stood still while this one evaluated"
            return self._steps[other] - start


@pytest.mark.parametrize("mode", ["sync", "local", "ssp", "async"])
def test_rounds_go_on_while_one_worker_evaluates_and_it_catches_up(mode: str) -> None:
    kind = KINDS["convolution"]
    data = TensorDataset(*kind.batch(5, 240))
    progress = Progress()

    def body(worker: int, link: NetworkLink) -> tuple[State, int]:
        model = kind.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = lr_scheduler.StepLR(optimizer, 7, gamma=0.7)
        missed = 0
        with Session(model, optimizer, link=link, scheduler=scheduler) as session:
            for x, y in session.batches(data, batch_size=4, epochs=3):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                session.step(loss, clip_norm=0.5)
                progress.step(worker)
                if session.evaluation_due():
                    missed += progress.wait_for_other(worker, 3)
                    session.report(value=1.0)
            progress.step(worker, ended=True)
        return state_of(model), missed

    spec = job_spec(sync={"mode": mode, "local_steps": 1}, evaluation={"every_samples": 200})
    with LocalCluster(spec, workers=2) as cluster:
        (first, missed), (second, other_missed) = cluster.run(body)
        job = cluster.snapshot()
    assert missed + other_missed >= 3
    assert all(value.isfinite().all() for value in (*first.values(), *second.values()))
    # Every sample of every epoch was committed exactly once, whoever evaluated meanwhile.
    assert job.progress.samples == 3 * 240
    assert job.phase == "completed"


def learned_of(state: State) -> State:
    return {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}


def test_a_worker_that_evaluated_in_sync_mode_has_the_same_bits_as_the_others() -> None:
    kind = KINDS["convolution"]
    progress = Progress()

    def body(worker: int, link: NetworkLink) -> tuple[State, int]:
        model = kind.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = lr_scheduler.StepLR(optimizer, 7, gamma=0.7)
        missed = 0
        with Session(model, optimizer, link=link, scheduler=scheduler) as session:
            step = 0
            while session.version < 40:  # both end at the same version, however many steps each took itself
                loss = kind.loss(model, 100 * step + worker)
                loss.backward()
                session.step(loss, samples=4, clip_norm=0.5)
                progress.step(worker)
                step += 1
                if step in (5, 15) and session.evaluation_due():
                    missed += progress.wait_for_other(worker, 4)
                    session.report(value=1.0)
            progress.step(worker, ended=True)
            state = state_of(model)
        return state, missed

    ((first, missed), (second, other)), _ = together(
        body, {"mode": "sync"}, evaluation={"every_samples": 8 * 5}
    )
    assert missed + other >= 4
    assert same(learned_of(first), learned_of(second))
