"""What a worker's syncs show of its link to the shards: one report out of all connections, both directions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cadenza.plane import causes
from cadenza.plane.flights import Moments
from cadenza.plane.messages import Answer, LinkReport
from cadenza.plane.monitor import LinkFacts
from cadenza.plane.uplink import Lane


class LinkObserver:
    """Keeps the latest report."""

    def __init__(self) -> None:
        self.latest: LinkReport | None = None
        """None while nothing is known."""
        self._retransmits = 0

    def landed(self, lanes: Sequence[Lane | None], answers: Sequence[Answer], moments: Moments) -> None:
        """A flight has landed: look at what it showed.

        Args:
            lanes: by shard; none where it is on this host.
            answers: by shard.
        """
        now = time.monotonic()
        pushes = [lane.end(now) for lane in lanes if lane is not None]
        pulls = [answer.link for answer, lane in zip(answers, lanes, strict=True) if lane is not None]
        up = [facts for facts in pushes if isinstance(facts, LinkFacts)]
        down = [facts for facts in pulls if isinstance(facts, LinkFacts)]
        self._retransmits += sum(facts.retransmits for facts in up)
        if not up:
            return
        slowest = max(answers, key=lambda answer: answer.waited_s + answer.served_s)
        parts = causes.split(*moments, slowest.waited_s, slowest.served_s)
        worst_up = max(up, key=lambda facts: facts.score)
        worst_down = max(down, key=lambda facts: facts.score, default=None)
        verdict = causes.cause(worst_up, worst_down, parts)
        self.latest = LinkReport(
            goodput_bytes_per_s=sum(facts.goodput_bytes_per_s for facts in up),
            rtt_s=max(facts.rtt_s for facts in up),
            queueing_delay_s=max(facts.queueing_delay_s for facts in [*up, *down]),
            congestion=max(facts.congestion for facts in [*up, *down]),
            retransmits=self._retransmits,
            cause=verdict.cause,
            reason=verdict.reason,
        )
