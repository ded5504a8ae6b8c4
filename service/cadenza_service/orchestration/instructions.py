"""What happens to a job's processes, and what the supervisor does about it, as plain data.

Events are named in the past tense, instructions as commands; an outcome is how an attempt ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cadenza_service.snapshot import Failure, JobSnapshot

SUPERVISOR = "supervisor"
COORDINATOR = "coordinator"
"""Their names among their job's actors."""

Address: TypeAlias = tuple[str, int]
"""Host and port."""


def worker_part(worker: int) -> str:
    """The name of a worker among its job's actors."""
    return f"worker:{worker}"


def shard_part(shard: int) -> str:
    """The name of a shard among its job's actors."""
    return f"shard:{shard}"


# --- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActorStarted:
    """An actor's process is up; a shard tells its address."""

    part: str
    address: Address | None = None


@dataclass(frozen=True)
class ActorLost:
    """An actor's process is gone, or never came up."""

    part: str
    why: str
    kind: str = ""
    """A failure kind that says more than that it is gone, such as ``runtime_env``."""


@dataclass(frozen=True)
class ActorRefused:
    """An actor could not be made on its node, which is gone."""

    part: str


@dataclass(frozen=True)
class CoordinatorOpened:
    """The coordinator is connected to all shards, and listens for workers."""


@dataclass(frozen=True)
class OpeningFailed:
    """The coordinator could not reach the shards."""

    why: str


@dataclass(frozen=True)
class WorkerEnded:
    """A worker's run came to its end, in whatever way; ``ran`` is false where it had never begun."""

    worker: int
    ran: bool = True


@dataclass(frozen=True)
class SnapshotTaken:
    """The coordinator answered a poll."""

    snapshot: JobSnapshot


@dataclass(frozen=True)
class SnapshotMissed:
    """The coordinator did not answer a poll."""


@dataclass(frozen=True)
class ReportAnswered:
    """The controller has the latest report; ``stop`` where this attempt is no longer wanted."""

    stop: bool


@dataclass(frozen=True)
class ReportMissed:
    """Nobody knows whether the controller has the latest report."""


@dataclass(frozen=True)
class ModelSaved:
    """The model and its manifest are written as checkpoint ``n``."""

    n: int
    size_bytes: int


@dataclass(frozen=True)
class SavingFailed:
    """The model could not be fetched or written."""

    why: str


Event: TypeAlias = (
    ActorStarted | ActorLost | ActorRefused | CoordinatorOpened | OpeningFailed | WorkerEnded | SnapshotTaken | SnapshotMissed
    | ReportAnswered | ReportMissed | ModelSaved | SavingFailed
)  # fmt: skip

# --- outcomes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Succeeded:
    """The model of checkpoint ``n`` is there."""

    n: int
    size_bytes: int


@dataclass(frozen=True)
class Failed:
    """The job failed."""

    failure: Failure


@dataclass(frozen=True)
class Unplaced:
    """The start took too long, or a node was gone; ``missing`` were not up."""

    missing: tuple[str, ...]
    waited_s: float
    node_gone: bool = False


@dataclass(frozen=True)
class Interrupted:
    """The supervisor was lost while it started the job; nothing was trained yet."""


Outcome: TypeAlias = Succeeded | Failed | Unplaced | Interrupted


@dataclass(frozen=True)
class Report:
    """What the controller gets to know; the last one has an outcome."""

    snapshot: JobSnapshot | None
    outcome: Outcome | None = None


# --- instructions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartActors:
    """Make the coordinator, then the shards, then the workers."""

    shards: int
    workers: int


@dataclass(frozen=True)
class OpenCoordinator:
    """Let the coordinator connect to the shards, in this order."""

    shards: tuple[Address, ...]


@dataclass(frozen=True)
class RunWorker:
    """Let a worker begin, and watch for its end."""

    worker: int


@dataclass(frozen=True)
class WatchWorker:
    """Watch for the end of a worker that may have begun before."""

    worker: int


@dataclass(frozen=True)
class TakeSnapshot:
    """Poll the coordinator for what came after these numbers, and tell it what it cannot see itself."""

    after_event: int
    after_log: int
    lost: Mapping[int, str]
    """Why, by worker."""
    failure: Failure | None
    """What must end the job."""


@dataclass(frozen=True)
class SaveModel:
    """Fetch the weights from the shards and write them."""

    round: int
    samples: int


@dataclass(frozen=True)
class SendReport:
    """Tell the controller."""

    report: Report


Instruction: TypeAlias = (
    StartActors | OpenCoordinator | RunWorker | WatchWorker | TakeSnapshot | SaveModel | SendReport
)  # fmt: skip
