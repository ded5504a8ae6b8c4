"""Every local step is in exactly one contribution, whatever comes late, is lost or is not finite: random runs.

A server keeps float64 weights and adds each contribution's share when it lands, at a moment of the test's choosing.
What the contributions must have been follows from the optimizer's steps alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cadenza.plane.messages import Answer
from cadenza.training.session import Session
from tests.unit.fake_link import FakeLink

WEIGHTS = "parameters.float64"
SIZE = 3

Array = NDArray[np.float64]


class Server:
    """Plain averaging: each contribution counts 1 / workers, when it lands."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.values: Array = np.zeros(SIZE)
        self.merged: Array = np.zeros(SIZE)


class Member(FakeLink):
    """One worker's link to the common server; ``fates`` say which finite contributions are merged and which lost."""

    def __init__(self, server: Server, fates: list[bool], **options: Any) -> None:
        super().__init__(**options)
        self.late = True
        self._server = server
        self._fates = fates

    def answered(self, request: Any, values: Any, into: Any) -> Answer:
        if request.kind == "update":
            self.notes.append(self._judge(values[WEIGHTS]))
        elif request.kind == "fetch":
            self.version += 1  # the others' contributions
        self.state[WEIGHTS] = self._server.values
        answer = super().answered(request, {WEIGHTS: np.zeros(SIZE)}, into)
        into[WEIGHTS][:] = self._server.values
        return answer

    def _judge(self, delta: Array) -> dict[str, Any]:
        if not np.isfinite(delta).all():
            return {"dropped": "non_finite"}
        if self._fates and not self._fates.pop():
            return {"dropped": "no_samples"}
        self._server.merged = self._server.merged + delta
        self._server.values = self._server.values + delta / self._server.workers
        return {}


class Worker:
    """A session whose optimizer makes the steps that it is told."""

    def __init__(self, link: FakeLink) -> None:
        self.link = link
        self.steps: list[Array] = []
        module = torch.nn.Module()
        self.weight = module.weight = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
        self.session = Session(module, torch.optim.SGD(module.parameters(), lr=1.0), link=link).__enter__()

    def step(self, change: Array) -> None:
        self.steps.append(change)
        self.weight.grad = -torch.from_numpy(change)
        self.session.step(0.0, samples=1)

    def check_contributions(self) -> None:
        """Contributions follow each other without a gap: first what was thrown away, then what each one holds."""
        position = 0
        for request, sent in zip(self.link.requests, self.link.sent, strict=True):
            position += request.lost_samples
            if request.kind == "update":
                own = np.sum(self.steps[position : position + request.steps], axis=0)
                assert np.allclose(sent[WEIGHTS], own, rtol=0, atol=1e-12, equal_nan=True)
                assert request.samples == request.steps
                position += request.steps
        assert position == len(self.steps)


@settings(max_examples=40, deadline=None)
@given(
    mode=st.sampled_from(
        [("local", "auto"), ("local", "on"), ("ssp", "on"), ("async", "on"), ("async", "off")]
    ),
    intervals=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    workers=st.integers(1, 3),
    steps=st.integers(1, 30),
    seed=st.integers(0, 2**32 - 1),
    lateness=st.floats(0, 1),
    fates=st.lists(st.booleans(), max_size=8),
    poison=st.lists(st.integers(0, 29), max_size=2),
)
def test_pushed_and_pending_is_all_that_was_done(
    mode: tuple[str, Any],
    intervals: list[int],
    workers: int,
    steps: int,
    seed: int,
    lateness: float,
    fates: list[bool],
    poison: list[int],
) -> None:
    rng = np.random.default_rng(seed)
    server = Server(workers)
    crew = [
        Worker(Member(server, list(fates), mode=mode[0], overlap=mode[1], local_steps=intervals[0]))
        for _ in range(workers)
    ]
    for step in range(steps):
        for number, worker in enumerate(crew):
            change = rng.normal(size=SIZE)
            change[1] = np.nan if number == 0 and step in poison else change[1]
            worker.link.local_steps = intervals[(step + number) % len(intervals)]
            worker.step(change)
            if worker.link.flights and rng.random() > lateness:
                worker.link.flights[-1].land()
    for worker in crew:
        worker.session.finish()
        worker.check_contributions()
        assert np.array_equal(worker.weight.detach().numpy(), server.values)
        assert np.isfinite(server.values).all()
    assert np.allclose(server.values, server.merged / workers, rtol=0, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    mix=st.none() | st.floats(0, 0.99),
    local_steps=st.integers(1, 12),
    steps=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_weights_and_contributions_are_those_of_the_formulas(
    mix: float | None, local_steps: int, steps: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    worker = Worker(FakeLink(local_steps=local_steps, overlap="auto", mix=mix))
    worker.link.late = True
    theta, anchor, committed = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    expected: list[Array] = []
    at_send: Array | None = None
    since = 0
    for _ in range(steps):
        change, others = rng.normal(size=SIZE), rng.normal(size=SIZE)
        committed = committed + others
        worker.link.state[WEIGHTS] = worker.link.state[WEIGHTS] + others
        worker.step(change)
        theta, since = theta + change, since + 1
        if at_send is not None and since == local_steps // 4:
            committed = committed + expected[-1]
            theta = committed + theta - at_send if mix is None else mix * theta + (1 - mix) * committed
            anchor, at_send = committed, None
        if since == local_steps:
            expected.append(theta - anchor)
            at_send, since = theta, 0
            if local_steps < 4:
                committed = committed + expected[-1]
                theta = anchor = committed
                at_send = None
        assert np.allclose(worker.weight.detach().numpy(), theta, rtol=0, atol=1e-9)
    assert len(worker.link.sent) == len(expected)
    for sent, own in zip(worker.link.sent, expected, strict=True):
        assert np.allclose(sent[WEIGHTS], own, rtol=0, atol=1e-9)
