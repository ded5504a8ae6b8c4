"""Local steps while a contribution is under way: what is in which contribution, and what stays when answers come late."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from cadenza.plane.messages import Leased, Span
from cadenza.training.device import DirectCopies, LateCopies
from cadenza.training.overlap import AT_ONCE, OverlapPlan, plan_overlap
from cadenza.training.session import Session
from tests.unit.fake_link import FakeLink

WEIGHTS = "parameters.float64"
BUFFERS = "buffers.float64"


class Model(nn.Module):
    """One vector of weights, one averaged buffer, one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


class Walk:
    """A model whose every step is chosen by the test: the gradient is minus the step, at a rate of 1."""

    def __init__(self, link: FakeLink, **options: Any) -> None:
        self.link = link
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.session = Session(self.model, self.optimizer, link=link, **options).__enter__()

    def step(self, size: float = 1.0) -> None:
        self.model.weight.grad = torch.full((3,), -size, dtype=torch.float64)
        with torch.no_grad():
            self.model.mean.add_(size)  # type: ignore[operator]
            self.model.seen.add_(1)  # type: ignore[operator]
        self.session.step(0.0, samples=1)

    @property
    def weight(self) -> float:
        return float(self.model.weight.detach()[0])

    def others(self, change: float) -> None:
        """What others contributed meanwhile."""
        for name in (WEIGHTS, BUFFERS):
            self.link.state[name] = self.link.state[name] + change


def walking(**options: Any) -> Walk:
    given: dict[str, Any] = {"local_steps": 8, "overlap": "auto"} | options
    link = FakeLink(**given)
    link.late = True
    return Walk(link)


# --- the plan ---


@pytest.mark.parametrize(
    ("mode", "overlap", "local_steps", "expected"),
    [
        ("local", "off", 64, AT_ONCE),
        ("local", "auto", 1, AT_ONCE),
        ("local", "auto", 3, AT_ONCE),
        ("local", "auto", 4, OverlapPlan(1, early=False)),
        ("local", "auto", 64, OverlapPlan(16, early=False)),
        ("ssp", "auto", 64, AT_ONCE),
        ("async", "auto", 64, AT_ONCE),
        ("local", "on", 1, OverlapPlan(1, early=True)),
        ("ssp", "on", 8, OverlapPlan(8, early=True)),
        ("async", "on", 8, OverlapPlan(8, early=True)),
        ("sync", "on", 1, AT_ONCE),
    ],
)
def test_the_plan_follows_mode_wish_and_interval(
    mode: str, overlap: Any, local_steps: int, expected: OverlapPlan
) -> None:
    assert plan_overlap(mode, overlap, local_steps) == expected


# --- when ---


@pytest.mark.parametrize("arrives_after", [0, 1, None])
def test_auto_merges_a_quarter_of_the_interval_after_sending_however_late_the_answer(
    arrives_after: int | None,
) -> None:
    walk = walking()
    for step in range(1, 12):
        walk.step()
        if arrives_after is not None and step == 8 + arrives_after:
            walk.link.flights[-1].land()
        # Two steps after it was sent, and the answer is merged: the version shows it.
        assert walk.session.version == (step >= 10)
    assert walk.link.waits == (arrives_after is None)
    assert [request.steps for request in walk.link.requests] == [8]
    for _ in range(5):
        walk.step()
    assert [(request.steps, request.base_version) for request in walk.link.requests] == [(8, 0), (8, 1)]


def test_on_merges_as_soon_as_the_answer_is_there() -> None:
    walk = walking(overlap="on", mode="async")
    for _ in range(9):
        walk.step()
    walk.others(10.0)
    walk.link.flights[-1].land()
    assert walk.weight == 9
    walk.step()
    assert (walk.weight, walk.link.waits) == (20, 0)


def test_on_waits_at_the_latest_when_the_next_contribution_is_due() -> None:
    walk = walking(overlap="on", mode="ssp", local_steps=3)
    waits = []
    for _ in range(9):
        walk.step()
        waits.append(walk.link.waits)
    assert waits == [0, 0, 0, 0, 0, 1, 1, 1, 2]
    assert [request.steps for request in walk.link.requests] == [3, 3, 3]


def test_an_interval_that_a_note_makes_short_ends_the_overlap() -> None:
    walk = walking()
    walk.link.local_steps = 2
    for _ in range(14):
        walk.step()
    # 8 steps, merged after 10; then two are pending already, and from then on each exchange is waited for.
    assert [request.steps for request in walk.link.requests] == [8, 2, 2, 2]
    assert walk.link.waits == 4


# --- what ---


def test_steps_since_sending_stay_on_top_of_the_answer_and_are_what_is_contributed_next() -> None:
    walk = walking()
    for step in range(8):
        walk.step(2.0**step)
    walk.others(1000.0)
    walk.step(0.5)
    assert walk.weight == 255.5
    walk.step(0.25)
    assert walk.weight == 1255.75
    assert walk.model.mean[0] == 1255.75  # type: ignore[index]
    assert walk.model.seen == 10
    for _ in range(6):
        walk.step()
    first, second = walk.link.sent
    assert (first[WEIGHTS][0], second[WEIGHTS][0]) == (255, 6.75)
    assert (first[BUFFERS][0], second[BUFFERS][0]) == (255, 6.75)


def test_mixing_keeps_a_share_of_the_own_weights_which_the_next_contribution_holds() -> None:
    walk = walking(mix=0.25)
    for _ in range(8):
        walk.step()
    walk.others(100.0)
    walk.step()
    walk.step()
    assert walk.weight == 0.25 * 10 + 0.75 * 108
    assert walk.model.mean[0] == 110  # type: ignore[index]  # buffers: full correction
    for _ in range(6):
        walk.step()
    assert walk.link.sent[1][WEIGHTS][0] == 0.25 * (10 - 108) + 6
    assert walk.link.sent[1][BUFFERS][0] == 8


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_mixing_works_in_16_bits(alpha: float) -> None:
    link = FakeLink(local_steps=4, overlap="auto", mix=alpha)
    link.late = True
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    with Session(model, torch.optim.SGD(model.parameters(), lr=1.0), link=link) as session:
        for _ in range(5):
            model.weight.grad = torch.full_like(model.weight, -1.0)
            if link.flights:
                link.state["parameters.bfloat16"] = link.state["parameters.bfloat16"] + np.ones(1, "bfloat16")
                now = model.weight.detach() + 1
            session.step(0.0, samples=1)
        answer = torch.from_numpy(link.state["parameters.bfloat16"].astype(np.float32)).view(8, 8)
        expected = answer + alpha * (now.float() - answer)
        assert torch.allclose(model.weight.float(), expected, rtol=2**-8, atol=0.05)


def test_a_contribution_says_what_it_was_when_sent_and_the_next_one_the_rest() -> None:
    link = FakeLink(local_steps=4, overlap="auto")
    link.late = True
    link.runs.append(Leased(1, 0, 0, 6, 0))
    walk = Walk(link)
    for _ in walk.session.batches(TensorDataset(torch.zeros(6)), batch_size=1, shuffle=False):
        walk.model.weight.grad = torch.ones(3, dtype=torch.float64)
        walk.session.step(0.0)
    updates = [request for request in link.requests if request.kind == "update"]
    assert [(r.steps, r.samples, r.spans) for r in updates] == [
        (4, 4, (Span(1, 0, 4),)),
        (2, 2, (Span(1, 4, 6),)),
    ]


def test_the_schedule_counts_steps_under_way() -> None:
    link = FakeLink(local_steps=8, overlap="auto")
    link.late = True
    link.notes.append({"steps": 20})
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: step + 1.0)
    with Session(model, optimizer, link=link, scheduler=scheduler) as session:
        positions = []
        for _ in range(11):
            model.weight.grad = torch.ones(3, dtype=torch.float64)
            session.step(0.0, samples=1)
            positions.append(scheduler.last_epoch)
        # Merged in the tenth step: 20 committed, and two since.
        assert positions == [1, 2, 3, 4, 5, 6, 7, 8, 9, 22, 23]


# --- what is thrown away ---


def test_what_followed_a_poisoned_contribution_is_void_and_its_samples_are_told() -> None:
    link = FakeLink(local_steps=4, overlap="auto")
    link.late = True
    link.notes.append({"dropped": "non_finite"})
    link.runs.append(Leased(1, 0, 0, 9, 0))
    walk = Walk(link)
    walk.link.state[WEIGHTS] = np.full(3, 7.0)
    for _ in walk.session.batches(TensorDataset(torch.zeros(9)), batch_size=1, shuffle=False):
        first = walk.session.steps == 0
        walk.model.weight.grad = torch.full((3,), float("nan") if first else -1.0, dtype=torch.float64)
        walk.session.step(1.0)
        if walk.session.steps == 5:
            assert walk.weight == 7.0
    updates = [request for request in link.requests if request.kind == "update"]
    assert [(r.steps, r.samples, r.spans, r.lost_samples, r.lost_spans) for r in updates] == [
        (4, 4, (Span(1, 0, 4),), 0, ()),
        (4, 4, (Span(1, 5, 9),), 1, (Span(1, 4, 5),)),
    ]


def test_losses_at_the_very_end_are_told_too() -> None:
    walk = walking(local_steps=4)
    walk.link.notes.append({"dropped": "non_finite"})
    walk.step(float("nan"))
    for _ in range(3):
        walk.step()
    # Within the delay, so the flight lands in finish.
    walk.session._ensemble._pace.plan = OverlapPlan(4, early=False)
    walk.step()
    walk.session.finish()
    assert [(r.kind, r.reason, r.steps, r.lost_samples) for r in walk.link.requests[:2]] == [
        ("update", "", 4, 0),
        ("abstain", "lost", 0, 1),
    ]
    assert walk.weight == 0


def test_a_contribution_that_was_not_merged_for_another_reason_voids_nothing_else() -> None:
    walk = walking()
    walk.link.notes.append({"dropped": "no_samples"})
    for _ in range(10):
        walk.step()
    assert walk.weight == 2


# --- evaluation ---


def test_an_evaluation_sees_the_committed_weights_and_pending_steps_come_back_on_top_of_later_ones() -> None:
    walk = walking()
    walk.link.notes.append({"evaluate": True})
    for _ in range(10):
        walk.step()
    assert walk.weight == 10
    assert walk.session.evaluation_due()
    assert (walk.weight, walk.model.mean[0].item()) == (8, 8)  # type: ignore[index]
    walk.others(100.0)
    walk.link.version += 1
    walk.session.report(accuracy=1.0)
    assert (walk.weight, walk.model.mean[0].item()) == (110, 110)  # type: ignore[index]
    for _ in range(6):
        walk.step()
    assert walk.link.sent[-1][WEIGHTS][0] == 8


def test_an_own_loop_that_steps_without_coming_back_keeps_its_pending_steps() -> None:
    walk = walking()
    walk.link.notes.append({"evaluate": True})

    def step() -> None:
        with torch.no_grad():
            walk.model.weight.add_(1.0)
        walk.session.stepped(0.0, samples=1)

    for _ in range(10):
        step()
    assert walk.session.evaluation_due()
    assert walk.weight == 8
    for _ in range(6):
        step()
    assert walk.weight == 16
    assert walk.link.sent[-1][WEIGHTS][0] == 8


def test_a_worker_that_is_asked_to_evaluate_has_nothing_under_way() -> None:
    walk = walking(overlap="on", local_steps=1)
    walk.link.notes.append({"evaluate": True})
    walk.step()
    walk.step()
    assert walk.session.evaluation_due()
    assert walk.weight == 1
    walk.session.report(value=1.0)
    assert walk.weight == 2
    walk.step()
    assert [request.steps for request in walk.link.requests if request.kind == "update"] == [1, 2]


def test_a_request_to_evaluate_that_is_not_heeded_changes_nothing() -> None:
    walk = walking()
    walk.link.notes.append({"evaluate": True})
    for _ in range(11):
        walk.step()
    assert not walk.session.evaluation_due()
    assert walk.weight == 11
    assert "evaluating" not in walk.link.calls


# --- the end ---


@pytest.mark.parametrize("steps", [8, 9, 11])
@pytest.mark.parametrize("mix", [None, 0.5])
def test_the_end_lands_what_is_under_way_contributes_the_rest_and_leaves_the_committed_weights(
    steps: int, mix: float | None
) -> None:
    walk = walking(mix=mix)
    for _ in range(steps):
        walk.step()
    walk.others(100.0)
    walk.session.finish()
    assert walk.link.calls[2:] == ["update", *["update"] * (steps > 8), "finish", "fetch"]
    assert walk.weight == walk.link.state[WEIGHTS][0]
    if mix is None:
        assert walk.weight == 100 + steps


def test_an_error_leaves_what_is_under_way_alone() -> None:
    link = FakeLink(local_steps=4, overlap="auto")
    link.late = True

    def loop() -> None:
        model = Model()
        with Session(model, torch.optim.SGD(model.parameters()), link=link) as session:
            for _ in range(4):
                model.weight.grad = torch.ones(3, dtype=torch.float64)
                session.step(0.0, samples=1)
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        loop()
    assert link.waits == 0


# --- what it costs ---


def test_time_that_is_hidden_is_computing_not_synchronising(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("cadenza.training.meter.time.perf_counter", lambda: clock[0])
    told: list[tuple[float, float | None]] = []

    class Timed(FakeLink):
        def telemetry(self, *, steps: int, samples: int, compute_seconds: float, apply_seconds: Any) -> None:
            told.append((compute_seconds, apply_seconds))

    link = Timed(local_steps=4, overlap="auto")
    link.late = True
    walk = Walk(link)
    for _ in range(5):
        clock[0] += 0.25
        walk.step()
    # Five steps of a quarter of a second computed; the exchange itself took none, on a clock that stands still then.
    assert told[-1] == (1.25, 0.0)


def test_memory_is_allocated_once() -> None:
    walk = walking(local_steps=4)
    made = []
    vectors = walk.session._ensemble._averaging._flat.vectors

    def counted(names: Any) -> Any:
        made.append(names)
        return vectors(names)

    walk.session._ensemble._averaging._flat.vectors = counted  # type: ignore[method-assign]
    for _ in range(40):
        walk.step()
    assert len(made) == 1


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def test_auto_repeats_to_the_bit_whenever_answers_and_copies_come(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for arrives_after, copies in itertools.product((0, 1, 5), (DirectCopies, LateCopies)):
        monkeypatch.setattr("cadenza.training.flat.copies_for", lambda tensors, made=copies: made())
        link = FakeLink("local", local_steps=8, overlap="auto")
        link.late = True
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        generator = torch.Generator().manual_seed(5)
        with Session(model, torch.optim.Adam(model.parameters(), lr=0.05), link=link) as session:
            for step in range(45):
                x = torch.randn(6, 3, generator=generator)
                loss = (model(x)[:, 0] - x.sum(1)).square().mean()
                loss.backward()
                session.step(loss, samples=6)
                if step >= 7 and (step - 7) % 8 == arrives_after:
                    link.flights[-1].land()
        results.append(flat(model))
    assert all(torch.equal(result, results[0]) for result in results)
