"""Reads a job's spec from a request's body, strictly: JSON as RFC 8259 has it, then the spec's own rules."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from fastapi import Request
from pydantic import ValidationError

from cadenza.spec import JobSpec
from cadenza_api.server.problems import Problem, invalid_spec
from cadenza_api.spec_problems import field_problems
from cadenza_api.user_errors import FieldProblem

WORKING_DIR = "runtime_env.working_dir"


async def read_spec(request: Request) -> JobSpec:
    """The spec in the body. Raises Problem 415 for another content type, 400 for no JSON, 422 for a bad spec."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise Problem(
            415,
            "unsupported_media_type",
            f"the body's content type is {content_type!r}",
            remedy="send JSON with Content-Type: application/json",
        )
    return check_spec(parse_json(await request.body()))


def parse_json(body: bytes) -> Any:
    """The value that ``body`` holds. Raises Problem 400."""
    try:
        value = json.loads(body, parse_constant=_no_number, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # Escapes can spell what no text may hold.
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Problem(400, "invalid_json", f"the body is not JSON: {reason}") from None
    return value


def check_spec(value: Any) -> JobSpec:
    """The spec, if ``value`` is one that the service can run. Raises Problem 422 naming each field."""
    try:
        spec = JobSpec.model_validate(value)
    except ValidationError as error:
        raise invalid_spec(field_problems(error, JobSpec)) from None
    try:
        spec.runtime_env.check_uploaded()
    except ValueError as error:
        reason, _, remedy = str(error).removeprefix(f"{WORKING_DIR}: ").partition("; ")
        raise invalid_spec(
            [FieldProblem(WORKING_DIR, reason, spec.runtime_env.working_dir, remedy)]
        ) from None
    return spec


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond what a number can hold")
    return number
