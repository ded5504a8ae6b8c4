"""Whether a job can start now, where, with how many workers, and if not, what is missing.

A pure function of the job's demand and the nodes' resources: what is admitted has been placed
(:mod:`cadenza_service.orchestration.placement`), so that nothing is counted in two ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cadenza.spec import JobSpec
from cadenza_service.coordination import terms
from cadenza_service.orchestration.link_loads import counted
from cadenza_service.orchestration.placement import fitting, place
from cadenza_service.orchestration.resources import ROLE_LABEL, Demand, Node, Placement, Resources, demand


@dataclass(frozen=True)
class Admit:
    """Start now, in these places."""

    placement: Placement


@dataclass(frozen=True)
class Wait:
    """The cluster can hold the job, but others have what it needs at the moment."""

    reason: str


@dataclass(frozen=True)
class Unschedulable:
    """The cluster as it is can never hold the job."""

    reason: str


Admission = Admit | Wait | Unschedulable


def admit(spec: JobSpec, nodes: Sequence[Node]) -> Admission:
    """Decide on one waiting job: as many workers as fit now, between its bounds."""
    now = place(demand(spec, spec.workers.most), nodes, terms.groups(spec, dedicated=True))
    if now is not None:
        return Admit(now)
    least = demand(spec)
    empty = [node.emptied() for node in nodes]
    if place(least, empty) is None:
        return Unschedulable(_shortage(least, empty, "has"))
    return Wait(_shortage(least, nodes, "has free"))


def _shortage(wanted: Demand, nodes: Sequence[Node], has: str) -> str:
    """Needed, there, and missing, in one sentence."""
    there = sum((node.available for node in nodes), Resources())
    start = f"needs {wanted.sum} for {wanted}; the cluster {has} {there}"
    missing = wanted.sum - there
    if not missing.nothing:
        return f"{start}; missing {missing}"
    if place(replace(wanted, placement="auto"), nodes) is not None:
        return _wrong_places(wanted, nodes)
    largest = max(
        (node.available for node in nodes), key=lambda most: (most.gpus, most.cpus), default=Resources()
    )
    fits = fitting(wanted, nodes)
    placed = "not all shards" if fits < 0 else f"only {fits} of {wanted.workers} workers"
    return (
        f"{start} on {len(nodes)} nodes{_servers(nodes)}, at most {largest} on one, where {placed} fit; "
        "missing a node with more room"
    )


def _wrong_places(wanted: Demand, nodes: Sequence[Node]) -> str:
    """All would fit, but not where ``servers.placement`` wants the shards."""
    where = f"servers.placement is {wanted.placement}, and {wanted} fit on {counted(len(nodes), 'node')}, but"
    if wanted.placement == "spread":
        return f"{where} with no room for the shards beside workers; missing room for a shard on each worker's node"
    servers = sum(node.server for node in nodes)
    if servers:
        return f"{where} the shards not on the {counted(servers, 'node')} labelled {ROLE_LABEL}=server; missing room there"
    return f"{where} the workers need every node that shards could have; missing a node without workers"


def _servers(nodes: Sequence[Node]) -> str:
    servers = sum(node.server for node in nodes)
    return f" ({servers} of them take shards only)" if servers else ""
