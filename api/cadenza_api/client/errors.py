"""How the client tells what went wrong: problem documents, and services that do not answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from cadenza_api.user_errors import ExitCode, FieldProblem, UserError, bullet_list

TRANSIENT = frozenset({429, 502, 503, 504})
"""Statuses that a restart or a full queue brings, and that pass."""


class Unreachable(UserError):
    """Nothing that speaks Cadenza's API answers at the URL."""

    exit_code = ExitCode.UNREACHABLE

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"no Cadenza service at {url}: {reason}; start one with `cadenza up`, "
            "or give the right address with --url or CADENZA_API_URL"
        )
        self.url = url
        self.reason = reason


class ApiError(UserError):
    """The service refused a request. The attributes are the members of its problem document (RFC 9457)."""

    exit_code = ExitCode.REFUSED

    def __init__(self, status: int, document: Mapping[str, Any]) -> None:
        self.status = status
        self.document = dict(document)
        self.code = str(document.get("code", ""))
        self.title = str(document.get("title", ""))
        self.detail = str(document.get("detail", ""))
        self.remedy = str(document.get("remedy") or "")
        self.errors = [_field_problem(error) for error in document.get("errors") or []]
        if not self.errors and document.get("field"):
            self.errors = [_field_problem({**document, "remedy": ""})]
        super().__init__(self._text())

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed in a moment."""
        return self.status in TRANSIENT

    def _text(self) -> str:
        text = bullet_list(
            self.detail or self.title or f"the service answered with status {self.status}", self.errors
        )
        return f"{text}\n{self.remedy}" if self.remedy and self.remedy not in text else text


def raise_for_problem(response: httpx.Response) -> None:
    """Raise ApiError if ``response``, whose body has been read, is not a success."""
    if response.is_success:
        return
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        kind = response.headers.get("content-type", "no content type")
        document = {
            "detail": f"{response.url} answered {response.status_code} {response.reason_phrase} with {kind}, which is "
            "not how Cadenza reports a problem; is something else at this address, or in between?"
        }
    raise ApiError(response.status_code, document)


def _field_problem(error: Mapping[str, Any]) -> FieldProblem:
    return FieldProblem(
        field=str(error.get("field") or ""),
        reason=str(error.get("reason") or error.get("detail") or "refused"),
        value=error.get("value"),
        remedy=str(error.get("remedy") or ""),
    )
