"""What nodes have and what a job takes, as plain amounts; a process lies on one node, so all is counted node by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cadenza.spec import JobSpec, PlacementChoice

Choice = Literal["spread", "dedicated", "packed"]
"""How a placement came about; the last is auto's alone."""

TOLERANCE = 1e-6
"""Ray counts resources in steps of 1e-4; sums of floats are off by far less than this."""

ROLE_LABEL = "cadenza.io/role"
"""A node whose label of this name is ``server`` takes shards and no workers."""

RATE_LABEL = "cadenza.io/link-mbit-s"
"""The rate of a node's link, each way, in Mbit/s."""


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
        return self.cpus + TOLERANCE >= other.cpus and self.gpus + TOLERANCE >= other.gpus

    def capacity(self, each: Resources, limit: int) -> int:
        """How many times ``each`` fits into this, at most ``limit``."""
        fits = limit
        for has, needs in ((self.cpus, each.cpus), (self.gpus, each.gpus)):
            if needs > TOLERANCE:
                fits = min(fits, int((has + TOLERANCE) / needs))
        return fits

    @property
    def nothing(self) -> bool:
        return self.cpus <= TOLERANCE and self.gpus <= TOLERANCE

    def __str__(self) -> str:
        parts = [
            f"{amount:g} {unit}"
            for amount, unit in ((self.cpus, "CPU"), (self.gpus, "GPU"))
            if amount > TOLERANCE
        ]
        return " and ".join(parts) or "0 CPU"


@dataclass(frozen=True)
class Node:
    """One living node."""

    id: str
    total: Resources
    """Everything it has."""
    available: Resources
    """What nobody has taken."""
    address: str = ""
    """Its IP address, for people."""
    server: bool = False
    """Labelled for shards: it takes no workers."""
    rate_mbit_s: float | None = None
    """Its link's rate each way; None: nobody said."""

    def without(self, taken: Resources) -> Node:
        """The node after ``taken`` was given away."""
        return replace(self, available=self.available - taken)

    def emptied(self) -> Node:
        """The node as if all had ended that runs on it."""
        return replace(self, available=self.total)


def rate_of(label: str) -> float:
    """The Mbit/s that a node's rate label tells. Raises ValueError naming the label and what it must be."""
    try:
        rate_mbit_s = float(label)
    except ValueError:
        rate_mbit_s = 0.0
    if not 0 < rate_mbit_s < float("inf"):
        raise ValueError(f"node label {RATE_LABEL} is {label!r}; give the link's Mbit/s, a number above 0")
    return rate_mbit_s


@dataclass(frozen=True)
class Demand:
    """A job's processes that take resources."""

    workers: int
    """At most so many; a placement may have fewer."""
    worker: Resources
    shards: int | None
    """None: the placement decides."""
    shard: Resources
    placement: PlacementChoice = "auto"
    least: int = 1
    """With fewer workers the job does not start."""

    @property
    def sum(self) -> Resources:
        """What the processes take together, with one shard where their number is open."""
        return self.worker * self.workers + self.shard * (self.shards or 1)

    def __str__(self) -> str:
        parts = [_counted(self.workers, "worker", self.worker)]
        if not self.shard.nothing:
            parts.append(_counted(self.shards or 1, "shard", self.shard))
        return " and ".join(parts)


@dataclass(frozen=True)
class Placement:
    """Where each process lies; the same inputs always give the same placement, in whatever order the nodes come."""

    choice: Choice
    workers: tuple[str, ...]
    """A node id per worker, in the order of their numbers."""
    shards: tuple[str, ...]
    """The same for shards."""
    reason: str = ""
    """Why, with the numbers that decided."""


def demand(spec: JobSpec, workers: int | None = None) -> Demand:
    """What ``spec`` takes with ``workers`` workers, by default its minimum."""
    return Demand(
        workers=spec.workers.min if workers is None else workers,
        worker=Resources(spec.workers.cpus, spec.workers.gpus),
        shards=spec.servers.count,
        shard=Resources(spec.servers.cpus),
        placement=spec.servers.placement,
        least=spec.workers.min,
    )


def load(wanted: Demand, placed: Placement) -> dict[str, Resources]:
    """What the placement takes of each node, by id."""
    taken: dict[str, Resources] = {}
    for each, places in ((wanted.worker, placed.workers), (wanted.shard, placed.shards)):
        for node_id, count in Counter(places).items():
            taken[node_id] = taken.get(node_id, Resources()) + each * count
    return taken


def subtract(load: Mapping[str, Resources], nodes: Sequence[Node]) -> list[Node]:
    """The nodes after ``load``, by node id, was given away."""
    return [node.without(load.get(node.id, Resources())) for node in nodes]


def _counted(count: int, what: str, each: Resources) -> str:
    plural = "s" if count != 1 else ""
    return f"{count} {what}{plural} of {each}" + (" each" if count != 1 else "")
