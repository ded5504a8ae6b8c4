"""Training in a job against training in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cadenza.plane.network import NetworkLink
from cadenza.training.session import Session
from tests.harness import LocalCluster, job_spec

STEPS = 100
BATCH = 4

Optimizers = dict[str, Callable[[nn.Module], torch.optim.Optimizer]]

OPTIMIZERS: Optimizers = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_model(dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.4)
    return model


def make_data(
    workers: int, dtype: torch.dtype, sizes: list[int] | None = None
) -> list[list[tuple[Tensor, Tensor]]]:
    """Batches by step and worker; ``sizes`` are the workers' batch sizes."""
    generator = torch.Generator().manual_seed(2)
    sizes = sizes or [BATCH] * workers
    return [
        [
            (
                torch.randn(size, 6, generator=generator, dtype=dtype),
                torch.randn(size, 2, generator=generator, dtype=dtype),
            )
            for size in sizes
        ]
        for _ in range(STEPS)
    ]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def train_alone(name: str, data: list[list[tuple[Tensor, Tensor]]], dtype: torch.dtype) -> Tensor:
    """One process whose batch is all workers' batches together."""
    model = make_model(dtype)
    optimizer = OPTIMIZERS[name](model)
    for batches in data:
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return flat(model)


def train_in_job(
    mode: str, name: str, data: list[list[tuple[Tensor, Tensor]]], dtype: torch.dtype
) -> list[Tensor]:
    """Each worker's weights at the end."""

    def body(worker: int, link: NetworkLink) -> Tensor:
        model = make_model(dtype)
        with Session(model, OPTIMIZERS[name](model), link=link) as session:
            for batches in data:
                x, y = batches[worker]
                loss = loss_of(model, x, y)
                loss.backward()
                session.step(loss, samples=len(x))
        return flat(model)

    spec = job_spec(sync={"mode": mode, "local_steps": 1})
    with LocalCluster(spec, workers=len(data[0]), shards=2) as cluster:
        return cluster.run(body)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_sync_equals_one_process_with_the_whole_batch(workers: int, name: str, dtype: torch.dtype) -> None:
    data = make_data(workers, dtype)
    alone = train_alone(name, data, dtype)
    together = train_in_job("sync", name, data, dtype)
    bound = 1e-12 if dtype is torch.float64 else 1e-5
    if workers == 1:
        assert torch.equal(together[0], alone)
    for weights in together:
        assert torch.equal(weights, together[0])
        assert distance(weights, alone) < bound


def test_uneven_batches_weigh_by_samples() -> None:
    data = make_data(3, torch.float64, sizes=[1, 5, 2])
    alone = train_alone("momentum", data, torch.float64)
    for weights in train_in_job("sync", "momentum", data, torch.float64):
        assert distance(weights, alone) < 1e-12


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_local_with_interval_1_equals_sync_for_sgd(name: str) -> None:
    data = make_data(2, torch.float64)
    sync, local = (
        train_in_job("sync", name, data, torch.float64),
        train_in_job("local", name, data, torch.float64),
    )
    assert distance(sync[0], local[0]) < 1e-12
    assert torch.equal(local[0], local[1])


def test_local_with_interval_1_differs_from_sync_for_adamw() -> None:
    data = make_data(2, torch.float64)
    sync, local = (
        train_in_job("sync", "adamw", data, torch.float64),
        train_in_job("local", "adamw", data, torch.float64),
    )
    assert distance(sync[0], local[0]) > 1e-3
