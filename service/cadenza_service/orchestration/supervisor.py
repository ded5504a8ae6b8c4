"""The supervisor of a job: a loop round the decisions of :mod:`supervision`, which a :class:`Crew` carries out.

One thread does everything but saving the model. Where Ray restarts the process, the constructor runs again
and takes up what it finds.
"""

from __future__ import annotations

import logging
import threading
import time

import ray
from ray.exceptions import RayError

from cadenza_service.orchestration import cluster
from cadenza_service.orchestration.actors import Attempt
from cadenza_service.orchestration.calls import Calls, why
from cadenza_service.orchestration.cluster import CONTROLLER, NAMESPACE
from cadenza_service.orchestration.crew import Crew
from cadenza_service.orchestration.instructions import (
    Event,
    Instruction,
    OpenCoordinator,
    Report,
    ReportAnswered,
    ReportMissed,
    RunWorker,
    SaveModel,
    SavingFailed,
    SendReport,
    StartActors,
    TakeSnapshot,
    WatchWorker,
)
from cadenza_service.orchestration.supervision import Stage, Supervision
from cadenza_service.snapshot import Failure

TICK_S = 0.1

REPORT_TIMEOUT_S = 30.0
"""The controller writes to a database, which may be busy; a report is sent again after this."""

logger = logging.getLogger(__name__)


class Supervisor:
    """One attempt's supervisor process."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._core = Supervision(
            shards=attempt.shards,
            workers=attempt.workers,
            start_timeout_s=attempt.start_timeout_s,
            now_s=time.monotonic(),
        )
        self._calls = Calls()
        self._crew = Crew(attempt, self._calls)
        threading.Thread(target=self._run, name="supervisor", daemon=True).start()

    def ready(self) -> None:
        """Answers once the process is up."""

    def _run(self) -> None:
        try:
            self._carry_out(self._first())
            self._loop()
        except Exception as error:
            # A supervisor that ended in silence would leave its job running for ever.
            logger.exception("the supervisor of %s failed", self._attempt.job_id)
            text = f"the job's supervisor failed: {type(error).__name__}: {error}"
            self._core.abandon(
                Failure(kind="internal", message=text, remedy="please report it, with the service's log")
            )
            self._loop()

    def _loop(self) -> None:
        while self._core.stage is not Stage.ENDED:
            for event in self._calls.wait(TICK_S):
                self._carry_out(self._core.handle(event, time.monotonic()))
            self._carry_out(self._core.tick(time.monotonic()))

    def _first(self) -> list[Instruction]:
        if not cluster.restarts():
            return self._core.begin(time.monotonic())
        found = self._crew.find()
        logger.info("the supervisor of %s is back and finds %s", self._attempt.job_id, found)
        return self._core.resume(found, time.monotonic())

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case StartActors(shards, workers):
                    self._crew.start(shards, workers)
                case OpenCoordinator(shards):
                    self._crew.open(shards)
                case RunWorker(worker):
                    self._crew.run_worker(worker)
                case WatchWorker(worker):
                    self._crew.watch_worker(worker)
                case TakeSnapshot():
                    self._crew.poll(instruction)
                case SaveModel():
                    threading.Thread(target=self._save, args=[instruction], name="save", daemon=True).start()
                case SendReport(report):
                    self._send(report)

    def _save(self, instruction: SaveModel) -> None:
        event: Event
        try:
            event = self._crew.save(instruction)
        except Exception as error:
            logger.exception("saving the model of %s failed", self._attempt.job_id)
            event = SavingFailed(f"{type(error).__name__}: {why(error)}")
        self._calls.tell(event)

    def _send(self, report: Report) -> None:
        def missed(error: Exception) -> Event:
            logger.warning("the controller did not take a report of %s: %s", self._attempt.job_id, why(error))
            return ReportMissed()

        try:
            controller = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
        except (ValueError, RayError) as error:
            self._calls.tell(missed(error))
            return
        reference = controller.report.remote(self._attempt.job_id, self._attempt.epoch, report)
        self._calls.add(reference, ReportAnswered, missed, REPORT_TIMEOUT_S)
