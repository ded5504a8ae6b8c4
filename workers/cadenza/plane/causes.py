"""Where the time of a sync went, and what it was that cost it. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from cadenza.plane.monitor import LeftOut, LinkFacts

DOMINANT_SHARE: Final = 0.5
"""A part of the sync that takes more than half of it is what to look at."""
SLOWER_SHARE: Final = 0.8
"""Goodput below this part of the reference is a change; above, it is the usual scatter."""
LOSSY_SHARE: Final = 0.005
"""Reno's rate falls with 1/sqrt(loss) (Mathis, Semke, Mahdavi, Ott 1997); at half a percent it starts to hurt."""
OVERFLOW_BYTES: Final = 64 * 1024
"""Retransmissions beside a queue larger than this come from its overflow; beside a smaller one the link itself loses."""
PROBE_DELAY_S: Final = 0.005
"""The least of a few probes is late by less than that where a machine is merely busy."""


class Cause(StrEnum):
    """What dominated a sync's time."""

    NONE = "none"
    """Nothing stands out: it took what the link's usual rate costs."""
    SLOW_SHARD = "slow_shard"
    """The shard read slowly, or took long to answer once everything was there."""
    SLOW_WORKER = "slow_worker"
    """Others were waited for; or this worker read its answer slowly."""
    NETWORK_CONGESTED = "network_congested"
    """Somebody else's traffic shares the link: a queue was there before we sent."""
    LOWER_RATE = "lower_rate"
    """The link carries less than it did, and nobody else's queue is there (or no probe looked for it)."""
    LOSS = "loss"
    """Segments were lost though hardly any queue stood."""


class SyncSplit(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's sync in four parts that follow each other, in seconds. Each is what the ones before did not hide."""

    send_s: float
    """Until this worker's last byte was sent."""
    wait_s: float
    """Waiting for other workers' contributions."""
    serve_s: float
    """From the last contribution's arrival until the shard began to answer."""
    receive_s: float
    """The rest: the answer that did not arrive while something else was waited for."""

    @property
    def total_s(self) -> float:
        return self.send_s + self.wait_s + self.serve_s + self.receive_s


class Verdict(msgspec.Struct, frozen=True):
    """A cause, and the numbers that led to it."""

    cause: Cause
    reason: str


Observed = LinkFacts | LeftOut | None
"""What a monitor says about one direction: ``LinkMonitor.latest``."""


def split(started_s: float, sent_s: float, ended_s: float, waited_s: float, served_s: float) -> SyncSplit:
    """The parts of a sync.

    Args:
        started_s: monotonic seconds at the worker, when it began to send.
        sent_s: when its last byte was sent.
        ended_s: when the last byte of the answer was there.
        waited_s: at the shard, from the end of this worker's contribution to the end of the last one; 0 for the last.
        served_s: at the shard, from then to the answer's first byte that was not sent before.

    Raises:
        ValueError: the three moments are not in order, or a duration is negative.
    """
    if not started_s <= sent_s <= ended_s or min(waited_s, served_s) < 0:
        raise ValueError(
            f"started_s {started_s}, sent_s {sent_s} and ended_s {ended_s} must be in order, "
            f"waited_s {waited_s} and served_s {served_s} at least 0"
        )
    rest_s = ended_s - sent_s
    wait_s = min(waited_s, rest_s)
    serve_s = min(served_s, rest_s - wait_s)
    return SyncSplit(
        send_s=sent_s - started_s, wait_s=wait_s, serve_s=serve_s, receive_s=rest_s - wait_s - serve_s
    )


def held_up(arrived_s: dict[int, float]) -> tuple[int, float] | None:
    """Who came last, and for how many seconds everyone else was already there; none with fewer than two.

    Args:
        arrived_s: when each worker's contribution was complete, on one shard's clock.
    """
    if len(arrived_s) < 2:
        return None
    last = max(arrived_s, key=lambda worker: arrived_s[worker])
    return last, arrived_s[last] - max(at_s for worker, at_s in arrived_s.items() if worker != last)


def cause(push: Observed, answer: Observed, parts: SyncSplit) -> Verdict:
    """What dominated one worker's sync.

    Other people's slowness comes first, since it leaves the network idle: waiting for workers, then for the shard.
    Only then do the two directions of the link count, the slower one first.

    Args:
        push: the worker's monitor about what it sent.
        answer: the shard's monitor about what it sent to this worker.
    """
    total_s = parts.total_s
    if total_s > 0 and parts.wait_s > DOMINANT_SHARE * total_s:
        return Verdict(
            Cause.SLOW_WORKER, f"{parts.wait_s:.3f} s of {total_s:.3f} s passed until others had sent"
        )
    if total_s > 0 and parts.serve_s > DOMINANT_SHARE * total_s:
        return Verdict(Cause.SLOW_SHARD, f"{parts.serve_s:.3f} s of {total_s:.3f} s passed in the shard")
    if push is LeftOut.RECEIVER:
        return Verdict(Cause.SLOW_SHARD, "its receive window was full for more than half of the sending")
    if answer is LeftOut.RECEIVER:
        return Verdict(Cause.SLOW_WORKER, "its receive window was full for more than half of the answer")
    directions = [facts for facts in (push, answer) if isinstance(facts, LinkFacts)]
    for facts in sorted(directions, key=lambda facts: facts.score, reverse=True):
        verdict = network_cause(facts)
        if verdict.cause is not Cause.NONE:
            return verdict
    return Verdict(Cause.NONE, "the link carried what it usually does")


def network_cause(facts: LinkFacts) -> Verdict:
    """What one direction of the link suffers from."""
    slower = facts.goodput_bytes_per_s < SLOWER_SHARE * facts.reference_bytes_per_s
    lossy = facts.retransmitted_share > LOSSY_SHARE
    rate = f"{facts.goodput_bytes_per_s / 1e6:.2f} MB/s of {facts.reference_bytes_per_s / 1e6:.2f} MB/s"
    if (slower or lossy) and (facts.probe_delay_s or 0.0) > PROBE_DELAY_S:
        delay_ms = 1e3 * (facts.probe_delay_s or 0.0)
        return Verdict(Cause.NETWORK_CONGESTED, f"{rate}, and others' queue took {delay_ms:.1f} ms")
    # All of the queue, not our share of it, so at the rate of the whole link.
    queued_bytes = facts.queueing_delay_s * facts.reference_bytes_per_s
    if lossy and queued_bytes < OVERFLOW_BYTES:
        return Verdict(
            Cause.LOSS,
            f"{rate}; {facts.retransmitted_share:.1%} sent again beside a queue of {queued_bytes / 1e3:.0f} kB",
        )
    if slower:
        return Verdict(Cause.LOWER_RATE, f"{rate}, without a queue of others")
    return Verdict(Cause.NONE, rate)
