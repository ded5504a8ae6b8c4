"""On which node each worker and shard of a job lies: a pure function of the job's demand and the nodes.

    spread     a shard beside the workers on each of their nodes
    dedicated  the shards on nodes without workers of the job
    packed     each shard where it costs the fewest workers; only where neither of the others fits

Workers are dealt out evenly over the nodes in every case. What a way costs is in
:mod:`cadenza_service.orchestration.link_loads`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from cadenza_service.orchestration.link_loads import COMMIT_GROUPS, describe, round_length
from cadenza_service.orchestration.resources import (
    ROLE_LABEL,
    Choice,
    Demand,
    Node,
    Placement,
    Resources,
    load,
    subtract,
)

SAME = 1e-9
"""Two ways whose rounds differ by less than this part take equally long."""


def place(wanted: Demand, nodes: Sequence[Node], groups: int = COMMIT_GROUPS) -> Placement | None:
    """Place as many of the wanted workers as fit, and all shards; None where fewer than ``wanted.least`` fit.

    Args:
        wanted: the job's processes.
        nodes: the cluster; only what is available is used.
        groups: commit groups of a round, see :func:`round_length`.
    """
    if wanted.placement == "auto":
        return _auto(wanted, nodes, groups)
    placed = (_spread if wanted.placement == "spread" else _dedicated)(wanted, nodes)
    return placed and _because(placed, nodes, "as the job asks")


def fitting(wanted: Demand, nodes: Sequence[Node]) -> int:
    """How many of the wanted workers fit in the least demanding way; -1 if not even all shards do."""
    placed = _packed(wanted, nodes)
    return -1 if placed is None else len(placed.workers)


def set_aside(wanted: Demand, nodes: Sequence[Node]) -> list[Node]:
    """The nodes after as much of ``wanted`` as fits was promised to a job that waits for more."""
    for asked in (wanted, replace(wanted, shards=1, shard=Resources())):
        placed = _packed(asked, nodes)
        if placed is not None:
            return subtract(load(asked, placed), nodes)
    return list(nodes)


# --- the choice ------------------------------------------------------------------------------------


def _auto(wanted: Demand, nodes: Sequence[Node], groups: int) -> Placement | None:
    """Spread, or dedicated where that has more workers or clearly shorter rounds; packed where neither fits."""
    spread, dedicated = _spread(wanted, nodes), _dedicated(wanted, nodes)
    if not any(node.server for node in nodes):
        why = f"since no node is labelled {ROLE_LABEL}=server"
        best, other = spread, dedicated
    elif spread is None or dedicated is None:
        why = "since there is no room for the shards the other way"
        best, other = spread or dedicated, None
    else:
        best, other, why = _better(spread, dedicated, nodes, groups)
    if best is None:
        best, why = _packed(wanted, nodes), "since there is no room for shards on each worker's node"
        if best is None or len(best.workers) < wanted.least:
            return None
    instead = f" (instead of {describe(other, nodes)})" if other is not None else ""
    return _because(best, nodes, why + instead)


def _better(
    spread: Placement, dedicated: Placement, nodes: Sequence[Node], groups: int
) -> tuple[Placement, Placement, str]:
    """The better of two, the other, and why."""
    if len(spread.workers) != len(dedicated.workers):
        more, fewer = sorted((spread, dedicated), key=lambda placed: -len(placed.workers))
        return more, fewer, "since more workers fit"
    times = [round_length(placed, nodes, groups) for placed in (spread, dedicated)]
    why = "since a round takes {:.3g} times as long on the busiest link the other way"
    if times[1] < times[0] * (1 - SAME):
        return dedicated, spread, why.format(times[0] / times[1])
    if not times[0]:
        return spread, dedicated, "since nothing leaves a node"
    return spread, dedicated, why.format(times[1] / times[0])


def _because(placed: Placement, nodes: Sequence[Node], why: str) -> Placement:
    return replace(placed, reason=f"{describe(placed, nodes)}, {why}")


# --- the ways --------------------------------------------------------------------------------------


def _spread(wanted: Demand, nodes: Sequence[Node]) -> Placement | None:
    hosts = [node for node in _freest_first(nodes) if not node.server]
    if wanted.shards is not None and _deal(wanted.shards, wanted.shard, hosts) is None:
        return None

    def shards(workers: Sequence[str]) -> tuple[str, ...] | None:
        counts = Counter(workers)
        homes = [node.without(wanted.worker * counts[node.id]) for node in hosts if counts[node.id]]
        return _deal(len(homes) if wanted.shards is None else wanted.shards, wanted.shard, homes)

    beside = wanted.shard if wanted.shards is None else Resources()
    return _most("spread", wanted, hosts, _rooms(wanted, hosts, beside), shards)


def _dedicated(wanted: Demand, nodes: Sequence[Node]) -> Placement | None:
    """Labelled server nodes are for shards alone; without any, one node is kept free, and others may be left over."""
    order = _freest_first(nodes)
    servers = [node for node in order if node.server]
    if servers:
        hosts = [node for node in order if not node.server]
    else:
        # Workers take the lean nodes, so that the fat ones are left to the shards.
        kept = _kept_free(wanted, order)
        hosts = [node for node in reversed(order) if node is not kept]

    def shards(workers: Sequence[str]) -> tuple[str, ...] | None:
        homes = servers or [node for node in order if node.id not in workers]
        homes = [node for node in homes if node.available.holds(wanted.shard)]
        # Between links of one rate, more server nodes than worker nodes shorten no round.
        return _deal(wanted.shards or min(len(homes), len(set(workers))), wanted.shard, homes)

    if not hosts or shards([hosts[0].id]) is None:
        return None
    return _most("dedicated", wanted, hosts, _rooms(wanted, hosts), shards)


def _packed(wanted: Demand, nodes: Sequence[Node]) -> Placement | None:
    """Shards first, each where it costs the fewest workers; the result may have no workers."""
    left = {node.id: node for node in _freest_first(nodes)}
    homes: list[str] = []
    for _ in range(wanted.shards or 1):
        able = [node for node in left.values() if node.available.holds(wanted.shard)]
        if not able:
            return None
        best = min(able, key=lambda node: _workers_lost(wanted, node))
        left[best.id] = best.without(wanted.shard)
        homes.append(best.id)
    hosts = [node for node in left.values() if not node.server]
    rooms = _rooms(wanted, hosts)
    workers = _balanced(min(wanted.workers, sum(rooms)), hosts, rooms)
    return Placement("packed", workers, tuple(homes))


# --- helpers ---------------------------------------------------------------------------------------


def _most(
    choice: Choice,
    wanted: Demand,
    hosts: Sequence[Node],
    rooms: Sequence[int],
    shards: Callable[[Sequence[str]], tuple[str, ...] | None],
) -> Placement | None:
    """The placement with the most workers beside which the shards fit."""
    for count in range(min(wanted.workers, sum(rooms)), wanted.least - 1, -1):
        workers = _balanced(count, hosts, rooms)
        homes = shards(workers)
        if homes is not None:
            return Placement(choice, workers, homes)
    return None


def _balanced(count: int, hosts: Sequence[Node], rooms: Sequence[int]) -> tuple[str, ...]:
    """A node for each worker: one to each node in turn, as long as there is room."""
    dealt: list[str] = []
    turn = 0
    while len(dealt) < count:
        dealt += [host.id for host, room in zip(hosts, rooms, strict=True) if room > turn][
            : count - len(dealt)
        ]
        turn += 1
    return tuple(dealt)


def _deal(count: int, each: Resources, homes: Sequence[Node]) -> tuple[str, ...] | None:
    """The same for shards; None where not all fit."""
    rooms = [node.available.capacity(each, count) for node in homes]
    return _balanced(count, homes, rooms) if homes and sum(rooms) >= count else None


def _rooms(wanted: Demand, hosts: Sequence[Node], beside: Resources | None = None) -> list[int]:
    """How many workers each node holds, ``beside`` what else has to fit."""
    kept = beside or Resources()
    return [
        (node.available - kept).capacity(wanted.worker, wanted.workers) if node.available.holds(kept) else 0
        for node in hosts
    ]


def _kept_free(wanted: Demand, order: Sequence[Node]) -> Node | None:
    """The node that costs the fewest workers if it holds nothing but shards; the first in order of several."""
    rooms = _rooms(wanted, order)
    able = [pair for pair in zip(order, rooms, strict=True) if pair[0].available.holds(wanted.shard)]
    best = max(able, key=lambda pair: min(sum(rooms) - pair[1], wanted.workers), default=None)
    return best[0] if best is not None else None


def _workers_lost(wanted: Demand, node: Node) -> int:
    if node.server:
        return 0
    before, after = _rooms(wanted, [node, node.without(wanted.shard)])
    return before - after


def _freest_first(nodes: Sequence[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: (-node.available.cpus, -node.available.gpus, node.id))
