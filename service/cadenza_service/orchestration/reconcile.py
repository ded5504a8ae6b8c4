"""What the controller does in one pass: a pure function from what should be and what is.

Level-triggered: nothing is remembered between passes, so an action that failed, or a controller that was
restarted in the middle, is simply looked at again.

    an ended or unknown job has actors              remove them
    a job is to be cancelled                        remove its actors; once there are none, it is CANCELLED
    a waiting job has actors (of an earlier attempt) remove them, look again in the next pass
    a waiting job fits                              start it
    a waiting job does not fit                      say why
    a job was started, but has no supervisor        it is RECOVERING, and from then on waits like others
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from cadenza_service.jobs.lifecycle import WAITING, JobState
from cadenza_service.jobs.records import Job, Reason
from cadenza_service.orchestration.admission import Admit, Unschedulable, Wait, admit
from cadenza_service.orchestration.instructions import SUPERVISOR
from cadenza_service.orchestration.placement import set_aside
from cadenza_service.orchestration.resources import Node, Placement, Resources, demand, load, subtract


@dataclass(frozen=True)
class Start:
    """Begin an attempt with its processes in these places."""

    job: Job
    placement: Placement

    @property
    def taken(self) -> dict[str, Resources]:
        """What it takes of each node, by node id."""
        return load(demand(self.job.spec), self.placement)


@dataclass(frozen=True)
class Explain:
    """The job waits in this state, for this reason."""

    job: Job
    state: JobState
    reason: Reason


@dataclass(frozen=True)
class Recover:
    """The job's processes are gone with its supervisor; it starts again."""

    job: Job


@dataclass(frozen=True)
class Cancel:
    """Nothing is left of the job: it is cancelled."""

    job: Job


@dataclass(frozen=True)
class Remove:
    """End these actors."""

    job_id: str
    parts: frozenset[str]


Action: TypeAlias = Start | Explain | Recover | Cancel | Remove


def plan(
    jobs: Sequence[Job],
    actors: Mapping[str, Set[str]],
    nodes: Sequence[Node],
    promised: Mapping[str, Mapping[str, Resources]],
) -> list[Action]:
    """The actions of one pass.

    Args:
        jobs: all that have not ended, oldest first.
        actors: the parts that exist, by job id; read before the jobs, so that no job's actors are taken for strays.
        nodes: the cluster.
        promised: what jobs that are still starting will take, by job id and node id; Ray may not count all of it yet.
    """
    known = {job.id for job in jobs}
    actions: list[Action] = [
        Remove(job_id, frozenset(parts)) for job_id, parts in actors.items() if job_id not in known
    ]
    for taken in promised.values():
        nodes = subtract(taken, nodes)
    for job in jobs:
        steps, nodes = _look_at(job, frozenset(actors.get(job.id, ())), nodes)
        actions += steps
    return actions


def _look_at(job: Job, parts: frozenset[str], nodes: Sequence[Node]) -> tuple[list[Action], Sequence[Node]]:
    if job.desired == "cancelled":
        return [Remove(job.id, parts) if parts else Cancel(job)], nodes
    if SUPERVISOR in parts and job.state not in WAITING:
        return [], nodes
    if job.state in (JobState.STARTING, JobState.RUNNING):
        return [Recover(job)], nodes
    if parts:
        return [Remove(job.id, parts)], nodes
    return _admit(job, nodes)


def _admit(job: Job, nodes: Sequence[Node]) -> tuple[list[Action], Sequence[Node]]:
    match admit(job.spec, nodes):
        case Admit(placement):
            start = Start(job, placement)
            return [start], subtract(start.taken, nodes)
        case Wait(text):
            reason = Reason(
                code="waiting_for_resources",
                message=text,
                remedy="it starts by itself once others have ended",
            )
            # What is free now is kept for it, or smaller jobs that came later would starve it.
            return [Explain(job, JobState.QUEUED, reason)], set_aside(demand(job.spec), nodes)
        case Unschedulable(text):
            reason = Reason(
                code="unschedulable",
                message=text,
                remedy="ask for less (workers.min, workers.cpus, workers.gpus, servers.cpus, servers.placement) or add "
                "nodes; it starts by itself once they are there",
            )
            state = JobState.QUEUED if job.state is JobState.RECOVERING else JobState.UNSCHEDULABLE
            return [Explain(job, state, reason)], nodes
