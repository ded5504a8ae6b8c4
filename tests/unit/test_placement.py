"""Where workers and shards go, and what that costs on the links."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cadenza_service.orchestration.link_loads import link_loads, placed_data, round_length
from cadenza_service.orchestration.placement import place
from cadenza_service.orchestration.resources import (
    Demand,
    Node,
    Placement,
    Resources,
    load,
    rate_of,
    subtract,
)

GROUPS = 4


def node(id: str, cpus: float = 1, **fields: Any) -> Node:
    return Node(id, Resources(cpus), Resources(cpus), **fields)


def wish(workers: int, **fields: Any) -> Demand:
    values: dict[str, Any] = {"worker": Resources(1), "shards": None, "shard": Resources(), "least": workers}
    return Demand(workers, **(values | fields))


def placed(wanted: Demand, nodes: list[Node], groups: int = GROUPS) -> Placement:
    found = place(wanted, nodes, groups)
    assert found is not None
    return found


# --- spread ----------------------------------------------------------------------------------------


def test_spread_puts_a_shard_on_each_workers_node() -> None:
    found = placed(wish(3, placement="spread"), [node("a"), node("b"), node("c"), node("d", 0)])
    assert (found.workers, found.shards) == (("a", "b", "c"), ("a", "b", "c"))


def test_one_node_has_one_shard() -> None:
    found = placed(wish(3), [node("a", 8)])
    assert (found.choice, found.workers, found.shards) == ("spread", ("a",) * 3, ("a",))
    assert "0 × the model each way" in found.reason


@pytest.mark.parametrize(("count", "shards"), [(1, "a"), (2, "ab"), (4, "abab"), (6, "ababaa")])
def test_a_given_count_goes_round_the_workers_nodes(count: int, shards: str) -> None:
    nodes = [Node("a", Resources(8), Resources(8)), Node("b", Resources(3), Resources(3))]
    found = placed(wish(2, shards=count, shard=Resources(1), placement="spread"), nodes)
    assert found.shards == tuple(shards)


def test_workers_are_dealt_out_evenly() -> None:
    found = placed(wish(5), [node("a", 9), node("b", 9), node("c", 1)])
    assert Counter(found.workers) == {"a": 2, "b": 2, "c": 1}


# --- dedicated -------------------------------------------------------------------------------------


def test_dedicated_shards_go_to_the_fattest_nodes_without_workers() -> None:
    found = placed(wish(2, placement="dedicated"), [node("fat", 8), node("a"), node("b"), node("mid", 4)])
    assert (set(found.workers), found.shards) == ({"a", "b"}, ("fat", "mid"))


def test_labelled_server_nodes_come_first_and_alone() -> None:
    nodes = [node("fat", 8), node("a"), node("s", 1, server=True)]
    found = placed(wish(2, placement="dedicated"), nodes)
    assert (set(found.workers), found.shards) == ({"fat", "a"}, ("s",))


def test_the_node_kept_free_is_one_that_workers_can_spare() -> None:
    nodes = [node("gpu", 8), node("small", 1)]
    found = placed(wish(4, placement="dedicated"), nodes)
    assert (set(found.workers), found.shards) == ({"gpu"}, ("small",))


def test_fewer_workers_leave_nodes_to_the_shards() -> None:
    nodes = [node(name, 2) for name in "abcd"]
    wanted = wish(8, least=1, shards=4, shard=Resources(1), placement="dedicated")
    found = placed(wanted, nodes)
    assert (len(found.workers), len(found.shards)) == (2, 4)
    assert not set(found.workers) & set(found.shards)


# --- auto ------------------------------------------------------------------------------------------


def test_symmetric_nodes_get_spread_shards() -> None:
    found = placed(wish(3), [node(name) for name in "abcdef"])
    assert found.choice == "spread"
    assert found.reason == (
        "spread: 3 workers on 3 of 6 nodes, 3 shards on 3; 1.33 × the model each way on a worker's link in a round, "
        "since no node is labelled cadenza.io/role=server (instead of dedicated: 3 workers on 3 of 6 nodes, "
        "3 shards on 3; 1 × the model each way on a worker's link in a round, 1 × on a server's)"
    )


def test_fat_server_nodes_get_the_shards() -> None:
    nodes = [node(name) for name in "abcd"] + [node("s", server=True)]
    found = placed(wish(4), nodes)
    assert (found.choice, found.shards) == ("dedicated", ("s",))
    assert "4 workers on 4 of 5 nodes, 1 shard on 1" in found.reason
    assert "1 × the model each way on a worker's link in a round, 4 × on a server's" in found.reason
    assert "1.2 times as long on the busiest link the other way (instead of spread" in found.reason
    assert "1.5 × the model each way" in found.reason


def test_a_server_link_that_is_too_slow_is_not_taken() -> None:
    workers = [node(name, rate_mbit_s=100.0) for name in "abcd"]
    for rate_mbit_s, choice in ((100.0, "spread"), (300.0, "spread"), (400.0, "dedicated")):
        found = placed(wish(4), [*workers, node("s", server=True, rate_mbit_s=rate_mbit_s)])
        assert found.choice == choice


def test_a_round_with_one_commit_is_never_shorter_on_dedicated_nodes() -> None:
    nodes = [node(name) for name in "abcd"] + [node("s", server=True)]
    assert placed(wish(4), nodes, groups=1).choice == "spread"


def test_dedicated_where_only_there_is_room_for_the_shards() -> None:
    nodes = [node("a"), node("b"), node("s", server=True)]
    found = placed(wish(2, shard=Resources(1)), nodes, groups=1)
    assert (found.choice, found.shards) == ("dedicated", ("s",))
    assert "there is no room for the shards the other way" in found.reason


def test_dedicated_where_more_workers_fit() -> None:
    nodes = [node("a", 2), node("b", 2), node("s", server=True)]
    found = placed(wish(4, least=1, shard=Resources(1)), nodes, groups=1)
    assert (found.choice, len(found.workers)) == ("dedicated", 4)
    assert "since more workers fit (instead of spread: 2 workers" in found.reason


def test_workers_on_one_node_keep_their_shard() -> None:
    found = placed(wish(2), [node("a", 2), node("s", server=True)])
    assert (found.choice, found.shards) == ("spread", ("a",))
    assert "since nothing leaves a node" in found.reason


def test_shards_are_packed_where_nothing_else_fits() -> None:
    found = placed(wish(3, worker=Resources(2), shard=Resources(1)), [node("a", 4), node("b", 3)])
    assert (found.choice, Counter(found.workers), found.shards) == ("packed", {"a": 2, "b": 1}, ("b",))


# --- the cost --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
def test_symmetric_spread_moves_what_a_ring_all_reduce_does(nodes: int) -> None:
    names = tuple(map(str, range(nodes)))
    loads = link_loads(Placement("spread", names, names))
    assert loads == pytest.approx(dict.fromkeys(names, 2 * (nodes - 1) / nodes))


def test_dedicated_loads_are_the_formulas() -> None:
    loads = link_loads(Placement("dedicated", ("a", "a", "b"), ("s", "t")))
    assert loads == {"a": 2.0, "b": 1.0, "s": 1.5, "t": 1.5}


def test_rates_divide_and_missing_ones_are_the_slowest_known() -> None:
    placement = Placement("dedicated", ("a", "b"), ("s",))
    nodes = [node("a", rate_mbit_s=20.0), node("b"), node("s", server=True)]
    assert round_length(placement, nodes, groups=4) == pytest.approx(1.25 / 20)
    assert round_length(placement, nodes, groups=1) == pytest.approx(2 / 20)


@pytest.mark.parametrize("label", ["", "fast", "0", "-1", "nan", "inf"])
def test_a_rate_label_that_is_no_rate_is_named(label: str) -> None:
    with pytest.raises(ValueError, match=r"cadenza\.io/link-mbit-s"):
        rate_of(label)


def test_an_event_tells_where_everything_lies() -> None:
    nodes = [node("a", address="10.0.0.1"), node("b", address="10.0.0.2")]
    assert placed_data("auto", placed(wish(2), nodes), nodes) == {
        "asked": "auto",
        "chosen": "spread",
        "workers": ["a", "b"],
        "shards": ["a", "b"],
        "nodes": {
            "a": {"address": "10.0.0.1", "models_each_way": 1.0},
            "b": {"address": "10.0.0.2", "models_each_way": 1.0},
        },
    }


# --- properties ------------------------------------------------------------------------------------

sizes = st.builds(
    Resources, st.integers(0, 12).map(lambda quarters: quarters / 2), st.integers(0, 2).map(float)
)


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    found = []
    for number in range(draw(st.integers(1, 5))):
        total = draw(sizes)
        server, rate = (
            draw(st.sampled_from([False, False, True])),
            draw(st.sampled_from([None, 20.0, 1000.0])),
        )
        found.append(Node(f"n{number}", total, total, server=server, rate_mbit_s=rate))
    return found


wishes = st.builds(
    Demand,
    workers=st.integers(1, 6),
    worker=st.builds(Resources, st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.0, 1.0])),
    shards=st.none() | st.integers(1, 5),
    shard=st.builds(Resources, st.sampled_from([0.0, 0.0, 0.5, 1.0])),
    placement=st.sampled_from(["auto", "spread", "dedicated"]),
)


@given(wishes, clusters(), st.randoms(use_true_random=False))
def test_every_placement_keeps_its_promises(wanted: Demand, nodes: list[Node], random: Any) -> None:
    found = place(wanted, nodes, GROUPS)
    shuffled = list(nodes)
    random.shuffle(shuffled)
    assert place(wanted, shuffled, GROUPS) == found
    if found is None:
        return
    by_id = {node.id: node for node in nodes}
    for node_id, taken in load(wanted, found).items():
        assert by_id[node_id].available.holds(taken)
    assert wanted.least <= len(found.workers) <= wanted.workers
    assert len(found.shards) == (wanted.shards or len(found.shards)) >= 1
    assert not any(by_id[node_id].server for node_id in found.workers)
    if found.choice == "spread":
        assert set(found.shards) <= set(found.workers)
        if wanted.shards is None:
            assert sorted(found.shards) == sorted(set(found.workers))
    if found.choice == "dedicated":
        assert not set(found.shards) & set(found.workers)
    if wanted.placement != "auto":
        assert found.choice == wanted.placement


@given(wishes, clusters())
def test_no_node_has_two_workers_more_than_one_with_room(wanted: Demand, nodes: list[Node]) -> None:
    found = place(wanted, nodes, GROUPS)
    assume(found is not None)
    assert found is not None
    counts = Counter(found.workers)
    for left in subtract(load(wanted, found), nodes):
        unused_spread = found.choice == "spread" and wanted.shards is None and left.id not in counts
        needs = wanted.worker + (wanted.shard if unused_spread else Resources())
        kept_free = found.choice == "dedicated" and left.id not in counts
        if not left.server and not kept_free and left.available.holds(needs):
            assert max(counts.values()) <= counts[left.id] + 1


@given(wishes, clusters())
def test_auto_places_whatever_can_be_placed(wanted: Demand, nodes: list[Node]) -> None:
    asked = place(wanted, nodes, GROUPS)
    auto = place(Demand(wanted.workers, wanted.worker, wanted.shards, wanted.shard), nodes, GROUPS)
    servers = any(node.server for node in nodes)
    if asked is not None:
        assert auto is not None
        if wanted.placement == "spread" or servers:
            assert len(auto.workers) >= len(asked.workers)


@given(wishes, clusters())
def test_the_links_carry_both_ends_of_everything(wanted: Demand, nodes: list[Node]) -> None:
    """What leaves the nodes is, summed, what workers exchange with shards elsewhere: counted pair by pair."""
    found = place(wanted, nodes, GROUPS)
    assume(found is not None)
    assert found is not None
    remote = sum(1 for worker in found.workers for shard in found.shards if worker != shard)
    assert sum(link_loads(found).values()) == pytest.approx(2 * remote / len(found.shards))
