"""Reads a job spec from a file, with the changes that the command line makes to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cadenza.spec import JobSpec
from cadenza_api.cli.yaml_text import parse
from cadenza_api.spec_problems import field_problems
from cadenza_api.user_errors import FieldProblem, UserError, bullet_list


class SpecError(UserError):
    """The spec is wrong; names each field."""

    def __init__(self, source: str, problems: Sequence[FieldProblem]) -> None:
        super().__init__(bullet_list(f"{source} is not a valid job spec:", problems))
        self.problems = list(problems)


@dataclass(frozen=True)
class LocalSpec:
    """A checked spec, and the folder on this machine that holds its code."""

    spec: JobSpec
    """``runtime_env.working_dir`` is what the file says: a folder, a digest, or none."""

    folder: Path | None
    """None where no folder is to be uploaded."""

    def with_package(self, reference: str) -> JobSpec:
        """The spec with the uploaded package (``sha256:<digest>``) as its code."""
        runtime_env = self.spec.runtime_env.model_copy(update={"working_dir": reference})
        return self.spec.model_copy(update={"runtime_env": runtime_env})


def load_spec(path: Path, *, name: str | None = None, changes: Sequence[str] = ()) -> LocalSpec:
    """Read the YAML or JSON file at ``path``, put ``changes`` (``sync.mode=ssp``) into it and check it.

    Raises SpecError naming every field that is wrong, and UserError if there is no such file.
    """
    document = _read(path)
    for change in changes:
        _put(document, change)
    if name is not None:
        document["name"] = name
    spec = _check(document, str(path))
    return LocalSpec(spec, _folder(spec, path))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the path of a job spec") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is neither YAML nor JSON: {error}") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} does not hold a mapping of keys to values, which a job spec is")
    return document


def _put(document: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    *sections, last = key.split(".")
    if not equals or not all([*sections, last]):
        raise UserError(f"--set {change!r} is not of the form key=value, for example sync.mode=ssp")
    try:
        value = parse(text)
    except yaml.YAMLError as error:
        raise UserError(f"--set {key}: {text!r} is not a YAML value: {error}") from error
    for section in sections:
        if document.get(section) is None:
            document[section] = {}
        document = document[section]
        if not isinstance(document, dict):
            raise UserError(f"--set {key}: {section!r} is {document!r}, which holds no keys")
    document[last] = value


def _check(document: dict[str, Any], source: str) -> JobSpec:
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        raise SpecError(source, field_problems(error, JobSpec)) from None
    _check_plain(spec.config, source)
    return spec


def _check_plain(config: dict[str, Any], source: str) -> None:
    """The config travels as JSON, which YAML's dates, sets, infinities and the like are not."""
    for key, value in config.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            problem = FieldProblem(f"config.{key}", f"cannot be sent as JSON: {error}", value)
            raise SpecError(source, [problem]) from None


def _folder(spec: JobSpec, path: Path) -> Path | None:
    written = spec.runtime_env.working_dir
    if written is None or written.startswith("sha256:"):
        return None
    folder = path.parent / Path(written).expanduser()
    if not folder.is_dir():
        problem = FieldProblem(
            "runtime_env.working_dir",
            f"{folder} is not a folder",
            written,
            "give a path relative to the spec file",
        )
        raise SpecError(str(path), [problem])
    return folder
