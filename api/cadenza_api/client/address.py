"""Addresses of a service."""

from __future__ import annotations

import httpx

from cadenza_api.user_errors import UserError

DEFAULT_URL = "http://127.0.0.1:8000"


def checked(url: str) -> str:
    """``url``, if it is an http(s) address; raises UserError otherwise."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"{url!r} is not an address: {error}; give one such as {DEFAULT_URL}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"{url!r} is not an address; give one such as {DEFAULT_URL}")
    return url
