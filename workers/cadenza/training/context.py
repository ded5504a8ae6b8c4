"""Which job the code that runs now belongs to, if any.

The worker process activates its link round the user's function, and :func:`cadenza.join` finds it here. The value
is a context variable: threads that a test starts for several workers each have their own, and a thread that the
user's code starts by itself has none, because a session belongs to the thread that trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cadenza.plane.link import Link

_link: ContextVar[Link | None] = ContextVar("cadenza_link", default=None)


def current() -> Link | None:
    """The link to the job that this code runs in; none outside a job."""
    return _link.get()


@contextmanager
def activate(link: Link) -> Iterator[None]:
    """Make ``link`` the current one inside the block."""
    token = _link.set(link)
    try:
        yield
    finally:
        _link.reset(token)
