"""How long a client bears an outage of the service before it gives up."""

from __future__ import annotations

import time
from collections.abc import Callable

from cadenza_api.client.errors import ApiError, Unreachable

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 8.0


def _silent(message: str) -> None:
    """Nobody wants to know."""


class Patience:
    """Waits longer from one failed try to the next, and raises the failure once ``limit_s`` have been waited in a row.

    The delays double from 0.5 s to 8 s. ``tell`` hears of the first failure of each outage.
    """

    def __init__(
        self,
        limit_s: float,
        sleep: Callable[[float], None] = time.sleep,
        tell: Callable[[str], None] = _silent,
    ) -> None:
        self._limit_s = limit_s
        self._sleep = sleep
        self._tell = tell
        self._waited_s = 0.0
        self._delay_s = FIRST_DELAY_S

    def succeeded(self) -> None:
        """The service answers: the next outage is borne in full."""
        self._waited_s = 0.0
        self._delay_s = FIRST_DELAY_S

    def bear(self, error: ApiError | Unreachable) -> None:
        """Wait before the next try; raises ``error`` if it does not pass by itself or lasts too long."""
        passes = isinstance(error, Unreachable) or error.transient
        if not passes or self._waited_s >= self._limit_s:
            raise error
        if self._waited_s == 0:
            self._tell(f"the service does not answer, trying again for {self._limit_s:.0f} s: {error}")
        self._sleep(self._delay_s)
        self._waited_s += self._delay_s
        self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)
