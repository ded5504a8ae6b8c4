"""How a session follows the answers of its rounds: weights, optimizers, schedules, evaluation and the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from cadenza.training.session import Session
from tests.unit.fake_link import FakeLink

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
WEIGHTS = "parameters.float32"


def make(lr: float = 0.1) -> tuple[nn.Sequential, torch.optim.SGD]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def opened(link: FakeLink, **options: Any) -> tuple[nn.Sequential, torch.optim.SGD, Session]:
    model, optimizer = make()
    session = Session(model, optimizer, link=link, **options)
    return model, optimizer, session.__enter__()


def backward(model: nn.Module, x: Tensor = X) -> Tensor:
    loss = F.mse_loss(model(x)[:, 0], x.sum(1))
    loss.backward()
    return loss


def train(session: Session, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        session.step(backward(model), samples=8)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


# --- the first state ---


def test_the_publisher_gives_all_it_has() -> None:
    link = FakeLink()
    model, _, _ = opened(link)
    assert link.published_vectors == [(WEIGHTS, "buffers.float32", "static.uint8")]
    assert np.array_equal(link.state[WEIGHTS], flat(model).numpy())


def test_the_others_take_the_published_state_whatever_they_had() -> None:
    first, second = FakeLink(), FakeLink(publish=False)
    model, _, _ = opened(first)
    model[1].running_mean.fill_(3.0)  # type: ignore[operator]
    model[1].num_batches_tracked.fill_(41)  # type: ignore[operator]
    Session(*make_with(model), link=first)
    second.state = first.state
    other, optimizer = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(9.0)
    Session(other, optimizer, link=second)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert [(r.kind, r.seq, r.base_version) for r in second.requests] == [("fetch", 1, -1)]


def make_with(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters())


# --- weights ---


def test_a_contribution_is_what_the_local_steps_changed_and_the_answer_replaces_it() -> None:
    link = FakeLink("local", local_steps=2)
    model, _, session = opened(link)
    start = flat(model)
    plain, optimizer = make()
    for _ in range(2):
        backward(plain)
        optimizer.step()
        optimizer.zero_grad()
    link.state[WEIGHTS] = link.state[WEIGHTS] + np.float32(1)  # what the others did meanwhile
    train(session, model, 2)
    delta = flat(plain) - start
    assert np.array_equal(link.sent[0][WEIGHTS], delta.numpy())
    assert torch.equal(flat(model), start + 1 + delta)
    train(session, model, 1)
    assert len(link.sent) == 1


def test_the_notes_interval_is_the_next_one() -> None:
    link = FakeLink("local", local_steps=1)
    link.notes.extend([{"local_steps": 3}, {"local_steps": 2}])
    model, _, session = opened(link)
    train(session, model, 6)
    assert [request.steps for request in link.requests] == [1, 3, 2]


def test_an_unchanged_answer_makes_the_models_own_weights_the_committed_ones() -> None:
    link = FakeLink("local", local_steps=1)
    link.contents.append("unchanged")
    model, _, session = opened(link)
    train(session, model, 1)
    first = flat(model)
    train(session, model, 1)
    assert np.allclose(link.sent[1][WEIGHTS], (flat_of_plain(2) - first).numpy(), atol=1e-7)


def flat_of_plain(steps: int) -> Tensor:
    """The weights after so many steps of a plain loop."""
    plain, optimizer = make()
    for _ in range(steps):
        optimizer.zero_grad()
        backward(plain)
        optimizer.step()
    return flat(plain)


def test_bfloat16_subtracts_in_float32_and_rounds_once() -> None:
    link = FakeLink("local", local_steps=1)
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    before = model.weight.detach().clone()
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.3), link=link) as session:
        loss = model(torch.ones(2, 64, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        gradient = model.weight.grad
        assert gradient is not None
        stepped = before.clone().add_(gradient, alpha=-0.3)
        session.step(loss, samples=2)
        sent = link.sent[0]["parameters.bfloat16"][: 64 * 64].astype(np.float32)
        expected = (stepped.float() - before.float()).bfloat16().float()
        assert np.array_equal(sent, expected.reshape(-1).numpy())


def test_a_dropped_contribution_leaves_the_committed_weights_and_no_poisoned_state() -> None:
    link = FakeLink("local", local_steps=1)
    link.notes.extend([{}, {"dropped": "non_finite"}])
    model, optimizer, session = opened(link)
    train(session, model, 1)
    committed = flat(model)
    session.step(backward(model, X * float("inf")), samples=8)
    assert torch.equal(flat(model), committed)
    assert not optimizer.state
    (notice,) = link.notices
    assert "optimizer state of 6 parameters was not finite and starts afresh" in notice.message
    train(session, model, 1)
    assert flat(model).isfinite().all()


# --- gradients ---


def test_a_round_of_gradients_is_plain_torch_to_the_bit_when_alone() -> None:
    link = FakeLink("sync")
    model, _, session = opened(link)
    train(session, model, 5)
    plain, optimizer = make()
    for _ in range(5):
        optimizer.zero_grad()
        backward(plain)
        optimizer.step()
    assert torch.equal(flat(model), flat(plain))
    assert [request.present for request in link.requests] == [b"\x3f"] * 5


def test_a_skipped_round_steps_nothing_and_buffers_go_back() -> None:
    link = FakeLink("sync")
    model, _, session = opened(link)
    train(session, model, 1)
    before, mean = flat(model), model[1].running_mean.clone()  # type: ignore[operator]
    link.contents.append("unchanged")
    session.step(backward(model, X * 5), samples=8)
    assert torch.equal(flat(model), before)
    assert torch.equal(model[1].running_mean, mean)  # type: ignore[arg-type]
    assert all(parameter.grad is None for parameter in model.parameters())


def overflowing(link: FakeLink) -> tuple[nn.Sequential, torch.optim.SGD, Session, torch.amp.GradScaler]:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer, session = opened(link, scaler=scaler)
    return model, optimizer, session, scaler


class OthersGradient(FakeLink):
    """A round in which only the others contribute: everybody's mean gradient is 1."""

    def _answer(self, request: Any, values: Any, into: Any, *, merge: bool) -> None:
        if request.kind != "abstain":
            super()._answer(request, values, into, merge=merge)
            return
        for name, target in into.items():
            target[:] = 1 if name == WEIGHTS else self.state[name]

    def answered(self, request: Any, values: Any, into: Any) -> Any:
        answer = super().answered(request, values, into)
        if request.kind == "abstain" and answer.content == "gradient":
            self.steps += 1
            return type(answer)(answer.content, answer.note, answer.vectors, present=(b"\x3f",))
        return answer


@pytest.mark.parametrize("style", ["step", "stepped"])
def test_an_overflow_abstains_and_applies_the_others_mean_while_its_scale_falls(style: str) -> None:
    link = OthersGradient("sync")
    model, optimizer, session, scaler = overflowing(link)
    before = flat(model)
    scaler.scale(F.mse_loss(model(X * float("inf"))[:, 0], X.sum(1))).backward()
    if style == "step":
        session.step(1.0, samples=8)
    else:
        scaler.unscale_(optimizer)
        session.average_gradients(samples=8)
        scaler.step(optimizer)
        scaler.update()
        session.stepped(1.0)
    (request,) = link.requests
    assert (request.kind, request.reason, request.samples, request.vectors) == (
        "abstain",
        "amp_overflow",
        8,
        (),
    )
    assert torch.allclose(flat(model), before - 0.1)
    assert scaler.get_scale() == 2.0


def test_when_all_overflow_nobody_steps_and_the_scale_falls() -> None:
    link = OthersGradient("sync")
    link.contents.append("unchanged")
    model, _, session, scaler = overflowing(link)
    before = flat(model)
    scaler.scale(F.mse_loss(model(X * float("inf"))[:, 0], X.sum(1))).backward()
    session.step(1.0, samples=8)
    assert torch.equal(flat(model), before)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("mode", ["sync", "local"])
def test_scaled_training_is_a_plain_scaled_loop_to_the_bit(mode: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    link = FakeLink(mode, local_steps=1 if mode == "sync" else 100)
    model, _, session = opened(link, scaler=scaler)
    plain, optimizer = make()
    other = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for _ in range(8):
        loss = F.mse_loss(model(X)[:, 0], X.sum(1))
        scaler.scale(loss).backward()
        session.step(loss, samples=8, clip_norm=0.7)
        other.scale(F.mse_loss(plain(X)[:, 0], X.sum(1))).backward()
        other.unscale_(optimizer)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.7)
        other.step(optimizer)
        other.update()
        optimizer.zero_grad()
    assert torch.equal(flat(model), flat(plain))
    assert scaler.get_scale() == other.get_scale() == 2.0**12


def test_a_scaler_that_is_not_enabled_is_no_scaler() -> None:
    link = FakeLink("sync")
    model, _, session = opened(link, scaler=torch.amp.GradScaler("cpu", enabled=False))
    train(session, model, 1)
    assert [request.kind for request in link.requests] == ["update"]


def test_averaging_scaled_gradients_is_an_error() -> None:
    link = FakeLink("sync")
    model, _, session, scaler = overflowing(link)
    scaler.scale(F.mse_loss(model(X)[:, 0], X.sum(1))).backward()
    with pytest.raises(RuntimeError, match=r"scaled gradients; call scaler.unscale_\(optimizer\)"):
        session.average_gradients(samples=8)


# --- schedules ---


def scheduled(link: FakeLink) -> tuple[nn.Sequential, torch.optim.SGD, Session]:
    model, optimizer = make(lr=1e-6)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: step + 1.0)
    session = Session(model, optimizer, link=link, scheduler=scheduler)
    return model, optimizer, session.__enter__()


def position(optimizer: torch.optim.Optimizer) -> int:
    """How often the scheduler was stepped."""
    lr: float = optimizer.param_groups[0]["lr"]
    return round(lr / 1e-6) - 1


def test_the_schedule_follows_committed_steps_plus_own_ones_and_never_goes_back() -> None:
    link = FakeLink("async", local_steps=2)
    link.notes.extend([{"steps": 1}, {"steps": 7}])
    model, optimizer, session = scheduled(link)
    positions = []
    for _ in range(6):
        train(session, model, 1)
        positions.append(position(optimizer))
    # 1 and 2 own steps; committed 1, so the third brings it to 2 again; committed 7 after the fourth.
    assert positions == [1, 2, 2, 7, 8, 9]


def test_in_sync_mode_a_skipped_round_does_not_move_the_schedule() -> None:
    link = FakeLink("sync")
    model, optimizer, session = scheduled(link)
    train(session, model, 2)
    link.contents.append("unchanged")
    train(session, model, 1)
    assert position(optimizer) == 2


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_a_schedule_of_the_users_own_is_refused_where_steps_are_unequal(mode: str) -> None:
    model, optimizer = make()
    lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(ValueError, match=f"mode '{mode}' workers take unequal .*scheduler=scheduler"):
        Session(model, optimizer, link=FakeLink(mode))


@pytest.mark.parametrize("mode", ["sync", "local"])
def test_a_schedule_of_the_users_own_is_left_alone_elsewhere(mode: str) -> None:
    model, optimizer = make()
    lr_scheduler.StepLR(optimizer, 3)
    Session(model, optimizer, link=FakeLink(mode))


def test_schedules_that_the_session_cannot_step_are_refused() -> None:
    model, optimizer = make()
    _, other = make()
    with pytest.raises(ValueError, match="ReduceLROnPlateau, which needs a metric"):
        Session(model, optimizer, link=FakeLink(), scheduler=lr_scheduler.ReduceLROnPlateau(optimizer))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another optimizer"):
        Session(model, optimizer, link=FakeLink(), scheduler=lr_scheduler.StepLR(other, 1))


# --- evaluation ---


def test_an_evaluation_is_asked_for_once_and_lapses_with_the_next_step() -> None:
    link = FakeLink()
    fetched: dict[str, Any] = {}
    link.notes.extend([{"evaluate": True}, fetched, {}, {"evaluate": True}])
    model, _, session = opened(link)
    due = []
    for _ in range(3):
        train(session, model, 1)
        due += [session.evaluation_due(), session.evaluation_due()]
    assert due == [True, False, False, False, True, False]
    link.notes.extend([fetched, {"evaluate": True}, {}])
    train(session, model, 2)
    assert not session.evaluation_due()


def test_after_local_steps_there_is_nothing_committed_to_evaluate() -> None:
    link = FakeLink("local", local_steps=2)
    link.notes.append({"evaluate": True})
    model, _, session = opened(link)
    train(session, model, 3)
    assert not session.evaluation_due()


@pytest.mark.parametrize("way", ["report", "step", "accumulate", "batches", "finish"])
def test_whatever_comes_after_an_evaluation_catches_up_first(way: str) -> None:
    link = FakeLink()
    link.notes.append({"evaluate": True})
    model, _, session = opened(link)
    train(session, model, 1)
    assert session.evaluation_due()
    link.version += 3  # the others went on
    link.state[WEIGHTS] = link.state[WEIGHTS] * 2
    expected = torch.tensor(link.state[WEIGHTS])
    if way == "report":
        session.report(accuracy=0.5)
    elif way == "step":
        link.local_steps = 9
        backward(model)
        session.step(1.0, samples=8)
    elif way == "accumulate":
        session.accumulate().__enter__()
    elif way == "batches":
        next(session.batches([1, 2], batch_size=1), None)  # type: ignore[arg-type]
    else:
        session.finish()
    calls = link.calls[link.calls.index("evaluating") :]
    assert calls[:2] == ["evaluating", "fetch"] or calls[:3] == ["evaluating", "report", "fetch"]
    if way != "step":
        assert torch.equal(flat(model), expected)
    assert session.version == link.version


def test_an_own_loop_that_stepped_meanwhile_contributes_instead_of_losing_its_step() -> None:
    link = FakeLink()
    link.notes.append({"evaluate": True})
    model, optimizer, session = opened(link)
    for _ in range(2):
        loss = backward(model)
        optimizer.step()
        optimizer.zero_grad()
        session.stepped(loss, samples=8)
        session.evaluation_due()
    assert link.calls[2:] == ["update", "evaluating", "update"]


def missed(link: FakeLink, rounds: int) -> None:
    """Let others' rounds pass while this worker evaluates."""
    rng = np.random.default_rng(0)
    for number in range(rounds):
        link.missed.append((b"\x3f" if number else b"\x3d", {name: rng.normal(size=values.shape).astype(values.dtype) for name, values in link.state.items() if not name.startswith("static")}))  # fmt: skip
    link.version += rounds
    link.steps += rounds
    link.contents.append("gradients")


@pytest.mark.parametrize("way", ["report", "step"])
def test_missed_rounds_of_sync_mode_are_repeated_with_the_same_clipping_and_schedule(way: str) -> None:
    link = FakeLink("sync")
    link.notes.append({"evaluate": True})
    model, optimizer = make()
    scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    plain, plain_optimizer = make()
    plain_scheduler = lr_scheduler.StepLR(plain_optimizer, 2, gamma=0.5)
    with Session(model, optimizer, link=link, scheduler=scheduler) as session:
        session.step(backward(model), samples=8, clip_norm=0.3)
        assert session.evaluation_due()
        missed(link, 3)
        own = backward(model)
        mine = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if way == "report":
            session.report(accuracy=0.1)
        session.step(own, samples=8, clip_norm=0.3)
    follow(plain, plain_optimizer, plain_scheduler, link, mine)
    assert torch.equal(flat(model), flat(plain))
    assert scheduler.last_epoch == 5
    assert np.array_equal(
        np.concatenate([b.numpy() for b in (model[1].running_mean, model[1].running_var)]),  # type: ignore[operator]
        link.state["buffers.float32"],
    )


def follow(
    model: nn.Module, optimizer: Any, scheduler: Any, link: FakeLink, last: list[Tensor | None]
) -> None:
    """What the workers did that did not evaluate, with plain torch."""
    backward(model)
    rounds: list[list[Tensor | None]] = [[parameter.grad for parameter in model.parameters()]]
    for present, values in link.missed:
        parts = torch.tensor(values[WEIGHTS]).split([parameter.numel() for parameter in model.parameters()])
        rounds.append(
            [
                part.view_as(p) if present[0] >> i & 1 else None
                for i, (part, p) in enumerate(zip(parts, model.parameters(), strict=True))
            ]
        )
    for gradients in [*rounds, last]:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        scheduler.step()


def own_loop(session: Session, model: nn.Module, optimizer: Any) -> None:
    loss = backward(model)
    session.average_gradients(samples=8)
    optimizer.step()
    optimizer.zero_grad()
    session.stepped(loss)


def changed_clipping(session: Session, model: nn.Module, optimizer: Any) -> None:
    session.step(backward(model), samples=8, clip_norm=1.0)
    session.step(backward(model), samples=8, clip_norm=2.0)


def own_schedule(session: Session, model: nn.Module, optimizer: Any) -> None:
    session.step(backward(model), samples=8)


def own_rate(session: Session, model: nn.Module, optimizer: Any) -> None:
    session.step(backward(model), samples=8)
    optimizer.param_groups[0]["lr"] /= 2
    session.step(backward(model), samples=8)


def own_rate_in_place(session: Session, model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    session.step(backward(model), samples=8)
    optimizer.param_groups[0]["lr"].mul_(0.5)
    session.step(backward(model), samples=8)


def clamped_weights(session: Session, model: nn.Module, optimizer: Any) -> None:
    session.step(backward(model), samples=8)
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)  # type: ignore[index]


@pytest.mark.parametrize(
    "loop", [own_loop, changed_clipping, own_schedule, own_rate, own_rate_in_place, clamped_weights]
)
def test_the_rounds_of_sync_mode_wait_for_an_evaluation_that_could_not_be_made_up_for(loop: Any) -> None:
    link = FakeLink("sync")
    link.notes.extend([{"evaluate": True}, {"evaluate": True}])
    model, optimizer = make()
    if loop is own_schedule:
        lr_scheduler.StepLR(optimizer, 3)
    with Session(model, optimizer, link=link) as session:
        loop(session, model, optimizer)
        assert session.evaluation_due()
    assert "evaluating" not in link.calls


# --- the end ---


def test_a_stop_ends_the_batches_and_what_is_pending_is_contributed() -> None:
    link = FakeLink("local", local_steps=1)
    link.notes.extend([{"local_steps": 5}])
    model, _, session = opened(link)
    train(session, model, 3)
    session.finish()
    session.finish()
    assert link.calls[2:] == ["update", "update", "finish", "fetch"]
    assert link.requests[1].steps == 2


def test_a_loop_without_batches_sees_that_it_should_stop() -> None:
    link = FakeLink()
    link.notes.extend([{}, {"stop": "stop.samples: enough"}])
    model, _, session = opened(link)
    seen = []
    for _ in range(2):
        train(session, model, 1)
        seen.append(session.should_stop)
    assert seen == [False, True]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("local", [("static.uint8",)]), ("sync", [(WEIGHTS, "buffers.float32", "static.uint8")])],
)
def test_the_last_worker_takes_the_final_weights_evaluates_and_publishes_the_rest(
    mode: str, expected: Any
) -> None:
    link = FakeLink(mode)
    model, optimizer = make()
    with Session(model, optimizer, link=link) as session:
        train(session, model, 2)
        if mode == "local":
            link.version += 1
            link.state[WEIGHTS] = link.state[WEIGHTS] + 1
        session.finish()
        assert session.evaluation_due()
        assert not session.evaluation_due()
        session.report(accuracy=1.0)
        model[1].num_batches_tracked.fill_(99)  # type: ignore[operator]
    assert link.calls[-3:] == ["report", "publish", "published"]
    assert "evaluating" not in link.calls
    assert link.published_vectors[1:] == expected
    assert link.state["static.uint8"][:8].view(np.int64).tolist() == [99]
    assert np.array_equal(link.state[WEIGHTS], flat(model).numpy())


def test_a_worker_that_is_not_the_last_only_leaves() -> None:
    link = FakeLink()
    link.last = False
    link.notes.append({"evaluate": True})
    model, optimizer = make()
    with Session(model, optimizer, link=link) as session:
        train(session, model, 1)
        session.finish()
        assert not session.evaluation_due()
    assert link.calls == ["publish", "ready", "update", "finish"]


def test_a_model_without_static_tensors_has_nothing_to_publish_at_the_end() -> None:
    link = FakeLink()
    model = nn.Linear(3, 1)
    with Session(model, torch.optim.SGD(model.parameters()), link=link) as session:
        train(session, model, 1)
    assert link.calls == ["publish", "ready", "update", "finish", "fetch", "published"]
