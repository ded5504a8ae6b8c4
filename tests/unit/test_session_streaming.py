"""sync mode: gradients that leave during the backward pass come to the same as gradients that leave after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cadenza.plane.messages import Overlap
from cadenza.plane.units import Unit
from cadenza.training.device import Copies, DirectCopies, LateCopies
from cadenza.training.inventory import Item
from cadenza.training.session import Session
from cadenza.training.streaming import touched
from tests.unit.awkward import KINDS, Kind, groups, same, state_of
from tests.unit.fake_link import FakeLink

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
WEIGHTS = "parameters.float32"


def make() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def backward(model: nn.Module, x: Tensor = X) -> Tensor:
    loss = F.mse_loss(model(x)[:, 0], x.sum(1))
    loss.backward()
    return loss


Loop = Callable[[Session, nn.Module, torch.optim.Optimizer], None]


def run(loop: Loop, overlap: Overlap, steps: int = 4, **options: Any) -> tuple[dict[str, Tensor], FakeLink]:
    """The model after so many turns of ``loop``."""
    link = FakeLink("sync", overlap=overlap)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Session(model, optimizer, link=link, **options) as session:
        for _ in range(steps):
            loop(session, model, optimizer)
    return state_of(model), link


def plain(session: Session, model: nn.Module, optimizer: Any) -> None:
    session.step(backward(model), samples=8)


# --- the same ---


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("copies", [DirectCopies, LateCopies])
def test_each_kind_of_model_trains_to_the_same_bits_as_without(
    kind: Kind, copies: type[Copies], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cadenza.training.flat.copies_for", lambda tensors: copies())
    states = []
    for overlap in ("off", "auto"):
        link = FakeLink("sync", overlap=overlap)
        model = kind.model()
        with Session(model, groups(model), link=link) as session:
            for step in range(5):
                loss = kind.loss(model, step)
                loss.backward()
                session.step(loss, samples=4)
        states.append(state_of(model))
        assert bool(link.streamed) is (overlap == "auto" and kind is not KINDS["complex"])
        assert not link.notices
    assert same(*states)


def test_units_leave_in_the_order_in_which_the_backward_pass_completes_them() -> None:
    link = FakeLink("sync", overlap="auto")
    model = make()
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.1), link=link) as session:
        session.step(backward(model), samples=8)
        assert link.streamed == []  # the first step tells that the loop leaves the gradients to the session
        loss = backward(model)
        # 41 elements in units of 4; the bias of the first layer, 12 to 16, comes last but for its weight.
        assert {number for _, number in link.streamed} == set(range(11))
        assert link.streamed.index((WEIGHTS, 10)) < link.streamed.index((WEIGHTS, 5)) < link.streamed.index((WEIGHTS, 0))  # fmt: skip
        assert "update" not in link.calls[3:]
        session.step(loss, samples=8)
    assert [(request.seq, request.base_version) for request in link.requests] == [(1, 0), (2, 1)]


def test_a_unit_that_a_parameter_without_gradient_shares_leaves_with_the_step() -> None:
    def loop(session: Session, model: Any, optimizer: Any) -> None:
        loss = F.mse_loss(model[2](model[1](model[0](X))), torch.ones(8, 4))  # the last layer has no gradient
        loss.backward()
        session.step(loss, samples=8)

    (expected, _), (state, link) = run(loop, "off"), run(loop, "auto")
    assert same(expected, state)
    assert max(number for _, number in link.streamed) == 8


def test_a_loop_that_leaves_out_a_batch_sends_the_next_one() -> None:
    def loop(session: Session, model: nn.Module, optimizer: Any) -> None:
        if session.steps == 2 and not skipped:
            skipped.append(True)
            backward(model, X * 3)
            optimizer.zero_grad()
        session.step(backward(model), samples=8)

    skipped: list[bool] = []
    expected, _ = run(loop, "off")
    skipped.clear()
    state, _ = run(loop, "auto")
    assert same(expected, state)


# --- not streamed ---


def own(session: Session, model: nn.Module, optimizer: Any) -> None:
    loss = backward(model)
    session.average_gradients(samples=8)
    optimizer.step()
    optimizer.zero_grad()
    session.stepped(loss)


def test_an_own_loop_may_do_anything_to_gradients_so_they_leave_with_average_gradients() -> None:
    (expected, _), (state, link) = run(own, "off"), run(own, "auto")
    assert same(expected, state)
    assert not link.streamed


@pytest.mark.parametrize("enabled", [True, False])
def test_scaled_gradients_wait_for_their_step(enabled: bool) -> None:
    def loop(session: Session, model: nn.Module, optimizer: Any) -> None:
        loss = F.mse_loss(model(X)[:, 0], X.sum(1))
        scaler.scale(loss).backward()
        session.step(loss, samples=8)

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
    _, link = run(loop, "auto", scaler=scaler)
    assert bool(link.streamed) is not enabled


def test_with_overlap_off_the_parameters_have_no_hooks() -> None:
    _, link = run(plain, "off")
    assert not link.streamed


def test_no_hook_is_left_after_the_session() -> None:
    link = FakeLink("sync", overlap="auto")
    model = make()
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.1), link=link) as session:
        plain(session, model, None)
        assert all(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    backward(model)


def test_nothing_leaves_while_the_worker_evaluates() -> None:
    def loop(session: Session, model: nn.Module, optimizer: Any) -> None:
        if session.evaluation_due():
            backward(model)  # an attack on the model, say
            left.append(len(session._link.streamed))  # type: ignore[attr-defined]
            optimizer.zero_grad()
            session.report(value=1.0)
        session.step(backward(model), samples=8)

    left: list[int] = []
    link = FakeLink("sync", overlap="auto")
    link.notes.extend([{"evaluate": True}])
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, optimizer, link=link) as session:
        for _ in range(3):
            loop(session, model, optimizer)
    assert left == [0]
    assert link.streamed


# --- micro-batches ---


def inside(session: Session, model: nn.Module, optimizer: Any) -> None:
    with session.accumulate():
        session.step(backward(model, X[:4]), samples=4)
    session.step(backward(model, X[4:]), samples=4)


def outside(session: Session, model: nn.Module, optimizer: Any) -> None:
    loss = backward(model, X[:4])
    with session.accumulate():
        session.step(loss, samples=4)
    session.step(backward(model, X[4:]), samples=4)


def test_of_micro_batches_whose_backward_is_inside_the_block_the_last_one_leaves_at_once() -> None:
    (expected, _), (state, link) = run(inside, "off"), run(inside, "auto")
    assert same(expected, state)
    assert link.streamed
    assert not link.notices


@pytest.mark.parametrize("plain_steps", [0, 2])
def test_of_micro_batches_whose_backward_is_outside_none_leaves_early(plain_steps: int) -> None:
    def loop(session: Session, model: nn.Module, optimizer: Any) -> None:
        (plain if session.steps < plain_steps else outside)(session, model, optimizer)

    (expected, _), (state, link) = run(loop, "off"), run(loop, "auto")
    assert same(expected, state)
    assert bool(link.streamed) is (plain_steps > 1)
    (notice,) = link.notices
    assert (notice.kind, notice.severity) == ("streaming_off", "info")
    assert "outside session.accumulate()" in notice.message


# --- gradients that change after they left ---


def twice(session: Session, model: nn.Module, optimizer: Any) -> None:
    backward(model, X[:4])
    session.step(backward(model, X[4:]), samples=8)


def clipped(session: Session, model: nn.Module, optimizer: Any) -> None:
    loss = backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    session.step(loss, samples=8)


def edited_as_data(session: Session, model: nn.Module, optimizer: Any) -> None:
    loss = backward(model)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.mul_(0.5)
    session.step(loss, samples=8)


def replaced(session: Session, model: Any, optimizer: Any) -> None:
    loss = backward(model)
    model[2].weight.grad = torch.ones(4, 4)
    session.step(loss, samples=8)


def dropped(session: Session, model: Any, optimizer: Any) -> None:
    loss = backward(model)
    model[2].weight.grad = None
    session.step(loss, samples=8)


@pytest.mark.parametrize("copies", [DirectCopies, LateCopies])
@pytest.mark.parametrize("loop", [twice, clipped, edited_as_data, replaced, dropped])
def test_a_gradient_that_changes_after_it_left_is_sent_again_and_streaming_ends(
    loop: Loop, copies: type[Copies], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cadenza.training.flat.copies_for", lambda tensors: copies())
    (expected, other), (state, link) = run(loop, "off"), run(loop, "auto")
    assert same(expected, state)
    assert [request.present for request in link.requests] == [request.present for request in other.requests]
    (notice,) = link.notices
    assert (notice.kind, notice.severity) == ("streaming_off", "warning")
    assert "session.step(loss, clip_norm=...)" in notice.message
    left = len(link.streamed)
    assert left > 0
    longer, later = run(loop, "auto", steps=7)
    assert len(later.streamed) == left
    assert not same(longer, state)


# --- units ---


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [(0, 4, range(1)), (3, 2, range(2)), (4, 4, range(1, 2)), (5, 6, range(1, 3)), (4, 0, range(0))],
)
def test_a_parameter_touches_the_units_that_its_values_lie_in(
    offset: int, length: int, expected: range
) -> None:
    units = [Unit(WEIGHTS, number, 4 * number, min(4 * number + 4, 11)) for number in range(3)]
    item = Item(
        "w", nn.Module(), "w", "parameters", WEIGHTS, offset, length, torch.Size([length]), torch.float32
    )
    assert touched(units, item) == expected
