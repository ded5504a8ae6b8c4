"""The command that submits a job: checks the spec, uploads the code, creates the job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cadenza.spec import JobSpec
from cadenza_api.cli.common import JsonOption, connection_of, finish, follow, note, print_result
from cadenza_api.cli.spec_file import LocalSpec, load_spec
from cadenza_api.client.client import Client
from cadenza_api.client.packaging import packed
from cadenza_api.sizes import human_bytes

SpecArgument = Annotated[
    Path, typer.Argument(metavar="SPEC", help="A YAML or JSON file.", show_default=False)
]
NameOption = Annotated[str | None, typer.Option(help="Instead of the spec's name.", show_default=False)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a field: sync.mode=ssp. Repeatable.", show_default=False
    ),
]
WatchOption = Annotated[
    bool, typer.Option("--watch", help="Follow the job to its end, as `cadenza watch` does.")
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="KEY", help="Submitting again with the same key finds the first job.", show_default=False
    ),
]


def submit(
    context: typer.Context,
    spec: SpecArgument,
    name: NameOption = None,
    changes: SetOption = None,
    watch: WatchOption = False,
    idempotency_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job. The folder in runtime_env.working_dir, relative to SPEC, is uploaded as its code."""
    local = load_spec(spec, name=name, changes=changes or [])
    with connection_of(context).client() as client:
        job = client.submit(with_code(client, local), idempotency_key=idempotency_key)
        if watch:
            note(f"submitted {job.id}")
            finish(follow(client, job.id, as_json=as_json), as_json=as_json)
    lines = [f"submitted {job.id}", f"`cadenza watch {job.id}` follows it, `cadenza cancel {job.id}` ends it"]
    print_result(job, lines, as_json=as_json)


def with_code(client: Client, local: LocalSpec) -> JobSpec:
    """The spec as the service takes it, after its code has been uploaded."""
    if local.folder is None:
        if local.spec.runtime_env.working_dir is None:
            note(
                "no code is uploaded, since runtime_env.working_dir is not set; the workers' image must hold it"
            )
        return local.spec
    with packed(local.folder) as package:
        if client.put_package(package):
            note(f"uploaded {package.files} files, {human_bytes(package.size_bytes)}")
        return local.with_package(package.reference)
