"""A link's rate as arguments of the token bucket filter (tbf)."""

from __future__ import annotations

import re
from dataclasses import dataclass

UNITS_BPS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}

GOODPUT_SHARE = 0.956
"""The most of a rate that is TCP payload, at 1500 bytes MTU: 1448 of the 1514 bytes that tbf counts per frame."""

TICK_S = 1 / 250
"""A bucket smaller than what leaves within one kernel tick cannot reach its rate."""

SEGMENT_BYTES = 65_536 + 2_048
"""One segment as TCP hands it down (64 KiB, segmentation offload), with headers."""

FAST_BPS = 50e6
"""From here on a whole segment fits into the bucket; below it tbf cuts segments up, so that bursts stay short."""

SLOW_BURST_BYTES = 16_384
QUEUE_S = 0.05
QUEUE_FLOOR_BYTES = 131_072
"""Two full segments: less would drop what the sender's own TCP hands down at once. It is long at low rates, as the
buffers of cheap routers are: 0.2 s at 5 Mbit/s, 1 s at 1 Mbit/s."""


@dataclass(frozen=True)
class Bucket:
    """What tbf is told: its rate in bits per second, its bucket and its queue in bytes."""

    rate_bps: int
    burst_bytes: int
    queue_bytes: int

    def arguments(self) -> list[str]:
        """Arguments of ``tc qdisc … root``."""
        limit_bytes = self.queue_bytes + self.burst_bytes
        return f"tbf rate {self.rate_bps}bit burst {self.burst_bytes} limit {limit_bytes}".split()


def bits_per_second(rate: str) -> int:
    """``"100mbit"`` → 100,000,000; units are kbit, mbit, gbit. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    bits = float(match[1]) * UNITS_BPS[match[2]] if match else 0
    if bits < 1:
        raise ValueError(f"rate {rate!r}: give a number above 0 with kbit, mbit or gbit, such as '20mbit'")
    return int(bits)


def bucket(rate: str) -> Bucket:
    """The bucket and queue for a rate such as ``"20mbit"``."""
    rate_bps = bits_per_second(rate)
    fast = rate_bps >= FAST_BPS
    burst_bytes = max(rate_bps / 8 * TICK_S, SEGMENT_BYTES) if fast else SLOW_BURST_BYTES
    return Bucket(rate_bps, int(burst_bytes), int(max(rate_bps / 8 * QUEUE_S, QUEUE_FLOOR_BYTES)))


def transfer_s(size_bytes: int, rate: str) -> float:
    """The least seconds in which TCP can bring so many bytes over a link: bytes ÷ rate ÷ 0.956."""
    return size_bytes * 8 / bits_per_second(rate) / GOODPUT_SHARE
