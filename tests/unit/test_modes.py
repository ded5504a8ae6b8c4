"""The four modes against closed forms, with the cores driven step by step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cadenza.plane.messages import Tentative
from tests.memory import MemoryJob

Array = NDArray[Any]


barriers_groups = pytest.mark.parametrize("groups", [1, 3])
"""Behind a barrier, in how many parts a round is answered changes nothing."""


# --- local SGD on quadratics ---


def local_steps(x: Array, matrix: Array, target: Array, rate: float, steps: int) -> Array:
    """Gradient descent on 0.5 (x - target)' A (x - target)."""
    for _ in range(steps):
        x = x - rate * (matrix @ x - target)
    return x


@barriers_groups
def test_local_sgd_on_heterogeneous_quadratics_reaches_its_fixed_point(groups: int) -> None:
    # Clients f_k = 0.5 x'A_k x - b_k'x: x_fp = (sum P_k)^-1 sum P_k A_k^-1 b_k with P_k = I - (I - eta A_k)^H.
    rng = np.random.default_rng(3)
    clients, size, rate, interval = 4, 5, 0.1, 8
    matrices = [np.diag(rng.uniform(0.5, 4.0, size)) for _ in range(clients)]
    targets = [rng.normal(size=size) for _ in range(clients)]
    job = MemoryJob(size, mode="local", workers=clients, groups=groups, unit=1)
    x = np.zeros(size)
    for version in range(400):
        for worker in range(clients):
            job.push(
                worker, local_steps(x, matrices[worker], targets[worker], rate, interval) - x, base=version
            )
        x = job.take(0).values
    projections = [np.eye(size) - np.linalg.matrix_power(np.eye(size) - rate * a, interval) for a in matrices]
    expected = np.linalg.solve(
        sum(projections),
        sum(p @ np.linalg.solve(a, b) for p, a, b in zip(projections, matrices, targets, strict=True)),
    )
    optimum = np.linalg.solve(sum(matrices), sum(targets))
    assert np.abs(x - expected).max() < 1e-10
    assert np.abs(x - optimum).max() > 1e-3


@barriers_groups
@pytest.mark.parametrize("gamma", [0.3, 1.0, 1.5])
def test_the_outer_rate_identity(gamma: float, groups: int) -> None:
    # x_R = ((1 - gamma) I + gamma (I - eta Q)^H)^R x_0 on 0.5 x'Qx.
    rng = np.random.default_rng(5)
    size, rate, interval, rounds = 6, 0.05, 7, 12
    root = rng.normal(size=(size, size))
    matrix = root @ root.T / size
    x = first = rng.normal(size=size)
    job = MemoryJob(size, mode="local", workers=2, outer={"name": "sgd", "lr": gamma}, groups=groups, unit=1)
    job.publish(first)
    for version in range(rounds):
        for worker in range(2):
            job.push(worker, local_steps(x, matrix, np.zeros(size), rate, interval) - x, base=version)
        x = job.take(1).values
    inner = np.linalg.matrix_power(np.eye(size) - rate * matrix, interval)
    expected = np.linalg.matrix_power((1 - gamma) * np.eye(size) + gamma * inner, rounds) @ first
    assert np.abs(x - expected).max() < 1e-12


@barriers_groups
@pytest.mark.parametrize(("name", "nesterov"), [("sgd", False), ("nesterov", True)])
def test_outer_momentum_equals_torch(name: str, nesterov: bool, groups: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(7)
    first = rng.normal(size=9)
    outer = {"name": name, "lr": 0.6, "momentum": 0.8}
    job = MemoryJob(9, mode="local", workers=1, outer=outer, groups=groups, unit=2)
    job.publish(first)
    parameter = torch.nn.Parameter(torch.tensor(first))
    optimizer = torch.optim.SGD([parameter], lr=0.6, momentum=0.8, nesterov=nesterov)
    for version in range(10):
        delta = rng.normal(size=9)
        job.push(0, delta, base=version)
        parameter.grad = torch.tensor(-delta)
        optimizer.step()
        assert np.abs(job.take(0).values - parameter.detach().numpy()).max() < 1e-12


# --- delayed gradients ---


def diverges(delay: int, product: float) -> bool:
    """Whether asynchronous gradient descent on 0.5 x^2 with a constant delay grows, run through shards and coordinator.

    ``delay + 1`` workers push in turn, so that each gradient is exactly ``delay`` versions old.
    """
    workers = delay + 1
    job = MemoryJob(1, mode="async", workers=workers, shards=1)
    job.publish(np.ones(1))
    held = [(0, 1.0)] * workers
    last = 1.0
    for step in range(600 * workers):
        worker = step % workers
        base, x = held[worker]
        job.push(worker, np.array([-product * x]), base=base)
        got = job.take(worker)
        if step >= workers:
            assert got.answer.note.staleness == delay
        last = float(got.values[0])
        held[worker] = (got.answer.note.version, last)
        if abs(last) > 1e6:
            return True
    return abs(last) > 1.0


@pytest.mark.parametrize("delay", [0, 1, 2, 4])
def test_the_stability_limit_of_delayed_gradient_descent(delay: int) -> None:
    # Stable exactly for eta * lambda < 2 sin(pi / (2 (2 tau + 1))).
    limit = 2 * np.sin(np.pi / (2 * (2 * delay + 1)))
    low, high = 0.5 * limit, 1.5 * limit
    while (high - low) / limit > 0.005:
        middle = (low + high) / 2
        low, high = (low, middle) if diverges(delay, middle) else (middle, high)
    assert abs(low - limit) / limit < 0.02


# --- stale-synchronous ---


class Racer:
    """Workers of random speeds in ssp mode: whoever is let go may push at any time."""

    def __init__(self, workers: int, bound: int) -> None:
        self.job = MemoryJob(3, mode="ssp", workers=workers, staleness=bound)
        self.running = dict.fromkeys(range(workers), 0)
        self.released = [0] * workers

    def push(self, worker: int) -> None:
        base = self.running.pop(worker)
        self.job.push(worker, np.ones(3), base=base)
        for answered in list(self.job.answers):
            self.running[answered] = self.job.take(answered).answer.note.version
            self.released[answered] += 1


@settings(deadline=None, max_examples=60)
@given(
    workers=st.integers(2, 5),
    bound=st.integers(0, 6),
    speeds=st.lists(st.integers(1, 20), min_size=5, max_size=5),
    seed=st.integers(0, 99),
)
def test_the_clock_spread_never_exceeds_the_bound(
    workers: int, bound: int, speeds: list[int], seed: int
) -> None:
    race = Racer(workers, bound)
    chance = random.Random(seed)
    for _ in range(120):
        runners = sorted(race.running)
        assert runners, "somebody can always go on"
        race.push(chance.choices(runners, [speeds[worker] for worker in runners])[0])
        assert max(race.released) - min(race.released) <= bound
    assert max(race.released) > 0 or bound == 0


def test_the_bound_is_used_up_by_a_fast_worker() -> None:
    race = Racer(2, bound=3)
    pushes = 0
    while 0 in race.running:
        race.push(0)
        pushes += 1
    assert pushes == 4
    assert race.released == [3, 0]


def test_ssp_with_bound_0_equals_local_with_interval_1() -> None:
    rng = np.random.default_rng(11)
    deltas = rng.normal(size=(20, 3, 4))
    samples = rng.integers(1, 9, size=(20, 3))
    results = []
    for mode, order, groups in (("local", (0, 1, 2), 1), ("local", (1, 0, 2), 3), ("ssp", (2, 0, 1), 1)):
        job = MemoryJob(4, mode=mode, workers=3, staleness=0, groups=groups, unit=1)  # type: ignore[arg-type]
        for version in range(20):
            for worker in order:
                job.push(worker, deltas[version, worker], base=version, samples=int(samples[version, worker]))
            taken = [job.take(worker).values for worker in range(3)]
            assert np.array_equal(taken[0], taken[1])
            assert np.array_equal(taken[0], taken[2])
        results.append(job.weights())
    assert all(np.array_equal(results[0], other) for other in results[1:])


# --- once, however often it is sent ---


@pytest.mark.parametrize(("mode", "groups"), [("local", 1), ("local", 3), ("async", 1)])
def test_a_contribution_sent_twice_counts_once(mode: Any, groups: int) -> None:
    job = MemoryJob(2, mode=mode, workers=2, groups=groups, unit=1)
    for worker in range(2):
        for _ in range(3):
            job.push(worker, np.full(2, 1.0), base=0, seq=1)
    assert np.array_equal(job.weights(), np.full(2, 1.0 if mode == "local" else 2.0))


def test_the_order_of_arrival_does_not_change_a_bit() -> None:
    rng = np.random.default_rng(13)
    deltas = rng.normal(size=(3, 5)) * np.array([1e16, 1.0, -1e16])[:, None]
    results = []
    for order, groups in (((0, 1, 2), 1), ((2, 1, 0), 1), ((1, 2, 0), 1), ((0, 1, 2), 3), ((2, 0, 1), 3)):
        job = MemoryJob(5, mode="local", workers=3, groups=groups, unit=1)
        for worker in order:
            job.push(worker, deltas[worker], base=0)
        results.append(job.weights())
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("outer", [{"name": "average"}, {"name": "nesterov", "lr": 0.7, "momentum": 0.9}])
def test_a_worker_that_is_slow_by_groups_changes_no_bit(outer: dict[str, Any]) -> None:
    # Worker 2's update comes last and part by part: the others' groups are answered while it still comes.
    rng = np.random.default_rng(17)
    deltas = rng.normal(size=(6, 3, 12))
    deltas[3, 2, -1] = np.inf  # After its first groups were answered.
    results = []
    for groups in (1, 3):
        job = MemoryJob(12, mode="local", workers=3, outer=outer, groups=groups, unit=1)
        version = 0
        for turn in range(6):
            for worker in range(3):
                job.push(worker, deltas[turn, worker], base=version, samples=worker + 1)
            taken = [job.take(worker) for worker in range(3)]
            version = taken[0].answer.note.version
            assert all(np.array_equal(got.values, job.weights()) for got in taken)
        results.append(job.weights())
        early = [output for output in job.outputs if isinstance(output, Tentative)]
        assert len({entry.group for entry in early}) == groups - 1
        assert np.isfinite(job.weights()).all()
        assert version == 6
    assert np.array_equal(results[0], results[1])
