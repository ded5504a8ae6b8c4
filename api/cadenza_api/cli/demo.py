"""The demonstration: one real job over REST, from its files on disk to the model that comes back."""

from __future__ import annotations

import importlib.resources
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import cadenza_api
from cadenza_api.cli.progress import Display
from cadenza_api.cli.rendering import metrics_text
from cadenza_api.cli.spec_file import load_spec
from cadenza_api.cli.submit import with_code
from cadenza_api.client.client import Client
from cadenza_api.client.errors import ApiError, Unreachable
from cadenza_api.client.watching import updates
from cadenza_api.sizes import human_bytes, human_seconds
from cadenza_api.user_errors import UserError
from cadenza_api.views import JobView

SPEC_NAME = "demo.yaml"
TIMEOUT_S = 1800.0
"""Many times what the demonstration takes on a small machine: beyond it something is wrong."""


def examples_folder() -> Path:
    """The folder of the examples: inside the installed package, or beside the sources it is installed from."""
    installed = Path(str(importlib.resources.files(cadenza_api) / "examples"))
    beside_sources = Path(cadenza_api.__file__).resolve().parents[2] / "examples"
    for folder in (installed, beside_sources):
        if (folder / SPEC_NAME).is_file():
            return folder
    raise UserError(
        f"the examples are missing: neither {installed} nor {beside_sources} holds {SPEC_NAME}; reinstall cadenza"
    )


def run_demo(
    client: Client, shown: Display, downloads: Path, clock: Callable[[], float] = time.monotonic
) -> dict[str, Any]:
    """Submit the demonstration's job, follow it to its end and fetch its model into ``downloads``.

    A job that is not wanted any more, because of Ctrl-C or an error, is cancelled.
    """
    local = load_spec(examples_folder() / SPEC_NAME)
    start = clock()
    job = client.submit(with_code(client, local))
    try:
        job = _followed(client, job.id, shown, deadline=start + TIMEOUT_S, clock=clock)
    except BaseException:
        with suppress(
            ApiError, Unreachable
        ):  # What ended the demonstration is told; this could only hide it.
            client.cancel(job.id)
        raise
    seconds = clock() - start
    return summary(job, seconds, _model(client, job, downloads))


def summary(job: JobView, seconds: float, model: Path | None) -> dict[str, Any]:
    """The result as one flat object: what was reported, and what it cost."""
    progress = job.progress
    return {
        **progress.metrics,
        "job_id": job.id,
        "state": job.state,
        "reason": job.reason.message if job.reason else None,
        "samples": progress.samples,
        "loss": progress.loss,
        "rounds": progress.rounds,
        "wire_bytes": progress.wire_bytes,
        "seconds": round(seconds, 3),
        "training_seconds": round(progress.seconds, 3),
        "workers": job.spec.get("workers"),
        "servers": job.spec.get("servers"),
        "model": str(model) if model else None,
        "metrics": progress.metrics,
    }


def summary_lines(result: dict[str, Any]) -> list[str]:
    """The result for a person."""
    if result["state"] != "SUCCEEDED":
        return [f"{result['job_id']} {result['state']}: {result['reason']}"]
    return [
        "",
        f"  result    {metrics_text(result['metrics'])}",
        f"  rounds    {result['rounds']:,}, {result['samples']:,} samples",
        f"  moved     {human_bytes(result['wire_bytes'])} between workers and parameter servers",
        f"  time      {human_seconds(result['seconds'])}, of which training {human_seconds(result['training_seconds'])}",
        f"  model     {result['model']}",
    ]


def next_steps(url: str, *, still_running: bool) -> list[str]:
    """What to try after the demonstration; ``url`` is where the service is, or will be after ``up``."""
    folder = examples_folder()
    others = [path for path in sorted(folder.glob("*.yaml")) if path.name != SPEC_NAME]
    program = own_name()
    start = [] if still_running else [f"{program} up                            # the service, until Ctrl-C"]
    submits = [f"{program} submit {path} --watch" for path in others]
    commands = [*start, *submits, f"{program} show latest"]
    return ["", "Next:", *(f"  {command}" for command in commands), f"  {url}/docs describes the REST API"]


def own_name() -> str:
    """How this command line is called from where the user is: by name where the shell finds it, else by path."""
    if shutil.which("cadenza"):
        return "cadenza"
    program = Path(sys.argv[0])
    here = Path.cwd()
    return str(program.relative_to(here) if program.is_relative_to(here) else program)


def _followed(
    client: Client, job_id: str, shown: Display, *, deadline: float, clock: Callable[[], float]
) -> JobView:
    for update in updates(client, job_id, shown.tell):
        shown.show(update)
        if not update.job.ended and clock() > deadline:
            raise UserError(
                f"{job_id} is {update.job.state} after {TIMEOUT_S:.0f} s; "
                f"`cadenza show {job_id}` says why, once a service runs"
            )
    return update.job


def _model(client: Client, job: JobView, downloads: Path) -> Path | None:
    if job.state != "SUCCEEDED":
        return None
    downloads.mkdir(parents=True, exist_ok=True)
    path = downloads / f"{job.id}.safetensors"
    client.download_model(job.id, path)
    return path
