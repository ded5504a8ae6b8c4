"""What many senders on other hosts send to one process, and at which rate they should: decided where all of it arrives.

If each sender followed its own figures, those that happen to be faster would get a larger part of the queue that all
meet in, and a round waits for the slowest. So a shard measures a round as a whole, and tells all workers one rate.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cadenza.plane.monitor import LeftOut, LinkFacts
from cadenza.plane.pacing import PacedRound, PaceState, first_pace, next_pace

LEAST_BYTES = 256 << 10
"""Of a round that says anything: in less, the senders' first moments are most of it."""


FIRST_SHARE = 0.8
"""Of the busiest window: what TCP had kept back behind a lost segment comes at once, up to a quarter above the rate. From
below, the pace finds the rate without a queue."""

WINDOW_S = 0.25
"""Some frames of each sender, even at 5 Mbit/s."""


def busiest(arrivals: Sequence[tuple[float, int]], window_s: float) -> float:
    """The greatest rate over any window of ``window_s`` or a little more, or over all where that is shorter.

    Args:
        arrivals: monotonic seconds, and how many bytes had come by then; at least two, in order.
    """
    rates = []
    start = 0
    for at_s, count in arrivals:
        while start + 1 < len(arrivals) and at_s - arrivals[start + 1][0] >= window_s:
            start += 1
        if at_s - arrivals[start][0] >= window_s:
            rates.append((count - arrivals[start][1]) / (at_s - arrivals[start][0]))
    if rates:
        return max(rates)
    (first_s, before), (last_s, after) = arrivals[0], arrivals[-1]
    return (after - before) / max(last_s - first_s, 1e-9)


class Inflow:
    """One round after another. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: PaceState | None = None
        self._bytes = 0
        self._arrivals: list[tuple[float, int]] = []
        """When how many bytes had come, in this round."""
        self._facts: list[LinkFacts] = []

    def came(self, length: int, begun_at: float, now: float) -> None:
        """So many bytes of a sender on another host have arrived, of which the first at ``begun_at``."""
        with self._lock:
            if not self._bytes:
                self._arrivals.append((begun_at, 0))
            self._bytes += length
            self._arrivals.append((now, self._bytes))

    def seen(self, facts: LinkFacts | LeftOut | None) -> None:
        """What a sender says of its latest transfer."""
        if isinstance(facts, LinkFacts):
            with self._lock:
                self._facts.append(facts)

    def settle(self) -> float | None:
        """A round is over: the rate of the next, in bytes/s of all senders together; none while nothing is known."""
        with self._lock:
            if self._bytes >= LEAST_BYTES:
                self._follow()
            self._bytes = 0
            self._arrivals.clear()
            self._facts.clear()
            return None if self._state is None else self._state.rate_bytes_per_s

    def _follow(self) -> None:
        took_s = self._arrivals[-1][0] - self._arrivals[0][0]
        if took_s <= 0:
            return
        if self._state is None:
            # Workers begin the first round one after another: only its busiest time shows what the link carries.
            self._state = first_pace(FIRST_SHARE * busiest(self._arrivals, WINDOW_S))
            return
        count = max(len(self._facts), 1)
        seen = PacedRound(
            delivered_bytes_per_s=self._bytes / took_s,
            queueing_delay_s=max((facts.queueing_delay_s for facts in self._facts), default=0.0),
            retransmitted_share=sum(facts.retransmitted_share for facts in self._facts) / count,
        )
        self._state = next_pace(self._state, seen)
