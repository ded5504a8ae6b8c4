"""The controller: one actor that makes the cluster follow the job store.

A loop compares what users want with what runs (:mod:`cadenza_service.orchestration.reconcile`) and acts on the difference;
supervisors report to it how their jobs fare. Beside the API's processes it alone opens the database.
"""

from __future__ import annotations

import logging
import secrets
import threading
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.jobs.records import Reason
from cadenza_service.jobs.storage import Storage
from cadenza_service.jobs.store import Store
from cadenza_service.orchestration import cluster
from cadenza_service.orchestration.actors import Attempt
from cadenza_service.orchestration.cluster import CONTROLLER, NAMESPACE, actor_name
from cadenza_service.orchestration.instructions import SUPERVISOR, Report
from cadenza_service.orchestration.link_loads import placed_data
from cadenza_service.orchestration.outcomes import Verdict, take
from cadenza_service.orchestration.reconcile import Action, Cancel, Explain, Recover, Remove, Start, plan
from cadenza_service.orchestration.resources import Node, Resources
from cadenza_service.orchestration.supervisor import Supervisor
from cadenza_service.settings import Settings
from cadenza_service.snapshot import Severity

PASS_INTERVAL_S = 0.5
READY_TIMEOUT_S = 120.0
KEY_SIZE_BYTES = 32

THREADS = 16
"""Supervisors that may report at the same time; the database lets one write after another."""

logger = logging.getLogger(__name__)


class Controller:
    """The controller's process."""

    def __init__(self, settings: Settings) -> None:
        logging.basicConfig(level=settings.log_level)
        self._settings = settings
        self._store = Store.open(settings)
        self._storage = Storage(settings.storage_path)
        self._lock = threading.RLock()
        self._poked = threading.Event()
        self._promised: dict[str, dict[str, Resources]] = {}
        """What jobs in STARTING were promised, by node id."""
        self._nodes: list[Node] = []
        """The cluster as the latest pass saw it."""
        self._troubles: dict[str, str] = {}
        """The latest error of each job's reconciliation, told once."""
        threading.Thread(target=self._loop, name="reconcile", daemon=True).start()

    def ready(self) -> None:
        """Answers once the process is up."""

    def poke(self) -> None:
        """Look at the jobs now instead of at the next pass."""
        self._poked.set()

    def report(self, job_id: str, epoch: int, report: Report) -> bool:
        """Store what a supervisor tells; whether it should stop, because its attempt is not wanted any more."""
        with self._lock:
            verdict = take(self._store, job_id, epoch, report)
            if verdict is Verdict.OVER:
                self._remove(job_id, cluster.job_actors().get(job_id, set()))
            return verdict is not Verdict.GO_ON

    # --- the loop ---

    def _loop(self) -> None:
        while True:
            try:
                self._pass()
            except Exception:
                # Ray or the database may be out of reach for a moment; the next pass looks at everything again.
                logger.exception("a pass over the jobs failed")
            self._poked.wait(PASS_INTERVAL_S)
            self._poked.clear()

    def _pass(self) -> None:
        actors = cluster.job_actors()
        with self._lock:
            jobs = self._store.unfinished()
            starting = {job.id for job in jobs if job.state is JobState.STARTING}
            self._promised = {job_id: taken for job_id, taken in self._promised.items() if job_id in starting}
            self._nodes = cluster.nodes()
            for action in plan(jobs, actors, self._nodes, self._promised):
                self._try(action)
            self._store.heartbeat()

    def _try(self, action: Action) -> None:
        """Carry an action out; an error in one job stops no other."""
        job_id = action.job_id if isinstance(action, Remove) else action.job.id
        try:
            self._carry_out(action)
        except Exception as error:
            text = f"{type(action).__name__.lower()}: {type(error).__name__}: {error}"
            if self._troubles.get(job_id) != text:
                logger.exception("job %s: %s failed", job_id, type(action).__name__)
                self._troubles[job_id] = text
                if not isinstance(action, Remove):
                    self._store.add_event(job_id, "controller_error", f"{text}; it is tried again", "error")
        else:
            self._troubles.pop(job_id, None)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Explain(job, state, reason):
                if job.state is state:
                    self._store.explain(job.id, reason)
                else:
                    self._move(job.id, state, reason)
            case Recover(job):
                text = "the service was left while the job ran and has started again; the job starts again from the beginning"
                self._move(
                    job.id, JobState.RECOVERING, Reason(code="service_restarted", message=text), "warning"
                )
            case Cancel(job):
                self._storage.remove_leftovers(job.id)
                self._move(
                    job.id,
                    JobState.CANCELLED,
                    Reason(code="cancelled_by_user", message="a user cancelled it"),
                )
            case Remove(job_id, parts):
                self._remove(job_id, set(parts))

    def _move(self, job_id: str, state: JobState, reason: Reason, severity: Severity = "info") -> None:
        self._store.move(job_id, state, reason, message=reason.message, severity=severity)

    def _start(self, start: Start) -> None:
        job, placement = start.job, start.placement
        epoch = self._store.begin_attempt(job.id)
        text = f"starting {len(placement.workers)} workers and {len(placement.shards)} parameter servers"
        self._move(job.id, JobState.STARTING, Reason(code="starting", message=text))
        told = placed_data(job.spec.servers.placement, placement, self._nodes)
        self._store.add_event(job.id, "placed", placement.reason, data=told)
        self._promised[job.id] = start.taken
        attempt = Attempt(
            job_id=job.id,
            epoch=epoch,
            key=secrets.token_bytes(KEY_SIZE_BYTES),
            spec=job.spec,
            placement=placement,
            storage=self._settings.storage,
            start_timeout_s=self._settings.start_timeout_s,
            join_timeout_s=self._settings.join_timeout_s,
            round_timeout_s=self._settings.round_timeout_s,
            congestion_control=self._settings.congestion_control.value,
        )
        _actor(Supervisor, actor_name(job.id, SUPERVISOR)).remote(attempt)

    def _remove(self, job_id: str, parts: set[str]) -> None:
        cluster.remove(job_id, parts)
        self._storage.remove_leftovers(job_id)


def start_controller(settings: Settings) -> Any:
    """Make the controller's actor, or find the one that runs, and wait until it answers.

    It and the supervisors that it makes stay on this node, where the database and the storage folder are.

    Raises:
        ray.exceptions.RayError: it did not come up in time.
    """
    # The token is for the API alone, and an actor's arguments are kept in Ray's tables.
    arguments = settings.model_copy(update={"token": None})
    handle = _actor(Controller, CONTROLLER, get_if_exists=True, max_concurrency=THREADS).remote(arguments)
    ray.get(handle.ready.remote(), timeout=READY_TIMEOUT_S)
    return handle


def _actor(kind: type, name: str, **options: Any) -> Any:
    """An actor that Ray restarts whenever it is lost, on this node."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(kind).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        scheduling_strategy=here,
        **options,
    )
