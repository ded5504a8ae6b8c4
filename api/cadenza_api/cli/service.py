"""The commands that run the service on this machine: up and demo."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from cadenza_api.cli.common import ENDS, Connection, JsonOption, connection_of, note, print_result
from cadenza_api.cli.demo import next_steps, run_demo, summary_lines
from cadenza_api.cli.progress import display
from cadenza_api.client.address import DEFAULT_URL
from cadenza_api.client.client import Client
from cadenza_api.client.errors import ApiError, Unreachable
from cadenza_api.user_errors import UserError, bullet_list

if TYPE_CHECKING:
    from cadenza_service.settings import Settings

HostOption = Annotated[
    str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.", show_default=False)
]
PortOption = Annotated[
    int | None,
    typer.Option(min=0, max=65_535, help="Port; 0 takes a free one. Default: 8000.", show_default=False),
]
HomeOption = Annotated[
    Path | None,
    typer.Option(help="Folder of jobs, code and models. Default: ~/.cadenza.", show_default=False),
]
KeepOption = Annotated[
    bool, typer.Option("--keep", help="Keep the service running afterwards, until Ctrl-C.")
]


def up(
    context: typer.Context,
    host: HostOption = None,
    port: PortOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the service on this machine until Ctrl-C. Jobs that were unfinished go on at the next `up`."""
    from cadenza_api.cli.service_process import running

    connection = connection_of(context)
    settings = _settings(connection, host=host, port=port, home=home)
    note(f"starting the service in {settings.home}")
    with running(settings) as service, replace(connection, url=service.url).client() as client:
        try:
            print_result({"url": client.url}, _welcome(client), as_json=as_json)
            service.wait()
        except KeyboardInterrupt:
            note(f"stopping; {_farewell(client)} at the next `cadenza up`")


def demo(context: typer.Context, keep: KeepOption = False, as_json: JsonOption = False) -> None:
    """Train a small model with several workers, and say how well and at what cost.

    Uses the service at --url if one answers there; otherwise runs one for as long as it takes.
    """
    from cadenza_api.cli.service_process import running

    connection = connection_of(context)
    wanted_url = connection.url
    with ExitStack() as stack:
        service = None
        if not _answers(connection):
            note(f"no service at {connection.url}; starting one, which takes about half a minute")
            service = stack.enter_context(running(_settings(connection, port=0)))
            connection = replace(connection, url=service.url)
        client = stack.enter_context(connection.client())
        with display(sys.stderr if as_json else sys.stdout) as shown:
            result = run_demo(client, shown, _settings(connection).home / "downloads")
        kept = service is None or keep
        url = client.url if kept else wanted_url
        lines = [*summary_lines(result), *next_steps(url, still_running=kept)]
        print_result(result, lines, as_json=as_json)
        if service is not None and keep:
            note(f"the service goes on at {client.url}, until Ctrl-C")
            with suppress(KeyboardInterrupt):
                service.wait()
    raise typer.Exit(ENDS[result["state"]])


def _answers(connection: Connection) -> bool:
    with connection.client() as client:
        return client.ready()


def _settings(connection: Connection, **given: Any) -> Settings:
    """The service's settings: the environment's, with what the command line gives in its place."""
    from cadenza_service.settings import Settings

    chosen = {**given, "token": connection.token}
    try:
        return Settings(**{key: value for key, value in chosen.items() if value is not None})
    except ValidationError as error:
        # Without the values: one of them is the token.
        problems = [
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}".removeprefix(": ") for item in error.errors()
        ]
        raise UserError(bullet_list("the service's settings are wrong:", problems)) from None


def _welcome(client: Client) -> list[str]:
    elsewhere = [] if client.url == DEFAULT_URL else [f"  export CADENZA_API_URL={client.url}"]
    return [
        f"Cadenza is ready at {client.url}; {_unfinished(client)}.",
        "",
        "In another terminal:",
        *elsewhere,
        "  cadenza demo                    # a first job",
        "  cadenza submit SPEC --watch     # one of your own",
        "  cadenza jobs",
        f"{client.url}/docs describes the REST API. Ctrl-C stops the service; unfinished jobs go on at the next `cadenza up`.",
    ]


def _farewell(client: Client) -> str:
    try:
        return _unfinished(client)
    except (ApiError, Unreachable):  # A service that no longer answers is stopped all the same.
        return "unfinished jobs go on"


def _unfinished(client: Client) -> str:
    count = sum(not job.ended for job in client.each_job())
    return f"{count or 'no'} unfinished {'job goes' if count == 1 else 'jobs go'} on"
