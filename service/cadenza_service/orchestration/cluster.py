"""What Ray knows of the cluster, in our own terms: nodes with their resources, and the actors of each job."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray._private import state

from cadenza_service.orchestration.instructions import SUPERVISOR
from cadenza_service.orchestration.resources import RATE_LABEL, ROLE_LABEL, Node, Resources, rate_of

NAMESPACE = "cadenza"
"""Where all our actors are named."""

CONTROLLER = "cadenza-controller"
"""The controller's name."""

_PREFIX = "cadenza:"

logger = logging.getLogger(__name__)


def nodes() -> list[Node]:
    """The living nodes."""
    available = state.available_resources_per_node()
    return [
        Node(
            node["NodeID"],
            _resources(node["Resources"]),
            _resources(available.get(node["NodeID"], {})),
            address=node["NodeManagerAddress"],
            server=node["Labels"].get(ROLE_LABEL) == "server",
            rate_mbit_s=_rate(node["NodeManagerAddress"], node["Labels"].get(RATE_LABEL)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def actor_name(job_id: str, part: str) -> str:
    """The name of one of a job's actors; ``part`` is such as ``worker:0``."""
    return f"{_PREFIX}{job_id}:{part}"


def job_actors() -> dict[str, set[str]]:
    """The parts that exist of each job, by job id."""
    found: dict[str, set[str]] = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(_PREFIX):
            job_id, _, part = entry["name"].removeprefix(_PREFIX).partition(":")
            found.setdefault(job_id, set()).add(part)
    return found


def find(job_id: str, part: str) -> Any | None:
    """The handle of one of a job's actors, or None where it does not exist (any more)."""
    try:
        return ray.get_actor(actor_name(job_id, part), namespace=NAMESPACE)
    except ValueError:
        return None


def restarts() -> int:
    """How often Ray has restarted the actor that asks."""
    return int(state.actors(actor_id=ray.get_runtime_context().get_actor_id())["NumRestarts"])


def remove(job_id: str, parts: set[str]) -> None:
    """End these actors of a job for good, the supervisor first, so that it takes no end for a loss."""
    for part in sorted(parts, key=lambda part: part != SUPERVISOR):
        actor = find(job_id, part)
        if actor is not None:
            ray.kill(actor, no_restart=True)


def _resources(amounts: Mapping[str, float]) -> Resources:
    return Resources(amounts.get("CPU", 0.0), amounts.get("GPU", 0.0))


@functools.cache
def _rate(address: str, label: str | None) -> float | None:
    """The rate that a node's label tells. One that tells none is as good as none, and is logged once."""
    if label is None:
        return None
    try:
        return rate_of(label)
    except ValueError as error:
        logger.warning("node %s: %s", address, error)
        return None
