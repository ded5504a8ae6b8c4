"""What a request must pass before any route sees it: who sends it, from where, and how large it is.

Without a token the service listens on loopback only, yet a web page in the user's browser reaches loopback
too. So such a service answers only where it is addressed as this machine (against DNS rebinding) and refuses
requests that a page of another origin makes.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cadenza_api.server.problems import Problem
from cadenza_service.loopback import is_loopback
from cadenza_service.settings import Settings

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Probes carry no token."""

BODY_LIMIT_BYTES = 2**20
"""For every body but a package's, which has a limit of its own."""


class Guard:
    """ASGI middleware that refuses strangers and bodies that are too large."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._admit(scope)
            await self._app(scope, self._bounded(scope, receive), send)
        except Problem as problem:
            await problem.response()(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        if scope["path"] in OPEN_PATHS:
            return
        headers = Headers(scope=scope)
        if self._settings.token is None:
            _check_local(headers)
        else:
            _check_token(headers, self._settings.token.get_secret_value())

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        if scope["path"].startswith("/v1/packages/"):
            return receive
        return bounded(scope, receive, BODY_LIMIT_BYTES)


def bounded(scope: Scope, receive: Receive, limit_bytes: int) -> Receive:
    """``receive`` that raises Problem 413 beyond ``limit_bytes``; raises at once where the header announces more."""
    too_large = Problem(
        413, "body_too_large", f"the body has more than {limit_bytes} bytes, the limit; send less"
    )
    announced = Headers(scope=scope).get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise too_large
    seen_bytes = 0

    async def receive_some() -> Message:
        nonlocal seen_bytes
        message = await receive()
        seen_bytes += len(message.get("body", b""))
        if seen_bytes > limit_bytes:
            raise too_large
        return message

    return receive_some


def _check_token(headers: Headers, token: str) -> None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), token.encode()):
        raise Problem(
            401,
            "unauthorized",
            "the request carries no valid token",
            remedy="send 'Authorization: Bearer <token>' with the service's CADENZA_TOKEN",
            headers={"WWW-Authenticate": 'Bearer realm="cadenza"'},
        )


def _check_local(headers: Headers) -> None:
    host = headers.get("host", "")
    if not _names_loopback(f"//{host}"):
        raise Problem(
            403,
            "foreign_host",
            f"the request is addressed to {host!r}, not to this machine",
            remedy="use http://127.0.0.1, or set CADENZA_TOKEN to serve other names",
        )
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        raise Problem(
            403,
            "foreign_origin",
            f"the request comes from a page of {origin!r}",
            remedy="open the service's own page, or set CADENZA_TOKEN",
        )


def _names_loopback(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False
