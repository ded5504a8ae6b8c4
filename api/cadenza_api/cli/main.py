"""The ``cadenza`` command.

Each command is a function in one of the ``cli_*`` modules; here they come together, with the options that
all of them share. Nothing that a client command needs imports ray, torch or the database.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import httpx
import typer

from cadenza_api.cli import jobs as cli_jobs
from cadenza_api.cli import service as cli_service
from cadenza_api.cli import submit as cli_submit
from cadenza_api.cli.common import Connection, connection_of
from cadenza_api.client.address import DEFAULT_URL
from cadenza_api.user_errors import UserError

EPILOG = """\b
Exit codes:
  0  done; with --watch, watch and demo: the job succeeded
  1  the job failed, or the service could not run
  2  wrong arguments, spec or folder
  3  the job was cancelled
  4  the service does not answer
  5  the service refused the request
  130  Ctrl-C
"""

app = typer.Typer(
    help="Elastic training of PyTorch models over slow, congested or uneven networks.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

UrlOption = Annotated[
    str, typer.Option(metavar="URL", envvar="CADENZA_API_URL", help="Where the service is.")
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN",
        envvar="CADENZA_TOKEN",
        help="The service's token; other users of this machine see options, but not variables.",
        show_default=False,
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version("cadenza"))
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
]


@app.callback()
def connect(
    context: typer.Context,
    url: UrlOption = DEFAULT_URL,
    token: TokenOption = None,
    show_version: VersionOption = False,
) -> None:
    """Take the options that stand before the command."""
    connection = connection_of(context)
    connection.url, connection.token = url, token


for command in (
    cli_service.up,
    cli_submit.submit,
    cli_jobs.jobs,
    cli_jobs.show,
    cli_jobs.watch,
    cli_jobs.logs,
    cli_jobs.cancel,
    cli_jobs.download,
    cli_service.demo,
):
    app.command()(command)


def main(arguments: Sequence[str] | None = None, *, transport: httpx.BaseTransport | None = None) -> None:
    """Run the command line and exit with its code; ``transport`` stands for the network in tests."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # A terminal's poor encoding must not end a command.
    try:
        app(arguments, prog_name="cadenza", obj=Connection(transport=transport))
    except UserError as error:
        print(f"cadenza: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
