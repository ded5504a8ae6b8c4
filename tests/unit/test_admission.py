"""Admission: what fits starts, what cannot fit says what is missing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.spec import JobSpec
from cadenza_service.orchestration.admission import (
    Admit,
    Demand,
    Node,
    Resources,
    Unschedulable,
    Wait,
    admit,
    demand,
    fitting,
    reserve,
)


def spec(workers: dict[str, Any] | None = None, servers: dict[str, Any] | None = None) -> JobSpec:
    return JobSpec.model_validate(
        {"name": "job", "entrypoint": "train:main", "workers": workers or {}, "servers": servers or {}}
    )


def node(cpus: float, gpus: float = 0, *, free: float | None = None, free_gpus: float | None = None) -> Node:
    total = Resources(cpus, gpus)
    return Node(total, Resources(cpus if free is None else free, gpus if free_gpus is None else free_gpus))


def test_starts_as_many_workers_as_fit_between_the_bounds() -> None:
    wish = spec({"min": 1, "max": 8})
    assert admit(wish, [node(4, free=3), node(2)]) == Admit(5)
    assert admit(wish, [node(64)]) == Admit(8)


def test_says_what_the_cluster_lacks() -> None:
    verdict = admit(spec({"min": 4, "cpus": 16}), [node(2)])
    assert verdict == Unschedulable(
        "needs 64 CPU for 4 workers of 16 CPU each; the cluster has 2 CPU; missing 62 CPU"
    )


def test_names_missing_gpus_and_shards() -> None:
    verdict = admit(spec({"min": 2, "gpus": 1}, {"count": 3, "cpus": 2}), [node(4)])
    assert verdict == Unschedulable(
        "needs 8 CPU and 2 GPU for 2 workers of 1 CPU and 1 GPU each and 3 shards of 2 CPU each; "
        "the cluster has 4 CPU; missing 4 CPU and 2 GPU"
    )


def test_waits_for_what_others_have() -> None:
    verdict = admit(spec({"min": 3}), [node(4, free=1)])
    assert verdict == Wait(
        "needs 3 CPU for 3 workers of 1 CPU each; the cluster has free 1 CPU; missing 2 CPU"
    )


def test_a_worker_lies_on_one_node() -> None:
    verdict = admit(spec({"min": 1, "cpus": 4}), [node(2), node(2)])
    assert isinstance(verdict, Unschedulable)
    assert "at most 2 CPU on one" in verdict.reason
    assert "only 0 of 1 workers fit" in verdict.reason


def test_shards_go_where_they_cost_no_worker() -> None:
    wish = spec({"min": 2, "cpus": 2}, {"count": 1, "cpus": 1})
    assert admit(wish, [node(2), node(3)]) == Admit(2)


def test_shards_that_fit_nowhere() -> None:
    verdict = admit(spec({"min": 1, "cpus": 0}, {"count": 2, "cpus": 3}), [node(4), node(2)])
    assert isinstance(verdict, Unschedulable)
    assert "not all shards fit" in verdict.reason


def test_a_cluster_without_nodes_holds_nothing() -> None:
    assert isinstance(admit(spec(), []), Unschedulable)


def test_workers_that_take_nothing_always_fit() -> None:
    assert admit(spec({"min": 3, "cpus": 0}), [node(1, free=0)]) == Admit(3)


def test_fractions_add_up() -> None:
    assert admit(spec({"min": 10, "cpus": 0.1}), [node(1)]) == Admit(10)


def test_a_promise_is_gone_for_the_next_job() -> None:
    nodes = [node(4), node(2)]
    left = reserve(demand(spec({"min": 1, "max": 5}), 5), nodes)
    assert admit(spec({"min": 1}), left) == Admit(1)
    assert isinstance(admit(spec({"min": 2}), left), Wait)
    assert [after.total for after in left] == [before.total for before in nodes]


quarters = st.integers(0, 24).map(lambda quarter: quarter / 4)
amounts = st.builds(Resources, quarters, st.integers(0, 3).map(float))
demands = st.builds(
    Demand,
    workers=st.integers(1, 3),
    worker=amounts,
    shards=st.integers(1, 2),
    shard=st.builds(Resources, st.sampled_from([0.0, 0.0, 0.5, 1.0])),
)


def packs(wanted: Demand, workers: int, nodes: list[Resources]) -> bool:
    """Brute force: some assignment of every process to a node exceeds no node."""
    items = [wanted.worker] * workers + [wanted.shard] * wanted.shards
    for places in itertools.product(range(len(nodes)), repeat=len(items)):
        loads = [Resources()] * len(nodes)
        for place, item in zip(places, items, strict=True):
            loads[place] = loads[place] + item
        if all(has.holds(load) for has, load in zip(nodes, loads, strict=True)):
            return True
    return False


@given(demands, st.lists(amounts, max_size=3))
def test_what_is_admitted_can_be_packed(wanted: Demand, nodes: list[Resources]) -> None:
    fits = fitting(wanted, nodes)
    if fits >= 0:
        assert packs(wanted, fits, nodes)


@given(demands.filter(lambda wanted: wanted.shard.nothing), st.lists(amounts, min_size=1, max_size=3))
def test_without_shards_to_place_the_count_is_exact(wanted: Demand, nodes: list[Resources]) -> None:
    fits = fitting(wanted, nodes)
    assert fits == wanted.workers or not packs(wanted, fits + 1, nodes)


@given(demands, st.lists(amounts, min_size=1, max_size=4))
def test_a_promise_takes_exactly_its_sum(wanted: Demand, available: list[Resources]) -> None:
    nodes = [Node(has, has) for has in available]
    left = reserve(wanted, nodes)
    if fitting(wanted, available) == wanted.workers:
        taken = sum(available, Resources()).cpus - sum((after.available for after in left), Resources()).cpus
        assert taken == pytest.approx(wanted.sum.cpus)
    assert all(before.available.holds(after.available) for before, after in zip(nodes, left, strict=True))
