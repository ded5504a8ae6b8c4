"""A service without its API for the tests: one Ray, one controller, one job store."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import ray

from cadenza.spec import JobSpec
from cadenza_service.jobs.lifecycle import TERMINAL, JobState
from cadenza_service.jobs.records import Job
from cadenza_service.jobs.storage import Storage
from cadenza_service.jobs.store import Store
from cadenza_service.orchestration import cluster
from cadenza_service.orchestration.controller import start_controller
from cadenza_service.settings import Settings

GPUS = 1
"""Logical: Ray hands it out, and there need not be one."""

CPUS = 4
TIMEOUT_S = 120.0

JOB_PROCESSES = ("ray::Worker", "ray::ShardActor", "ray::CoordinatorActor", "ray::Supervisor")
"""How Ray calls the processes of a job's actors, and of what they fork."""


class Service:
    """What the tests talk to."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.settings = Settings(home=folder, **settings)
        # Short: sockets lie below it, and their paths may have 107 characters.
        self._ray_folder = tempfile.mkdtemp(prefix="cz", dir="/tmp")
        self._before = os.getcwd()
        empty = folder / "run"
        empty.mkdir(parents=True)
        os.chdir(empty)  # Ray puts the current folder on the path of every process.
        self._start_ray(self._ray_folder)
        self.controller = start_controller(self.settings)
        self.store = Store.open(self.settings)
        self.storage = Storage(self.settings.storage_path)

    def _start_ray(self, folder: str) -> None:
        """Start Ray with its files in ``folder``, and connect to it."""
        ray.init(
            num_cpus=CPUS,
            num_gpus=GPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )

    def close(self) -> None:
        """End what was started."""
        self.store.close()
        ray.shutdown()
        os.chdir(self._before)
        shutil.rmtree(self._ray_folder, ignore_errors=True)

    def submit(self, code: Mapping[str, str], **spec: Any) -> Job:
        """A job with the given files as its code; its fields are the spec's."""
        package = packed(code)
        digest = hashlib.sha256(package).hexdigest()
        self.storage.put_package(digest, [package])
        defaults = {"name": "test", "runtime_env": {"working_dir": f"sha256:{digest}"}}
        job, _ = self.store.create(JobSpec.model_validate(defaults | spec))
        return job

    def wait(self, job_id: str, *states: JobState, timeout_s: float = TIMEOUT_S) -> Job:
        """The job once it is in one of ``states``; an assertion fails where it ends in another, or takes too long."""
        wanted = set(states) or TERMINAL
        self.until(
            lambda: self.store.job(job_id).state in wanted | TERMINAL, timeout_s, lambda: self.story(job_id)
        )
        job = self.store.job(job_id)
        assert job.state in wanted, self.story(job_id)
        return job

    def wait_rounds(self, job_id: str, rounds: int) -> Job:
        """The job once it has committed so many rounds."""
        self.until(
            lambda: self.store.job(job_id).progress.rounds >= rounds, TIMEOUT_S, lambda: self.story(job_id)
        )
        return self.store.job(job_id)

    def until(
        self, condition: Callable[[], bool], timeout_s: float = 30.0, story: Callable[[], str] = str
    ) -> None:
        """Wait until something holds, which only polling can tell."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {story()}"
            time.sleep(0.05)

    def story(self, job_id: str) -> str:
        """All that is known of a job, for a failed assertion."""
        job = self.store.job(job_id)
        events = [f"{event.kind}: {event.message}" for event in self.store.events(job_id)]
        logs = [f"{line.worker}| {line.text}" for line in self.store.logs(job_id)]
        return "\n".join([f"{job.state} {job.reason}", *events, *logs])

    def parts(self, job_id: str) -> Collection[str]:
        """The job's actors."""
        return cluster.job_actors().get(job_id, set())

    def pid(self, job_id: str, part: str) -> int:
        """The process of one of a job's actors."""
        return self.pid_of(cluster.find(job_id, part))

    def pid_of(self, actor: Any) -> int:
        """The process of an actor."""
        return int(ray._private.state.actors(actor._actor_id.hex())["Pid"])

    def assert_nothing_left(self, job_id: str) -> None:
        """After a job's end: no actor, no process, no resource, no temporary file."""
        self.until(lambda: not self.parts(job_id), story=lambda: f"{self.parts(job_id)} are left")
        self.until(self._all_free, story=lambda: str(cluster.nodes()))
        self.until(lambda: not self._processes(), story=lambda: str(self._processes()))
        assert not list(self.settings.storage_path.glob("jobs/*/checkpoints/.tmp-*"))

    def _processes(self) -> list[str]:
        """Processes of any job's actors, and what they have forked; they all live in our folders."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # It ended meanwhile.
                line = (process / "cmdline").read_text().replace("\0", " ")
                ours = os.readlink(process / "cwd").startswith((self._ray_folder, str(self.settings.home)))
                if ours and line.startswith(JOB_PROCESSES):
                    found.append(f"{process.name} {line}")
        return found

    def _all_free(self) -> bool:
        return all(node.available == node.total for node in cluster.nodes())


def packed(files: Mapping[str, str]) -> bytes:
    """A zip of text files by name."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()
