"""The worker process: calls the user's function beside a link to the job, and reports how it ended.

:class:`Worker` is an ordinary class; the service makes a Ray actor of it. Its one long method runs on the
process's main thread, where signal handlers, CUDA and DataLoader workers behave as in a script.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cadenza.plane.control import Control
from cadenza.plane.layout import Layout
from cadenza.plane.messages import Failed, Joined
from cadenza.plane.network import NetworkLink
from cadenza.process.entrypoint import load
from cadenza.process.failures import failure_of
from cadenza.process.output import Output, captured
from cadenza.training import context


@dataclass(frozen=True, kw_only=True)
class WorkerJob:
    """What one worker of a job needs to know to begin."""

    worker: int
    """Its number, from 0."""
    incarnation: int
    entrypoint: str
    """``module:function``."""
    config: Mapping[str, Any]
    seed: int
    cpus: float
    gpus: float
    packaged: bool
    """Whether the current folder holds the job's code."""
    coordinator: tuple[str, int]
    """Host and port."""
    key: bytes
    connect_timeout_s: float


class Worker:
    """One worker process."""

    def __init__(self) -> None:
        self._end: str | None = None

    def ready(self) -> None:
        """Answers once the process is up, PyTorch loaded."""
        import torch  # noqa: F401

    def end(self) -> str | None:
        """How :meth:`run` ended; none if it was never called. Calls queue up behind it, so this waits for it."""
        return self._end

    def run(self, job: WorkerJob) -> str:
        """Train. Returns ``"returned"``, or the kind of the failure that was reported to the coordinator.

        Calling it again changes nothing and returns the same.

        Raises:
            ConnectionError: the coordinator cannot be reached; nothing was started.
        """
        if self._end is None:
            self._end = self._run(job)
        return self._end

    def _run(self, job: WorkerJob) -> str:
        host, port = job.coordinator
        with contextlib.closing(
            Control.connect(
                host,
                port,
                job.key,
                worker=job.worker,
                incarnation=job.incarnation,
                timeout_s=job.connect_timeout_s,
            )
        ) as control:
            with captured(control.log) as output:
                failure = _train(job, control)
                if failure is not None:
                    _report(failure, control, output)
            control.flush()
        return "returned" if failure is None else failure.kind


class ObservedLink(NetworkLink):
    """A link that knows how far its session came, so that an end can be judged and a failure be placed."""

    def __init__(self, control: Control) -> None:
        super().__init__(control)
        self.joined = False
        self.finished = False
        self.steps = 0
        """Optimizer steps that the session has told of."""

    def join(self, layout: Layout, *, node: str, device: str) -> Joined:
        joined = super().join(layout, node=node, device=device)
        self.joined = True
        return joined

    def telemetry(
        self, *, steps: int, samples: int, compute_seconds: float, apply_seconds: float | None
    ) -> None:
        super().telemetry(
            steps=steps, samples=samples, compute_seconds=compute_seconds, apply_seconds=apply_seconds
        )
        self.steps = steps

    def finish(self) -> bool:
        last = super().finish()
        self.finished = True
        return last


def _train(job: WorkerJob, control: Control) -> Failed | None:
    """Call the user's function; what went wrong, or none."""
    link = ObservedLink(control)
    folder = os.getcwd() if job.packaged else ""
    try:
        _prepare(job, control)
        function = load(job.entrypoint)
        with context.activate(link):
            function(dict(job.config))
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, and all of it is reported
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            return failure_of(error, link.steps if link.joined else None, folder)
    finally:
        link.close()
    return _verdict(job.entrypoint, link)


def _verdict(entrypoint: str, link: ObservedLink) -> Failed | None:
    """Whether a function that returned had done what a job needs."""
    if not link.joined:
        return Failed(
            "never_joined",
            f"{entrypoint} returned without joining the job",
            "",
            None,
            "train inside `with cadenza.join(model, optimizer) as session:`",
        )
    if not link.finished:
        return Failed(
            "never_finished",
            f"{entrypoint} returned while its session was still open",
            "",
            link.steps,
            "use the session as a context manager: `with cadenza.join(model, optimizer) as session:`",
        )
    return None


def _report(failure: Failed, control: Control, output: Output) -> None:
    """The traceback goes to the log, and all of the log before the failure itself."""
    print(failure.traceback.rstrip() or failure.message, file=sys.stderr)
    output.flush()
    control.failed(failure)


def _prepare(job: WorkerJob, control: Control) -> None:
    """Make the process what the user's function expects: its code first, its own seed, its share of the cores."""
    import torch  # Here, so that the supervisor, which only names this class, does not load it.

    if job.packaged:
        # Ray puts folders of the process that started the cluster before the job's own.
        sys.path.insert(0, os.getcwd())
    seed = job.seed + job.worker
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.set_num_threads(max(1, int(job.cpus)))
    if job.gpus and not torch.cuda.is_available():
        control.notice(
            "no_gpu",
            f"worker {job.worker} was given {job.gpus:g} GPU, but its PyTorch {torch.__version__} sees none",
            "warning",
        )
