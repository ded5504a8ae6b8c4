"""What a placement costs on the network: the load of each link in a round, as a function of who lies where.

A contribution goes to every shard in equal parts and an answer comes back in the same parts, so in a round of n
workers and S shards a node with w workers and s shards moves

    P · (w·(S − s) + s·(n − w)) / S    bytes each way,

P being the bytes of the model as sent. With one worker and one shard on each of K nodes that is 2P(K − 1)/K, what a
ring all-reduce moves; with dedicated shards it is P per worker on the workers' links and nP/S on a server's.

Beside the workers, pushes and answers use both directions of a link in either half of a round. With dedicated shards a
push uses one direction and its answer the other, and an answer waits for its commit: a round of G commit groups takes
(1 + 1/G) times what the bytes one way take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cadenza.spec import PlacementChoice
from cadenza_service.coordination.terms import DEDICATED_GROUPS
from cadenza_service.orchestration.resources import Node, Placement

COMMIT_GROUPS = DEDICATED_GROUPS
"""In how many groups, one after another, a round is answered where shards have nodes of their own."""


def link_loads(placed: Placement) -> dict[str, float]:
    """What each node's link carries each way in a round, in multiples of the model's bytes, by node id."""
    workers, shards = Counter(placed.workers), Counter(placed.shards)
    n, s = len(placed.workers), len(placed.shards)
    return {
        node_id: (workers[node_id] * (s - shards[node_id]) + shards[node_id] * (n - workers[node_id])) / s
        for node_id in sorted(workers | shards)
    }


def describe(placed: Placement, nodes: Sequence[Node]) -> str:
    """The placement in a sentence: how many of what on how many nodes, and the busiest links."""
    hosts, homes = set(placed.workers), set(placed.shards)
    carried = link_loads(placed)
    text = (
        f"{placed.choice}: {counted(len(placed.workers), 'worker')} on {len(hosts)} of {counted(len(nodes), 'node')}, "
        f"{counted(len(placed.shards), 'shard')} on {len(homes)}; "
        f"{max(carried[node_id] for node_id in hosts):.3g} × the model each way on a worker's link in a round"
    )
    servers = homes - hosts
    if servers:
        text += f", {max(carried[node_id] for node_id in servers):.3g} × on a server's"
    return text


def round_length(placed: Placement, nodes: Sequence[Node], groups: int) -> float:
    """How long the busiest link takes for a round of so many commit groups, in model sizes ÷ Mbit/s.

    A server node without a rate is taken to be fast enough: it is labelled because its link is. Any other is
    taken to be as slow as the slowest that is known, or 1 Mbit/s, since only ratios count.
    """
    known = [node.rate_mbit_s for node in nodes if node.rate_mbit_s is not None]
    rates = {
        node.id: node.rate_mbit_s or (float("inf") if node.server else min(known, default=1.0))
        for node in nodes
    }
    one_way = max(carried / rates[node_id] for node_id, carried in link_loads(placed).items())
    return one_way * (1 + 1 / groups) if placed.choice == "dedicated" else one_way


def placed_data(asked: PlacementChoice, placed: Placement, nodes: Sequence[Node]) -> dict[str, Any]:
    """The placement as an event's data: the node of each worker and shard, their addresses, and their links' loads."""
    carried = link_loads(placed)
    addresses = {node.id: node.address for node in nodes}
    return {
        "asked": asked,
        "chosen": placed.choice,
        "workers": list(placed.workers),
        "shards": list(placed.shards),
        "nodes": {
            node_id: {"address": addresses[node_id], "models_each_way": round(times, 6)}
            for node_id, times in carried.items()
        },
    }


def counted(count: int, what: str) -> str:
    """Such as ``2 nodes``."""
    return f"{count} {what}" + ("s" if count != 1 else "")
