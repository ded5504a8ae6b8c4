"""Whether a job can start now, with how many workers, and if not, what is missing.

A pure function of the job's demand and the nodes' resources. A worker or shard lies on one node, so
resources are counted node by node: two nodes with 2 free CPUs each hold no worker of 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cadenza.spec import JobSpec

_TOLERANCE = 1e-6
"""Ray counts resources in steps of 1e-4; sums of floats are off by far less than this."""


@dataclass(frozen=True)
class Resources:
    """An amount of what Ray hands out."""

    cpus: float = 0.0
    gpus: float = 0.0

    def __add__(self, other: Resources) -> Resources:
        return Resources(self.cpus + other.cpus, self.gpus + other.gpus)

    def __sub__(self, other: Resources) -> Resources:
        """What is left, never below nothing."""
        return Resources(max(self.cpus - other.cpus, 0.0), max(self.gpus - other.gpus, 0.0))

    def __mul__(self, count: int) -> Resources:
        return Resources(self.cpus * count, self.gpus * count)

    def holds(self, other: Resources) -> bool:
        """Whether ``other`` fits into this."""
        return self.cpus + _TOLERANCE >= other.cpus and self.gpus + _TOLERANCE >= other.gpus

    @property
    def nothing(self) -> bool:
        return self.cpus <= _TOLERANCE and self.gpus <= _TOLERANCE

    def __str__(self) -> str:
        parts = [
            f"{amount:g} {unit}"
            for amount, unit in ((self.cpus, "CPU"), (self.gpus, "GPU"))
            if amount > _TOLERANCE
        ]
        return " and ".join(parts) or "0 CPU"


@dataclass(frozen=True)
class Node:
    """One living node: everything it has, and what nobody has taken."""

    total: Resources
    available: Resources


@dataclass(frozen=True)
class Demand:
    """A job's processes that take resources."""

    workers: int
    worker: Resources
    shards: int
    shard: Resources

    @property
    def sum(self) -> Resources:
        return self.worker * self.workers + self.shard * self.shards

    def __str__(self) -> str:
        parts = [_counted(self.workers, "worker", self.worker)]
        if not self.shard.nothing:
            parts.append(_counted(self.shards, "shard", self.shard))
        return " and ".join(parts)


@dataclass(frozen=True)
class Admit:
    """Start now with this many workers."""

    workers: int


@dataclass(frozen=True)
class Wait:
    """The cluster can hold the job, but others have what it needs at the moment."""

    reason: str


@dataclass(frozen=True)
class Unschedulable:
    """The cluster as it is can never hold the job."""

    reason: str


Admission = Admit | Wait | Unschedulable


def demand(spec: JobSpec, workers: int | None = None) -> Demand:
    """What ``spec`` takes with ``workers`` workers, by default its minimum."""
    return Demand(
        workers=spec.workers.min if workers is None else workers,
        worker=Resources(spec.workers.cpus, spec.workers.gpus),
        shards=spec.servers.count,
        shard=Resources(spec.servers.cpus),
    )


def admit(spec: JobSpec, nodes: Sequence[Node]) -> Admission:
    """Decide on one waiting job: as many workers as fit now, between its bounds."""
    least = demand(spec)
    most = fitting(demand(spec, spec.workers.most), [node.available for node in nodes])
    if most >= least.workers:
        return Admit(most)
    totals = [node.total for node in nodes]
    possible = fitting(least, totals)
    if possible < least.workers:
        return Unschedulable(_shortage(least, totals, possible, "has"))
    return Wait(_shortage(least, [node.available for node in nodes], most, "has free"))


def fitting(wanted: Demand, nodes: Sequence[Resources]) -> int:
    """How many of the wanted workers fit on ``nodes`` beside all its shards; -1 if the shards do not fit."""
    left = place_shards(wanted, nodes)
    if left is None:
        return -1
    room = 0
    for node in left:
        room += _capacity(node, wanted.worker, wanted.workers - room)
    return room


def reserve(wanted: Demand, nodes: Sequence[Node]) -> list[Node]:
    """The nodes after ``wanted`` was promised away; what does not fit any more is not subtracted."""
    left = place_shards(wanted, [node.available for node in nodes])
    if left is None:
        left = [node.available for node in nodes]
    remaining = wanted.workers
    reserved: list[Node] = []
    for node, available in zip(nodes, left, strict=True):
        here = _capacity(available, wanted.worker, remaining)
        remaining -= here
        reserved.append(Node(node.total, available - wanted.worker * here))
    return reserved


def place_shards(wanted: Demand, nodes: Sequence[Resources]) -> list[Resources] | None:
    """What the shards leave of each node, each shard put where it costs the fewest workers; None if they do not fit."""
    left = list(nodes)
    if wanted.shard.nothing:
        return left if left else None
    for _ in range(wanted.shards):
        candidates = [index for index, node in enumerate(left) if node.holds(wanted.shard)]
        if not candidates:
            return None
        best = min(candidates, key=lambda index: _workers_lost(left[index], wanted))
        left[best] = left[best] - wanted.shard
    return left


def _workers_lost(node: Resources, wanted: Demand) -> int:
    before = _capacity(node, wanted.worker, wanted.workers)
    return before - _capacity(node - wanted.shard, wanted.worker, wanted.workers)


def _capacity(node: Resources, worker: Resources, limit: int) -> int:
    """How many workers of one kind a node holds, at most ``limit``."""
    fits = limit
    for has, needs in ((node.cpus, worker.cpus), (node.gpus, worker.gpus)):
        if needs > _TOLERANCE:
            fits = min(fits, int((has + _TOLERANCE) / needs))
    return fits


def _counted(count: int, what: str, each: Resources) -> str:
    plural = "s" if count != 1 else ""
    return f"{count} {what}{plural} of {each}" + (" each" if count != 1 else "")


def _shortage(wanted: Demand, nodes: Sequence[Resources], fits: int, has: str) -> str:
    """Needed, there, and missing, in one sentence."""
    there = sum(nodes, Resources())
    start = f"needs {wanted.sum} for {wanted}; the cluster {has} {there}"
    missing = wanted.sum - there
    if not missing.nothing:
        return f"{start}; missing {missing}"
    largest = max(nodes, key=lambda node: (node.gpus, node.cpus), default=Resources())
    placed = "not all shards" if fits < 0 else f"only {fits} of {wanted.workers} workers"
    return f"{start} on {len(nodes)} nodes, at most {largest} on one, where {placed} fit; missing a node with more room"
