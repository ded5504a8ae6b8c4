"""The commands about jobs that exist: jobs, show, watch, logs, cancel, download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cadenza_api.cli.common import (
    JobArgument,
    JsonOption,
    connection_of,
    find_job,
    finish,
    follow,
    plain,
    print_result,
)
from cadenza_api.cli.rendering import end_text, job_lines, jobs_lines, log_text
from cadenza_api.sizes import human_bytes
from cadenza_api.views import LogView
from cadenza_service.jobs.lifecycle import JobState

StateOption = Annotated[
    JobState | None, typer.Option(help="Only jobs in this state.", case_sensitive=False, show_default=False)
]
LimitOption = Annotated[int, typer.Option(min=1, help="How many, from the newest.")]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Default: <id>.safetensors here.", show_default=False
    ),
]


def jobs(
    context: typer.Context, state: StateOption = None, limit: LimitOption = 20, as_json: JsonOption = False
) -> None:
    """List jobs, the newest first."""
    with connection_of(context).client() as client:
        found = client.jobs(state, limit)
    print_result(found, jobs_lines(found), as_json=as_json)


def show(context: typer.Context, job: JobArgument, as_json: JsonOption = False) -> None:
    """Show a job: its state and why, its progress, workers and model, and the traceback if it failed."""
    with connection_of(context).client() as client:
        found = client.job(find_job(client, job))
        checkpoints = client.checkpoints(found.id)
    print_result(found, job_lines(found, checkpoints), as_json=as_json)


def watch(context: typer.Context, job: JobArgument, as_json: JsonOption = False) -> None:
    """Follow a job to its end: samples, loss, rate and time left.

    Returns 0 if it succeeded, 1 if it failed, 3 if it was cancelled. Ctrl-C leaves the job running.
    """
    with connection_of(context).client() as client:
        ended = follow(client, find_job(client, job), as_json=as_json)
    finish(ended, as_json=as_json)


def logs(
    context: typer.Context, job: JobArgument, follow: FollowOption = False, as_json: JsonOption = False
) -> None:
    """Print what a job's workers printed. With --follow, --json prints one object a line."""
    with connection_of(context).client() as client:
        lines = client.logs(find_job(client, job), follow=follow)
        if as_json and not follow:
            print(json.dumps(plain(list(lines))))
            return
        for line in lines:
            print(_as_line(line, as_json), flush=follow)


def cancel(context: typer.Context, job: JobArgument, as_json: JsonOption = False) -> None:
    """End a job. Its processes have a moment to stop; `cadenza watch` shows when they have."""
    with connection_of(context).client() as client:
        cancelled = client.cancel(find_job(client, job))
    text = end_text(cancelled) if cancelled.ended else f"{cancelled.id} {cancelled.state}, will be cancelled"
    print_result(cancelled, [text], as_json=as_json)


def download(
    context: typer.Context, job: JobArgument, output: OutputOption = None, as_json: JsonOption = False
) -> None:
    """Fetch a job's latest model as a safetensors file."""
    with connection_of(context).client() as client:
        job_id = find_job(client, job)
        path = output or Path(f"{job_id}.safetensors")
        size_bytes = client.download_model(job_id, path)
    result = {"job_id": job_id, "path": str(path), "size_bytes": size_bytes}
    print_result(result, [f"{path} ({human_bytes(size_bytes)})"], as_json=as_json)


def _as_line(line: LogView, as_json: bool) -> str:
    return line.model_dump_json() if as_json else log_text(line)
