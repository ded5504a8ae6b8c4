"""What is wrong with a job spec, field by field: pydantic's findings in the words of the API's problem documents."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cadenza.spec import ENTRYPOINT_PATTERN, NAME_PATTERN, VARIABLE_PATTERN
from cadenza_api.user_errors import FieldProblem

NAMED_FIELD = re.compile(r"^([a-z_]+(?:\.[a-z_]+)*)(?=:? )")
"""A check of several fields together names the one that it means first: ``sync.local_steps is 8, but …; remove it``."""

REASONS = {
    "missing": "is required",
    "string_pattern_mismatch": "does not match the pattern {pattern}",
    "literal_error": "must be one of {expected}",
    "union_tag_invalid": "its {discriminator} must be one of {expected_tags}",
    "union_tag_not_found": "needs its key {discriminator}",
    "model_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
}

REMEDIES = {
    ENTRYPOINT_PATTERN: "write module:function, for example train:main",
    NAME_PATTERN: "use letters, digits, '.', '_' and '-', 63 at most, the first and last a letter or digit",
    VARIABLE_PATTERN: "use letters, digits and '_', the first not a digit",
}


def field_problems(error: ValidationError, model: type[BaseModel]) -> list[FieldProblem]:
    """One problem for each field that ``model`` refused, with the closest known key for an unknown one."""
    return [_field_problem(details, model) for details in error.errors(include_url=False)]


def _field_problem(details: ErrorDetails, model: type[BaseModel]) -> FieldProblem:
    place = tuple(part for part in details["loc"] if part != "[key]")
    match details["type"]:
        case "extra_forbidden":
            return _unknown_key(place, model)
        case "value_error":
            return _checked_together(place, details)
        case kind:
            context = details.get("ctx", {})
            reason = REASONS[kind].format_map(context) if kind in REASONS else _lower(details["msg"])
            # A variable of the environment may hold a secret, even where it has the wrong type.
            value = None if kind == "missing" or place[:1] == ("env",) else details["input"]
            remedy = REMEDIES.get(context.get("pattern", ""), "")
            return FieldProblem(_dotted(place, model), reason, value, remedy)


def _unknown_key(place: tuple[int | str, ...], model: type[BaseModel]) -> FieldProblem:
    known = sorted({name for section in _sections(model, place[:-1]) for name in section.model_fields})
    close = difflib.get_close_matches(str(place[-1]), known, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
    return FieldProblem(_dotted(place, model), "is not a known key", remedy=remedy)


def _checked_together(place: tuple[int | str, ...], details: ErrorDetails) -> FieldProblem:
    message = str(details["ctx"]["error"])
    named = NAMED_FIELD.match(message)
    field = ".".join(map(str, place))
    if named and named[1].startswith(field):
        field, message = named[1], message[named.end() :].lstrip(": ")
    reason, _, remedy = message.rpartition("; ")
    return FieldProblem(field, reason or remedy, remedy=remedy if reason else "")


def _dotted(place: Sequence[int | str], model: type[BaseModel]) -> str:
    """The path as it is written in a spec: pydantic puts the chosen member of a union into it as well."""
    parts: list[str] = []
    for index, part in enumerate(place):
        if not _is_tag(part, model, tuple(place[:index])):
            parts.append(str(part))
    return ".".join(parts)


def _is_tag(part: int | str, model: type[BaseModel], above: tuple[int | str, ...]) -> bool:
    sections = list(_sections(model, above))
    return len(sections) > 1 and part in {_tag(section) for section in sections}


def _sections(model: type[BaseModel], place: Sequence[int | str]) -> Iterator[type[BaseModel]]:
    """The models that can stand at ``place``; several where the spec has a union."""
    found = [model]
    for part in place:
        if len(found) > 1:
            found = [section for section in found if _tag(section) == part]
        else:
            fields = [section.model_fields[str(part)] for section in found if part in section.model_fields]
            found = [section for field in fields for section in _models_in(field.annotation)]
    yield from found


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def _tag(model: type[BaseModel]) -> str | None:
    """The value of ``name`` by which a union tells this member from the others."""
    field = model.model_fields.get("name")
    literals = get_args(field.annotation) if field else ()
    return str(literals[0]) if literals else None


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
