"""The link monitor: from two samples of a connection's sender to facts about its link. No socket, no clock.

The law, in one place. From the sender's counters between two samples, with T = ``QUEUE_TARGET_S``:

    goodput           = acknowledged bytes / busy time
    queueing delay q  = delay of a probe that met no traffic of ours, where one was sent (others' queue alone);
                        else smoothed RTT - least RTT of the last 60 s of this connection (our own queue included)
    c                 = max(q / (q + T), 1 - goodput / greatest goodput of 10 minutes, 10 · retransmitted share)
    congestion       += 0.3 · (c - congestion), c clipped to [0, 1]

The first term is the queue that LEDBAT steers by (Shalunov, Hazel, Iyengar, Kühlewind 2012, RFC 6817: target at most
100 ms), the second follows BBR's windowed maximum (Cardwell, Cheng, Gunn, Yeganeh, Jacobson 2016). What each of them
means, and does not, is told in docs/network.md.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import StrEnum
from typing import Final

import msgspec

from cadenza.plane.tcp_info import TcpInfo

QUEUE_TARGET_S: Final = 0.1
"""A queue of this delay counts as half congested. RFC 6817 allows no more."""
BASE_RTT_WINDOW_S: Final = 60.0
"""Long enough to hold a moment at which our own queue was empty, short enough to follow a new route."""
REFERENCE_WINDOW_S: Final = 600.0
"""After ten minutes at a lower rate the link is not congested any more: it is slower."""
SMOOTHING: Final = 0.3
"""Weight of the newest score: a lasting change shows by two thirds after three syncs."""
RETRANSMITTED_WEIGHT: Final = 10.0
"""A tenth of the bytes sent twice is as bad as it gets: loss-based congestion control then keeps hardly any window."""
MIN_ACKED_BYTES: Final = 64 * 1024
"""Below that, start-up and the last acknowledgement make up most of the time."""
MIN_BUSY_S: Final = 0.02
"""The kernel counts busy time in ticks of 1-10 ms; and what takes less is no problem of the network's."""
RECEIVER_LIMITED_SHARE: Final = 0.5
"""Above that, the sender mostly waited for the receiver's window: the sample tells its speed, not the network's."""


class LinkSample(msgspec.Struct, frozen=True, kw_only=True):
    """The sending side of one connection at one moment."""

    at_s: float
    """Monotonic seconds, on the clock of the machine that took the sample."""
    tcp: TcpInfo
    moved_bytes: int
    """What we handed to this connection since it began, headers included: our own count."""
    probe_rtt_s: float | None = None
    """Round trip of a small message that left while nothing of ours was under way: the least of a few, if any were sent.

    None as well where ``tcp.total_retrans`` grew meanwhile: one that was lost waited for a timer, not in a queue.
    """


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one transfer showed about one direction of a link."""

    bytes: int
    """Handed to the connection, by our own count."""
    busy_s: float
    """How long something was unacknowledged or unsent."""
    goodput_bytes_per_s: float
    reference_bytes_per_s: float
    """The greatest goodput of the last 10 minutes, this one included."""
    rtt_s: float
    """Smoothed round-trip time at the end of the transfer, so under its load."""
    base_rtt_s: float
    """The least one of the last 60 s."""
    queueing_delay_s: float
    """``rtt_s - base_rtt_s``: the queue that this transfer met, most of it its own on a slow link."""
    probe_delay_s: float | None
    """How much longer the probe took than the fastest one of 10 minutes: the queue of others. None without a probe."""
    retransmits: int
    """Segments sent again."""
    retransmitted_share: float
    """Bytes sent again over bytes sent."""
    rwnd_limited_share: float
    """The part of the busy time in which only the receiver's window held the sender back."""
    score: float
    """c of this transfer alone, 0 to 1."""
    congestion: float
    """The smoothed score: 0, as good as this link was lately, to 1."""


class LeftOut(StrEnum):
    """Why a pair of samples says nothing about the network."""

    UNSUPPORTED = "unsupported"
    """The kernel does not tell enough (Linux 4.10 does)."""
    SMALL = "small"
    """Fewer than 64 KiB were acknowledged."""
    BRIEF = "brief"
    """It took less than 20 ms."""
    RECEIVER = "receiver"
    """The receiver was the limit for more than half of the time."""


class _Best:
    """The least value of a sliding window of time, in amortised constant time: only what may still become it is kept."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._kept: deque[tuple[float, float]] = deque()

    def add(self, value: float, now: float) -> float:
        """The least value of the window that ends ``now``, with ``value`` in it."""
        while self._kept and self._kept[-1][1] >= value:
            self._kept.pop()
        self._kept.append((now, value))
        while self._kept[0][0] < now - self._window_s:
            self._kept.popleft()
        return self._kept[0][1]


class LinkMonitor:
    """Facts about one direction of one connection. Not thread-safe.

    Two samples make a pair: before a transfer, and once its last byte is acknowledged or the answer to it is there.
    The counters only grow, so a pair may span several transfers: to learn from small ones, keep the first sample.
    """

    def __init__(self) -> None:
        self.left_out: Counter[LeftOut] = Counter()
        """Pairs that said nothing, by reason."""
        self.latest: LinkFacts | LeftOut | None = None
        """What the last pair said, or why it said nothing; none before the first."""
        self._rtt = _Best(BASE_RTT_WINDOW_S)
        self._probe = _Best(REFERENCE_WINDOW_S)
        self._goodput = _Best(REFERENCE_WINDOW_S)
        self._congestion: float | None = None

    @property
    def congestion(self) -> float | None:
        """The smoothed score, 0 to 1; none before the first facts."""
        return self._congestion

    def observe(self, before: LinkSample, after: LinkSample, now: float) -> LinkFacts | None:
        """The facts of the time between two samples of the same connection, or none (see :attr:`left_out`).

        Args:
            now: monotonic seconds, never less than in an earlier call.

        Raises:
            ValueError: the samples are not of one connection, in this order.
        """
        if after.moved_bytes < before.moved_bytes or (after.tcp.bytes_acked or 0) < (
            before.tcp.bytes_acked or 0
        ):
            raise ValueError(
                f"moved_bytes goes from {before.moved_bytes} to {after.moved_bytes} and bytes_acked from "
                f"{before.tcp.bytes_acked} to {after.tcp.bytes_acked}: give two samples of one connection, the older first"
            )
        base_rtt_s = min(self._see_rtt(before, now), self._see_rtt(after, now))
        delay_s = self._probe_delay_s(after, now)
        reason = left_out(before.tcp, after.tcp)
        if reason is not None:
            self.left_out[reason] += 1
            self.latest = reason
            return None
        facts = self._facts(before, after, base_rtt_s, delay_s, now)
        self.latest, self._congestion = facts, facts.congestion
        return facts

    def _see_rtt(self, sample: LinkSample, now: float) -> float:
        # 0 stands for "not measured yet": as a minimum it would stay for a minute.
        rtt_s = sample.tcp.rtt_us / 1e6
        return self._rtt.add(rtt_s if rtt_s > 0 else float("inf"), now)

    def _probe_delay_s(self, sample: LinkSample, now: float) -> float | None:
        if sample.probe_rtt_s is None:
            return None
        return sample.probe_rtt_s - self._probe.add(sample.probe_rtt_s, now)

    def _facts(
        self, before: LinkSample, after: LinkSample, base_rtt_s: float, delay_s: float | None, now: float
    ) -> LinkFacts:
        busy_s = _grown(before.tcp.busy_us, after.tcp.busy_us) / 1e6
        goodput = _grown(before.tcp.bytes_acked, after.tcp.bytes_acked) / busy_s
        reference = -self._goodput.add(-goodput, now)
        queueing_delay_s = max(0.0, after.tcp.rtt_us / 1e6 - base_rtt_s)
        share = retransmitted_share(before.tcp, after.tcp)
        score = congestion_score(queueing_delay_s if delay_s is None else delay_s, goodput, reference, share)
        return LinkFacts(
            bytes=after.moved_bytes - before.moved_bytes,
            busy_s=busy_s,
            goodput_bytes_per_s=goodput,
            reference_bytes_per_s=reference,
            rtt_s=after.tcp.rtt_us / 1e6,
            base_rtt_s=base_rtt_s,
            queueing_delay_s=queueing_delay_s,
            probe_delay_s=delay_s,
            retransmits=after.tcp.total_retrans - before.tcp.total_retrans,
            retransmitted_share=share,
            rwnd_limited_share=_grown(before.tcp.rwnd_limited_us, after.tcp.rwnd_limited_us) / 1e6 / busy_s,
            score=score,
            congestion=smoothed(self._congestion, score),
        )


def congestion_score(
    queueing_delay_s: float, goodput: float, reference: float, retransmitted_share: float
) -> float:
    """c = max(q / (q + T), 1 - goodput / reference, 10 · retransmitted share), from 0 to 1."""
    queue = queueing_delay_s / (queueing_delay_s + QUEUE_TARGET_S)
    slower = 1 - goodput / reference
    return min(1.0, max(0.0, queue, slower, RETRANSMITTED_WEIGHT * retransmitted_share))


def smoothed(previous: float | None, score: float) -> float:
    """The next value of the smoothed score; the first one is the score itself."""
    return score if previous is None else previous + SMOOTHING * (score - previous)


def left_out(before: TcpInfo, after: TcpInfo) -> LeftOut | None:
    """Why the time between two samples says nothing about the network; none if it does."""
    if after.bytes_acked is None or after.busy_us is None or after.rwnd_limited_us is None:
        return LeftOut.UNSUPPORTED
    if _grown(before.bytes_acked, after.bytes_acked) < MIN_ACKED_BYTES:
        return LeftOut.SMALL
    busy_us = _grown(before.busy_us, after.busy_us)
    if busy_us < MIN_BUSY_S * 1e6:
        return LeftOut.BRIEF
    if _grown(before.rwnd_limited_us, after.rwnd_limited_us) > RECEIVER_LIMITED_SHARE * busy_us:
        return LeftOut.RECEIVER
    return None


def retransmitted_share(before: TcpInfo, after: TcpInfo) -> float:
    """Bytes sent again over bytes sent; by segments on kernels before 4.19, which count no such bytes."""
    if after.bytes_sent is not None and after.bytes_retrans is not None:
        sent = _grown(before.bytes_sent, after.bytes_sent)
        again: float = _grown(before.bytes_retrans, after.bytes_retrans)
    else:
        again = (after.total_retrans - before.total_retrans) * after.mss
        sent = _grown(before.bytes_acked, after.bytes_acked) + int(again)
    return min(1.0, again / sent) if sent else 0.0


def _grown(before: int | None, after: int | None) -> int:
    return (after or 0) - (before or 0)
