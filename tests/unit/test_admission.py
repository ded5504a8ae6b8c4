"""Admission: what fits starts, what cannot fit says what is missing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.spec import JobSpec
from cadenza_service.orchestration.admission import Admission, Admit, Unschedulable, Wait, admit
from cadenza_service.orchestration.placement import fitting, place, set_aside
from cadenza_service.orchestration.resources import Demand, Node, Resources, demand, load, subtract

NUMBERS = itertools.count()


def spec(workers: dict[str, Any] | None = None, servers: dict[str, Any] | None = None) -> JobSpec:
    return JobSpec.model_validate(
        {"name": "job", "entrypoint": "train:main", "workers": workers or {}, "servers": servers or {}}
    )


def node(
    cpus: float,
    gpus: float = 0,
    *,
    free: float | None = None,
    free_gpus: float | None = None,
    server: bool = False,
) -> Node:
    available = Resources(cpus if free is None else free, gpus if free_gpus is None else free_gpus)
    return Node(f"node{next(NUMBERS)}", Resources(cpus, gpus), available, server=server)


def admitted(verdict: Admission) -> int:
    """With how many workers."""
    assert isinstance(verdict, Admit), verdict
    return len(verdict.placement.workers)


def refused(verdict: Admission) -> str:
    """Why never."""
    assert isinstance(verdict, Unschedulable), verdict
    return verdict.reason


def test_starts_as_many_workers_as_fit_between_the_bounds() -> None:
    wish = spec({"min": 1, "max": 8})
    assert admitted(admit(wish, [node(4, free=3), node(2)])) == 5
    assert admitted(admit(wish, [node(64)])) == 8


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
    reason = refused(admit(spec({"min": 1, "cpus": 4}), [node(2), node(2)]))
    assert "at most 2 CPU on one" in reason
    assert "only 0 of 1 workers fit" in reason


def test_shards_go_where_they_cost_no_worker() -> None:
    wish = spec({"min": 2, "cpus": 2}, {"count": 1, "cpus": 1})
    assert admitted(admit(wish, [node(2), node(3)])) == 2


def test_shards_that_fit_nowhere() -> None:
    reason = refused(admit(spec({"min": 1, "cpus": 0}, {"count": 2, "cpus": 3}), [node(4), node(2)]))
    assert "not all shards fit" in reason


@pytest.mark.parametrize("placement", ["auto", "spread", "dedicated"])
def test_a_cluster_without_nodes_holds_nothing(placement: str) -> None:
    refused(admit(spec(servers={"placement": placement}), []))
    refused(admit(spec({"cpus": 0}, {"placement": placement}), []))


def test_workers_that_take_nothing_always_fit() -> None:
    assert admitted(admit(spec({"min": 3, "cpus": 0}), [node(1, free=0)])) == 3


def test_fractions_add_up() -> None:
    assert admitted(admit(spec({"min": 10, "cpus": 0.1}), [node(1)])) == 10


def test_dedicated_shards_need_a_node_without_workers() -> None:
    wish = spec({"min": 2, "cpus": 4}, {"placement": "dedicated"})
    assert refused(admit(wish, [node(4), node(4)])) == (
        "servers.placement is dedicated, and 2 workers of 4 CPU each fit on 2 nodes, but the workers need every "
        "node that shards could have; missing a node without workers"
    )
    assert admitted(admit(wish, [node(4), node(4), node(1)])) == 2
    assert isinstance(admit(wish, [node(4), node(4), node(4, free=0), node(4, free=1)]), Admit)


def test_dedicated_shards_wait_for_a_node_that_is_only_busy() -> None:
    wish = spec({"min": 2, "cpus": 4}, {"placement": "dedicated", "cpus": 1})
    verdict = admit(wish, [node(4), node(4), node(4, free=0)])
    assert isinstance(verdict, Wait)
    assert "missing 1 CPU" in verdict.reason


def test_server_nodes_without_room_for_the_shards_are_named() -> None:
    wish = spec({"min": 1}, {"placement": "dedicated", "cpus": 2})
    reason = refused(admit(wish, [node(4), node(1, server=True)]))
    assert "the shards not on the 1 node labelled cadenza.io/role=server; missing room there" in reason


def test_spread_shards_need_room_beside_the_workers() -> None:
    wish = spec({"min": 1, "cpus": 4}, {"placement": "spread", "cpus": 1})
    reason = refused(admit(wish, [node(4), node(1)]))
    assert "missing room for a shard on each worker's node" in reason
    assert admitted(admit(spec({"min": 1, "cpus": 4}, {"cpus": 1}), [node(4), node(1)])) == 1


def test_server_nodes_take_no_workers() -> None:
    nodes = [node(2), node(8, server=True)]
    assert admitted(admit(spec({"min": 1, "max": 9}), nodes)) == 2
    reason = refused(admit(spec({"min": 3}), nodes))
    assert "on 2 nodes (1 of them take shards only)" in reason
    assert "only 2 of 3 workers fit" in reason


def test_what_waits_is_set_aside_as_far_as_it_fits() -> None:
    nodes = [node(4), node(2, free=1)]
    left = set_aside(demand(spec({"min": 7})), nodes)
    assert [after.available for after in left] == [Resources(), Resources()]
    assert [after.total for after in left] == [before.total for before in nodes]
    assert isinstance(admit(spec(), left), Wait)


def test_what_waits_for_room_for_its_shards_keeps_room_for_workers() -> None:
    left = set_aside(demand(spec({"min": 1}, {"cpus": 8})), [node(2)])
    assert [after.available for after in left] == [Resources(1)]
    assert set_aside(demand(spec()), []) == []


quarters = st.integers(0, 24).map(lambda quarter: quarter / 4)
amounts = st.builds(Resources, quarters, st.integers(0, 3).map(float))
demands = st.builds(
    Demand,
    workers=st.integers(1, 3),
    worker=amounts,
    shards=st.none() | st.integers(1, 2),
    shard=st.builds(Resources, st.sampled_from([0.0, 0.0, 0.5, 1.0])),
)


def nodes_of(available: list[Resources]) -> list[Node]:
    return [Node(str(number), has, has) for number, has in enumerate(available)]


def packs(wanted: Demand, workers: int, nodes: list[Resources]) -> bool:
    """Brute force: some assignment of every process to a node exceeds no node."""
    items = [wanted.worker] * workers + [wanted.shard] * (wanted.shards or 1)
    for places in itertools.product(range(len(nodes)), repeat=len(items)):
        loads = [Resources()] * len(nodes)
        for at, item in zip(places, items, strict=True):
            loads[at] = loads[at] + item
        if all(has.holds(taken) for has, taken in zip(nodes, loads, strict=True)):
            return True
    return False


@given(demands, st.lists(amounts, max_size=3))
def test_what_is_counted_can_be_packed(wanted: Demand, available: list[Resources]) -> None:
    fits = fitting(wanted, nodes_of(available))
    if fits >= 0:
        assert packs(wanted, fits, available)


@given(demands.filter(lambda wanted: wanted.shard.nothing), st.lists(amounts, min_size=1, max_size=3))
def test_without_shards_to_place_the_count_is_exact(wanted: Demand, available: list[Resources]) -> None:
    nodes = nodes_of(available)
    fits = fitting(wanted, nodes)
    assert fits == wanted.workers or not packs(wanted, fits + 1, available)
    placed = place(wanted, nodes)
    assert (len(placed.workers) if placed else 0) == fits


@settings(max_examples=60)
@given(demands, st.lists(amounts, min_size=1, max_size=4))
def test_what_is_placed_is_gone_and_no_more(wanted: Demand, available: list[Resources]) -> None:
    nodes = nodes_of(available)
    placed = place(wanted, nodes)
    if placed is None:
        return
    taken = load(wanted, placed)
    left = subtract(taken, nodes)
    for before, after in zip(nodes, left, strict=True):
        gone = taken.get(before.id, Resources())
        assert before.available.holds(gone)
        assert after.available.cpus == pytest.approx(before.available.cpus - gone.cpus)
