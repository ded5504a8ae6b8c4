"""A script outside any job."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import cadenza
from cadenza.training import context
from cadenza.training.data import permutation
from cadenza.training.solo import SoloLink
from tests.unit.fake_link import FakeLink

DATA = TensorDataset(torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10.0))


@pytest.fixture(autouse=True)
def _own_logger() -> Iterator[None]:
    logger = logging.getLogger("cadenza")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = nn.Linear(3, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def run(session: Any, model: nn.Module, **options: Any) -> list[int]:
    """The steps after which an evaluation was due."""
    due = []
    for x, y in session.batches(DATA, **({"batch_size": 4} | options)):
        loss = F.mse_loss(model(x)[:, 0], y)
        loss.backward()
        session.step(loss)
        if session.evaluation_due():
            due.append(session.steps)
            session.report(loss=loss)
    if session.evaluation_due():
        due.append(-session.steps)
    return due


@pytest.mark.parametrize("drop_last", [False, True])
def test_alone_is_plain_torch_to_the_bit_in_the_order_of_seed_0(drop_last: bool) -> None:
    model, optimizer = make()
    with cadenza.join(model, optimizer) as session:
        run(session, model, epochs=3, drop_last=drop_last)
    plain, optimizer = make()
    for epoch in range(3):
        order = permutation(0, epoch, 10).tolist()
        for batch in (order[:4], order[4:8], order[8:])[: 2 if drop_last else 3]:
            x, y = DATA[batch]
            optimizer.zero_grad()
            F.mse_loss(plain(x)[:, 0], y).backward()
            optimizer.step()
    assert torch.equal(model.weight, plain.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(("drop_last", "expected"), [(False, [3, 6, 9]), (True, [2, 4, 6])])
def test_each_epochs_end_asks_for_an_evaluation_once(drop_last: bool, expected: list[int]) -> None:
    model, optimizer = make()
    with cadenza.join(model, optimizer) as session:
        assert run(session, model, epochs=3, drop_last=drop_last) == expected


def test_the_end_asks_for_an_evaluation_of_weights_that_no_epochs_end_has_seen() -> None:
    model, optimizer = make()
    due = []
    with cadenza.join(model, optimizer) as session:
        for x, y in session.batches(DATA, batch_size=4, epochs=2):
            loss = F.mse_loss(model(x)[:, 0], y)
            loss.backward()
            session.step(loss)
            if session.evaluation_due():
                due.append(session.steps)
            if session.steps == 5:
                break
        session.finish()
        if session.evaluation_due():
            due.append(session.steps)
    assert due == [3, 5]


def test_an_evaluation_that_was_not_heeded_in_the_loop_is_asked_for_at_the_end() -> None:
    model, optimizer = make()
    with cadenza.join(model, optimizer) as session:
        for x, y in session.batches(DATA, batch_size=4):
            loss = F.mse_loss(model(x)[:, 0], y)
            loss.backward()
            session.step(loss)
        assert session.evaluation_due()
        assert not session.evaluation_due()


def test_without_leased_data_only_the_end_asks_for_an_evaluation() -> None:
    model, optimizer = make()
    with cadenza.join(model, optimizer) as session:
        for _ in range(20):
            loss = model(DATA.tensors[0]).square().mean()
            loss.backward()
            session.step(loss, samples=10)
            assert not session.evaluation_due()
        session.finish()
        assert session.evaluation_due()


def test_reports_show_although_no_logging_is_set_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    model, optimizer = make()
    with cadenza.join(model, optimizer) as session:
        run(session, model)
    assert "cadenza: step 3: loss " in capsys.readouterr().err


def test_join_finds_the_link_of_the_job_that_the_code_runs_in() -> None:
    link = FakeLink()
    assert context.current() is None
    with context.activate(link):
        assert context.current() is link
        cadenza.join(*make())
    assert context.current() is None
    assert link.calls == ["publish", "ready"]


def test_alone_nothing_is_said_to_be_elsewhere() -> None:
    session = cadenza.Session(*make(), link=SoloLink())
    assert (session.worker, session.workers, session.version, session.round) == (0, 1, 0, 0)
    assert not session.should_stop
