"""What all commands share: the connection, the ways to name a job, and the ways to print."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import httpx
import typer
from pydantic import BaseModel

from cadenza_api.cli.progress import display
from cadenza_api.cli.rendering import end_text
from cadenza_api.client.address import DEFAULT_URL
from cadenza_api.client.client import Client
from cadenza_api.client.errors import ApiError
from cadenza_api.client.watching import updates
from cadenza_api.user_errors import ExitCode, UserError
from cadenza_api.views import JobView

LATEST = "latest"
SEARCHED = 1000
"""Among how many of the newest jobs the beginning of an id is looked for."""

ENDS = {"SUCCEEDED": ExitCode.SUCCESS, "FAILED": ExitCode.FAILED, "CANCELLED": ExitCode.CANCELLED}

JobArgument = Annotated[
    str,
    typer.Argument(metavar="ID", help="A job's id, the beginning of one, or 'latest'.", show_default=False),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.")
]


@dataclass
class Connection:
    """Where the commands find the service."""

    url: str = DEFAULT_URL
    token: str | None = None
    transport: httpx.BaseTransport | None = None
    """Instead of the network, for tests."""

    def client(self) -> Client:
        """A new client."""
        return Client(self.url, self.token, transport=self.transport)


def connection_of(context: typer.Context) -> Connection:
    """The connection that the command line's global options describe."""
    return context.ensure_object(Connection)


def find_job(client: Client, given: str) -> str:
    """The id of the one job that ``given`` names: by its id, by the beginning of it, or as the latest.

    Raises UserError if several fit, or if there is no job at all; ApiError (404) if none fits.
    """
    if given == LATEST:
        for job in client.jobs(limit=1):
            return job.id
        raise UserError("there is no job yet; `cadenza submit SPEC` makes one")
    try:
        return client.job(given).id
    except ApiError as error:
        if error.status != httpx.codes.NOT_FOUND:
            raise
        fitting = [job.id for job in islice(client.each_job(), SEARCHED) if job.id.startswith(given)]
        if not fitting:
            raise
    if len(fitting) > 1:
        raise UserError(
            f"{len(fitting)} jobs begin with {given!r}: {', '.join(fitting[:5])}; give more of the id"
        )
    return fitting[0]


def follow(client: Client, job_id: str, *, as_json: bool) -> JobView:
    """Show a job's progress until it has ended; Ctrl-C ends only the showing."""
    try:
        with display(sys.stderr if as_json else sys.stdout) as shown:
            for update in updates(client, job_id, shown.tell):
                shown.show(update)
    except KeyboardInterrupt:
        note(f"{job_id} goes on; `cadenza watch {job_id}` shows it again, `cadenza cancel {job_id}` ends it")
        raise
    return update.job


def finish(job: JobView, *, as_json: bool) -> None:
    """Print how a followed job ended, and exit with the code that says so."""
    print_result(job, [end_text(job)], as_json=as_json)
    if job.state == "FAILED" and not as_json:
        note(f"`cadenza show {job.id}` tells more, `cadenza logs {job.id}` what its workers printed")
    raise typer.Exit(ENDS.get(job.state, ExitCode.FAILED))


def print_result(
    result: BaseModel | Sequence[BaseModel] | dict[str, Any], lines: Sequence[str], *, as_json: bool
) -> None:
    """Print ``result`` as one JSON document, or the ``lines`` that tell it to a person."""
    print(json.dumps(plain(result)) if as_json else "\n".join(lines), flush=True)


def plain(result: BaseModel | Sequence[BaseModel] | dict[str, Any]) -> Any:
    """``result`` as JSON holds it."""
    if isinstance(result, BaseModel):
        return result.model_dump(mode="json")
    if isinstance(result, dict):
        return result
    return [plain(item) for item in result]


def note(message: str) -> None:
    """Say something beside the result."""
    print(message, file=sys.stderr, flush=True)
