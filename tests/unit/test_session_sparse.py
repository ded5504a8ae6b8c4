"""Embeddings whose gradients are sparse, in every mode, against one process that has the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cadenza.plane.layout import Cut
from cadenza.plane.network import NetworkLink
from cadenza.training.flat import FlatModel
from cadenza.training.session import Session
from cadenza.training.sparse import Rows, mostly_zero, read_rows, write_rows
from tests.harness import LocalCluster, job_spec
from tests.unit.fake_link import FakeLink

ROWS, COLUMNS = 40, 3
WEIGHTS = "parameters.float64"


class Words(nn.Module):
    """A sparse table, and a dense layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, COLUMNS, sparse=True, dtype=torch.float64)
        self.top = nn.Linear(COLUMNS, 1, dtype=torch.float64)

    def forward(self, words: Tensor) -> Tensor:
        return self.top(self.table(words))  # type: ignore[no-any-return]


class Both(torch.optim.Optimizer):
    """SparseAdam for the table, SGD for the rest, as one optimizer."""

    def __init__(self, model: Words) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.inner: tuple[Any, ...] = (
            torch.optim.SparseAdam([model.table.weight], lr=0.1),
            torch.optim.SGD(model.top.parameters(), lr=0.1, momentum=0.9),
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.inner:
            optimizer.step()


def made() -> Words:
    generator = torch.Generator().manual_seed(3)
    model = Words()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def words(step: int, worker: int) -> Tensor:
    """Four of the first twelve words, with repetitions."""
    return torch.randint(0, 12, (4,), generator=torch.Generator().manual_seed(100 * step + worker))


def loss_of(model: nn.Module, chosen: Tensor) -> Tensor:
    loss: Tensor = (model(chosen)[:, 0] - chosen.double() / 6).square().mean()
    return loss


def alone(steps: int, workers: int) -> Words:
    model = made()
    optimizer = Both(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, torch.cat([words(step, worker) for worker in range(workers)])).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("overlap", ["off", "auto"])
def test_sync_mode_equals_one_process_with_the_whole_batch(overlap: str) -> None:
    def body(worker: int, link: NetworkLink) -> Words:
        model = made()
        with Session(model, Both(model), link=link) as session:
            for step in range(12):
                loss = loss_of(model, words(step, worker))
                loss.backward()
                session.step(loss, samples=4)
        return model

    with LocalCluster(job_spec(sync={"mode": "sync", "overlap": overlap}), workers=2, shards=2) as cluster:
        models = cluster.run(body)
    expected = alone(12, 2)
    for model in models:
        for mine, other, right in zip(model.parameters(), models[0].parameters(), expected.parameters(), strict=True):  # fmt: skip
            assert torch.equal(mine, other)
            assert torch.allclose(mine, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["local", "ssp", "async"])
def test_in_the_other_modes_the_optimizer_has_them_to_itself(mode: str) -> None:
    link = FakeLink(mode, local_steps=4)
    model = made()
    with Session(model, Both(model), link=link) as session:
        for step in range(8):
            loss = loss_of(model, words(step, 0))
            loss.backward()
            assert model.table.weight.grad is not None
            assert model.table.weight.grad.is_sparse
            session.step(loss, samples=4)
    for mine, right in zip(model.parameters(), alone(8, 1).parameters(), strict=True):
        assert torch.allclose(mine, right, rtol=0, atol=1e-12)


def test_units_that_are_mostly_zero_are_told_to_the_link() -> None:
    link = FakeLink("sync", overlap="auto")
    model = made()
    with Session(model, Both(model), link=link) as session:
        for _ in range(2):
            loss = loss_of(model, torch.tensor([1, 1, 30]))
            loss.backward()
            session.step(loss, samples=3)
    values = link.sent[1][WEIGHTS]
    table = np.flatnonzero(values[: ROWS * COLUMNS].reshape(ROWS, COLUMNS).any(1))
    assert table.tolist() == [1, 30]
    # Rows 1 and 30 are values 3 to 6 and 90 to 93, in units of 4; the dense layer follows at 120.
    # Units 1 and 22 have two such values, which is not few enough.
    assert link.packed == [(WEIGHTS, tuple(sorted(set(range(30)) - {1, 22})))] * 2
    assert max(number for _, number in link.streamed) == 30


def test_a_worker_without_the_table_in_its_batch_gets_the_others_rows_sparse() -> None:
    model = made()
    flat = FlatModel(model, torch.optim.SGD(model.parameters()))
    vectors = flat.vectors(flat.layout.travelling())
    vectors.flat[WEIGHTS][3:6] = 2.0
    flat.scatter_gradients(vectors, b"\x07")
    gradient = model.table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient._indices().tolist() == [[1]]
    assert gradient._values().tolist() == [[2.0] * COLUMNS]


def test_a_tied_table_with_a_dense_gradient_stays_dense() -> None:
    model = nn.Module()
    model.table = nn.Embedding(5, 2, sparse=True)
    model.top = nn.Linear(2, 5, bias=False)
    model.top.weight = model.table.weight
    flat = FlatModel(model, torch.optim.SGD(model.parameters()))
    model.top(model.table(torch.tensor([1]))).sum().backward()
    vectors = flat.vectors(flat.layout.travelling())
    present = flat.gather_gradients(vectors)
    flat.scatter_gradients(vectors, present)
    assert model.table.weight.grad is not None
    assert model.table.weight.grad.layout is torch.strided
    assert not flat.rows


# --- rows ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_rows_go_there_and_back(dtype: torch.dtype) -> None:
    model = nn.ParameterList(
        [nn.Parameter(torch.zeros(2, dtype=dtype)), nn.Parameter(torch.zeros(6, 2, dtype=dtype))]
    )
    flat = FlatModel(model, torch.optim.SGD(model.parameters()))
    item = flat.trainable[1]
    place = flat.vectors(flat.layout.travelling()).place(item)
    place.fill_(9.0)
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[4, 1, 4]]), torch.ones(3, 2, dtype=dtype), (6, 2), check_invariants=True
    )
    assert write_rows(item, gradient, place).numbers.tolist() == [1, 4]
    back = read_rows(item, place, torch.device("cpu"))
    assert torch.equal(back.to_dense(), gradient.to_dense())
    place.zero_()
    assert torch.equal(back.to_dense(), gradient.to_dense())


def test_units_are_mostly_zero_where_fewer_than_half_of_their_values_lie_in_rows() -> None:
    rng = np.random.default_rng(4)
    model = nn.Module()
    model.first = nn.Parameter(torch.zeros(5))
    model.table = nn.Parameter(torch.zeros(20, 3))
    model.other = nn.Parameter(torch.zeros(7, 4))
    model.last = nn.Parameter(torch.zeros(4))
    flat = FlatModel(model, torch.optim.SGD(model.parameters()))
    (vector,) = flat.layout.vectors
    for unit in (1, 4, 7, 97):
        units = flat.layout.units(Cut(shards=1, unit=unit), vector.name)
        for _ in range(20):
            filled = np.ones(vector.length, bool)
            rows = []
            for item in flat.trainable[1:3]:
                numbers = np.flatnonzero(rng.random(item.shape[0]) < rng.random())
                part = np.zeros(tuple(item.shape), bool)
                part[numbers] = True
                filled[item.offset : item.offset + item.length] = part.reshape(-1)
                rows.append(Rows(item, numbers))
            expected = [u.number for u in units if filled[u.start : u.stop].mean() < 0.5]
            assert mostly_zero(units, rows) == expected
