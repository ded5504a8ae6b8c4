"""Problem details (RFC 9457): the one shape in which the API reports what went wrong.

Whatever is raised in a request ends here: problems as they are, the service's own errors through
``TRANSLATIONS``, the framework's errors, and at last anything unforeseen, which tells nothing of its inside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from cadenza_api.server.answers import JsonResponse
from cadenza_api.user_errors import FieldProblem
from cadenza_service.jobs.records import IdempotencyConflict, InvalidCursor, JobEnded, JobNotFound
from cadenza_service.jobs.storage import BadPackage, CheckpointNotFound, PackageNotFound, PackageTooLarge

VALUE_LENGTH = 200
"""Longer values are cut in a problem: the sender has the whole."""

log = logging.getLogger(__name__)


class Problem(HTTPException):
    """A problem to answer a request with."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        remedy: str = "",
        errors: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, detail, headers)
        self.code = code
        self.remedy = remedy
        self.errors = tuple(errors)

    def document(self) -> dict[str, Any]:
        """The members of the problem document; those of a single field stand at the top as well."""
        members: dict[str, Any] = {
            "type": f"urn:cadenza:problem:{self.code}",
            "title": self.code.replace("_", " ").capitalize(),
            "status": self.status_code,
            "detail": self.detail,
            "code": self.code,
        }
        if self.remedy:
            members["remedy"] = self.remedy
        if len(self.errors) == 1:
            members = _error(self.errors[0]) | members
        if self.errors:
            members["errors"] = [_error(error) for error in self.errors]
        return members

    def response(self) -> Response:
        """The answer to send."""
        return JsonResponse(
            self.document(), self.status_code, self.headers, media_type="application/problem+json"
        )


def _error(problem: FieldProblem) -> dict[str, Any]:
    members = {
        "field": problem.field,
        "value": _shown(problem.value),
        "reason": problem.reason,
        "remedy": problem.remedy,
    }
    return {name: value for name, value in members.items() if value not in (None, "")}


def _shown(value: Any) -> Any:
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= VALUE_LENGTH else text[:VALUE_LENGTH] + "…"


def invalid_spec(errors: Sequence[FieldProblem]) -> Problem:
    """The job's spec cannot be taken; one entry for each field."""
    return Problem(422, "invalid_spec", f"the job's spec was refused: {_joined(errors)}", errors=errors)


def invalid_request(errors: Sequence[FieldProblem]) -> Problem:
    """A parameter or header cannot be taken; one entry for each."""
    return Problem(422, "invalid_request", f"the request was refused: {_joined(errors)}", errors=errors)


def _joined(errors: Sequence[FieldProblem]) -> str:
    return "; ".join(f"{error.field} {error.reason}" if error.field else error.reason for error in errors)


TRANSLATIONS: dict[type[Exception], Callable[[Any], Problem]] = {
    JobNotFound: lambda error: Problem(
        404, "job_not_found", f"there is no job {error.job_id!r}", remedy="list the jobs with GET /v1/jobs"
    ),
    JobEnded: lambda error: Problem(
        409, "job_ended", str(error), remedy="submit the job again to run it again"
    ),
    IdempotencyConflict: lambda error: Problem(
        409,
        "idempotency_conflict",
        str(error),
        errors=[FieldProblem("Idempotency-Key", "was used with another spec", error.key, "use a new key")],
    ),
    InvalidCursor: lambda error: invalid_request(
        [FieldProblem("cursor", "is not one that a page gave", error.cursor, "start again without a cursor")]
    ),
    PackageNotFound: lambda error: Problem(404, "package_not_found", str(error)),
    PackageTooLarge: lambda error: Problem(413, "package_too_large", str(error)),
    BadPackage: lambda error: Problem(422, "bad_package", str(error)),
    CheckpointNotFound: lambda error: Problem(404, "checkpoint_not_found", str(error)),
    SQLAlchemyError: lambda _: Problem(
        503, "store_unavailable", "the job store does not answer", remedy="try again; see the service's log"
    ),
}
"""How the service's errors read outside. A database error's own text stays in the log: it shows the statement."""


def install(app: FastAPI) -> None:
    """Answer every error of ``app`` with a problem document."""
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _unforeseen)
    for kind in TRANSLATIONS:
        app.add_exception_handler(kind, _translated)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, Problem):
        return error.response()
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    detail = f"{error.detail}: {request.method} {request.url.path}"
    remedy = "GET / lists what there is" if error.status_code in (404, 405) else ""
    return Problem(error.status_code, code, detail, remedy=remedy, headers=error.headers).response()


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fields = [
        FieldProblem(".".join(map(str, found["loc"][1:])), found["msg"], found.get("input"))
        for found in error.errors()
    ]
    return invalid_request(fields).response()


async def _translated(request: Request, error: Exception) -> Response:
    kind = next(kind for kind in type(error).__mro__ if kind in TRANSLATIONS)
    problem = TRANSLATIONS[kind](error)
    if problem.status_code >= 500:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem.response()


async def _unforeseen(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return Problem(
        500,
        "internal_error",
        "the service failed to answer; its log says why",
        remedy="report it with the log",
    ).response()
