"""A session's loop, and how it answers to being used wrongly."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cadenza.plane.messages import Leased, Span
from cadenza.training.session import Session
from cadenza.training.solo import SoloLink
from tests.unit.fake_link import FakeLink

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1))


def make(lr: float = 0.1) -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(4)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def backward(model: nn.Module, x: Tensor = X) -> Tensor:
    loss = F.mse_loss(model(x)[:, 0], x.sum(1))
    loss.backward()
    return loss


def opened(link: Any = None, **options: Any) -> tuple[nn.Linear, torch.optim.SGD, Session]:
    model, optimizer = make()
    session = Session(model, optimizer, link=link or SoloLink(), **options)
    return model, optimizer, session.__enter__()


def read(session: Session, model: nn.Module, **options: Any) -> None:
    for x, _ in session.batches(DATA, batch_size=4, shuffle=False, **options):
        session.step(backward(model, x))


# --- the same as a plain loop ---


def test_clipping_and_accumulation_are_those_of_a_plain_loop() -> None:
    model, _, session = opened()
    for _ in range(3):
        with session.accumulate():
            session.step(backward(model, X[:6]), samples=6)
        session.step(backward(model, X[6:]), samples=6, clip_norm=0.5)
    plain, optimizer = make()
    for _ in range(3):
        optimizer.zero_grad()
        backward(plain, X[:6])
        backward(plain, X[6:])
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    assert torch.equal(model.weight, plain.weight)
    assert session.steps == 3
    assert model.weight.grad is None


def test_an_own_loop_is_left_alone_but_for_the_counting() -> None:
    link = FakeLink("local", local_steps=3)
    model, optimizer, session = opened(link)
    for _ in range(3):
        loss = backward(model)
        session.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        session.stepped(loss, samples=12)
    (request,) = link.requests
    assert (request.kind, request.steps, request.samples) == ("update", 3, 36)


@pytest.mark.parametrize("mode", ["local", "sync"])
def test_an_own_loop_counts_all_batches_of_its_group(mode: str) -> None:
    link = FakeLink(mode)
    link.runs.append(Leased(1, 0, 0, 12, 0))
    model, optimizer, session = opened(link)
    for number, (x, _) in enumerate(session.batches(DATA, batch_size=3, shuffle=False)):
        loss = backward(model, x)
        if number % 2:
            session.average_gradients()
            optimizer.step()
            optimizer.zero_grad()
            session.stepped(loss)
    updates = [request for request in link.requests if request.kind == "update"]
    assert [request.samples for request in updates] == [6, 6]
    assert [request.spans for request in updates] == [(Span(1, 0, 6),), (Span(1, 6, 12),)]


# --- what a contribution says of itself ---


def test_a_contribution_weighs_samples_and_losses_and_names_its_data() -> None:
    link = FakeLink("local", local_steps=2)
    link.runs.extend([Leased(7, 0, 0, 6, 0), Leased(8, 0, 9, 12, 0)])
    model, _, session = opened(link)
    losses = []
    for x, _ in session.batches(DATA, batch_size=4, shuffle=False):
        loss = backward(model, x)
        losses.append((loss.item(), len(x)))
        session.step(loss)
    first, second = link.requests[:2]
    assert (first.samples, first.steps, first.spans) == (6, 2, (Span(7, 0, 6),))
    assert (second.samples, second.steps, second.spans) == (3, 1, (Span(8, 9, 12),))
    assert first.loss == pytest.approx(sum(loss * n for loss, n in losses[:2]) / 6, rel=1e-6)
    assert second.loss == pytest.approx(losses[2][0], rel=1e-6)


def test_micro_batches_count_in_the_step_that_ends_their_group() -> None:
    link = FakeLink("local", local_steps=1)
    link.runs.append(Leased(1, 0, 0, 12, 0))
    model, _, session = opened(link)
    for number, (x, _) in enumerate(session.batches(DATA, batch_size=3, shuffle=False)):
        loss = backward(model, x)
        if number % 3:
            session.step(loss)
        else:
            with session.accumulate():
                session.step(loss)
    # The last group is incomplete: its gradients are not applied, and its samples do not count as trained on.
    assert [(request.samples, request.steps) for request in link.requests[:2]] == [(6, 1), (3, 1)]
    assert [request.spans for request in link.requests[:2]] == [(Span(1, 0, 6),), (Span(1, 6, 9),)]
    assert link.told[-1] == (2, 9)


@pytest.mark.parametrize(
    "loss", [2.5, torch.tensor(2.5), torch.tensor([2.5]), torch.tensor(2.5, dtype=torch.bfloat16)]
)
def test_a_loss_may_be_any_single_number(loss: Any) -> None:
    link = FakeLink()
    model, _, session = opened(link)
    backward(model)
    session.step(loss, samples=3)
    assert link.requests[0].loss == 2.5


def test_a_loss_that_is_not_finite_is_unknown() -> None:
    link = FakeLink()
    model, _, session = opened(link)
    backward(model)
    session.step(torch.tensor(float("nan")), samples=1)
    backward(model)
    session.step(torch.tensor(3.0), samples=1)
    assert [request.loss for request in link.requests] == [None, 3.0]


def test_a_loss_per_sample_is_refused() -> None:
    model, _, session = opened()
    backward(model)
    with pytest.raises(ValueError, match=r"loss has shape \[12\]; .*loss.mean\(\)"):
        session.step(torch.ones(12), samples=12)


def test_requests_are_numbered_and_name_the_version_they_start_from() -> None:
    link = FakeLink()
    model, _, session = opened(link)
    for _ in range(3):
        session.step(backward(model), samples=1)
    assert [(request.seq, request.base_version) for request in link.requests] == [(1, 0), (2, 1), (3, 2)]
    assert (session.version, session.round, session.steps) == (3, 3, 3)


# --- used wrongly ---


def test_samples_are_never_guessed() -> None:
    model, _, session = opened()
    with pytest.raises(ValueError, match=r"samples is missing: .*samples=len\(x\)"):
        session.step(backward(model))
    with pytest.raises(ValueError, match="samples is -1"):
        session.step(backward(model), samples=-1)
    with pytest.raises(TypeError, match="float"):
        session.step(backward(model), samples=1.5)  # type: ignore[arg-type]


def test_forgetting_average_gradients_is_an_error_in_the_first_step_of_sync_mode() -> None:
    model, optimizer, session = opened(FakeLink("sync"))
    loss = backward(model)
    optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"session.average_gradients was not called before .*between loss.backward"
    ):
        session.stepped(loss, samples=12)


def test_average_gradients_needs_samples_in_sync_mode() -> None:
    model, _, session = opened(FakeLink("sync"))
    backward(model)
    with pytest.raises(ValueError, match="samples is missing"):
        session.average_gradients()
    session.average_gradients(samples=12)
    with pytest.raises(RuntimeError, match=r"called twice for one step"):
        session.average_gradients(samples=12)
    with pytest.raises(ValueError, match=r"samples is 11, but session.average_gradients was given 12"):
        session.stepped(0.5, samples=11)


def test_both_ways_to_step_in_one_loop_are_an_error() -> None:
    model, _, session = opened()
    session.step(backward(model), samples=12)
    with pytest.raises(RuntimeError, match=r"session.step and session.stepped were both called"):
        session.stepped(backward(model), samples=12)


def test_a_session_that_is_not_entered_does_not_step() -> None:
    model, optimizer = make()
    session = Session(model, optimizer, link=SoloLink())
    with pytest.raises(RuntimeError, match=r"outside the session; use `with cadenza.join"):
        session.step(backward(model), samples=12)


def test_a_session_is_entered_once() -> None:
    _, _, session = opened()
    with pytest.raises(RuntimeError, match="entered once"):
        session.__enter__()


def test_after_its_end_a_session_neither_steps_nor_reads() -> None:
    model, _, session = opened()
    read(session, model)
    calls: tuple[Callable[[], object], ...] = (
        lambda: session.step(0.5, samples=1),
        lambda: read(session, model),
        lambda: session.accumulate().__enter__(),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"after the session had finished; .*goes through all epochs"):
            call()


def test_never_stepping_is_an_error() -> None:
    link = FakeLink()
    model, optimizer = make()
    with (
        pytest.raises(RuntimeError, match=r"session.step was never called"),
        Session(model, optimizer, link=link),
    ):
        pass
    assert "finish" not in link.calls


def test_reading_without_stepping_is_an_error_before_the_others_are_told_of_an_end() -> None:
    link = FakeLink()
    link.runs.append(Leased(1, 0, 0, 4, 0))
    _, _, session = opened(link)
    with pytest.raises(RuntimeError, match=r"session.step was never called"):
        list(session.batches(DATA, batch_size=4))
    assert "finish" not in link.calls


def test_a_worker_that_gets_no_data_ends_in_peace() -> None:
    link = FakeLink()
    link.last = False
    model, optimizer = make()
    with Session(model, optimizer, link=link) as session:
        assert list(session.batches(DATA, batch_size=4)) == []
    assert link.calls == ["publish", "ready", "finish"]


def test_a_worker_whose_data_ends_within_its_first_group_of_micro_batches_ends_in_peace() -> None:
    link = FakeLink()
    link.last = False
    link.runs.append(Leased(1, 0, 0, 4, 0))
    model, _, session = opened(link)
    for _ in session.batches(DATA, batch_size=4):
        loss = backward(model)
        with session.accumulate():
            session.step(loss)
    assert link.calls == ["publish", "ready", "finish"]


def test_reading_ahead_on_another_thread_is_an_error() -> None:
    link = FakeLink()
    link.runs.append(Leased(1, 0, 0, 8, 0))
    _, _, session = opened(link)
    batches = session.batches(DATA, batch_size=4)
    next(batches)
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match=r"another thread .* num_workers"):
        pool.submit(next, batches).result(timeout=10)


def test_an_error_in_the_loop_passes_and_nothing_is_pushed() -> None:
    link = FakeLink("local", local_steps=8)
    model, optimizer = make()

    def loop() -> None:
        with Session(model, optimizer, link=link) as session:
            session.step(backward(model), samples=12)
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        loop()
    assert link.calls == ["publish", "ready"]


def test_reports_are_numbers() -> None:
    link = FakeLink()
    model, _, session = opened(link)
    session.step(backward(model), samples=12)
    session.report(accuracy=torch.tensor(0.5), errors=np.int64(3))  # type: ignore[arg-type]
    assert link.reports == [({"accuracy": 0.5, "errors": 3.0}, 1)]
    with pytest.raises(TypeError, match="metric 'accuracy' is a str; report numbers"):
        session.report(accuracy="good")  # type: ignore[arg-type]


def test_epochs_come_from_the_job_unless_given() -> None:
    asked = []

    class Asking(FakeLink):
        def lease(self, request: Any) -> Any:
            asked.append(request.epochs)
            return super().lease(request)

    for epochs in (None, 2):
        _, _, session = opened(Asking(epochs=5))
        list(session.batches(DATA, batch_size=4, epochs=epochs))
    assert asked == [5, 2]
    _, _, session = opened()
    with pytest.raises(ValueError, match="epochs is 0"):
        session.batches(DATA, batch_size=4, epochs=0)


class Closure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, Closure])
def test_an_optimizer_that_needs_a_closure_is_refused(optimizer: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="evaluates the model inside its step"):
        Session(model, optimizer(model.parameters(), lr=0.1), link=SoloLink())


def test_parameters_outside_the_optimizer_are_told_of() -> None:
    link = FakeLink()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    Session(model, torch.optim.SGD(model[0].parameters()), link=link)
    (notice,) = link.notices
    assert "1.weight, 1.bias" in notice.message
