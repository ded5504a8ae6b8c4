"""When bytes that enter an imitated path may leave it: pure arithmetic, without sockets or clocks.

A path delays everything by the same time, lets at most its rate through (first come, first served, over all
connections), and loses segments. TCP above a proxy cannot lose bytes, so that a loss is imitated by what it costs in
order-preserving delivery: each lost segment holds up its connection, and all that comes behind it there, for the time
of one retransmission. The sender learns nothing of it: its window does not shrink, and it retransmits nothing. Real
losses within one flight are often repaired together, so this is the pessimistic end; real senders also slow down
after a loss (Mathis, Semke, Mahdavi, Ott 1997: rate ∝ segment ÷ (RTT · √p)), which is not imitated.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from benchmarks.netlab.shaping import bits_per_second

SEGMENT_BYTES = 1448


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What one direction of a path does to bytes."""

    delay_ms: float = 0.0
    """Added to everything, the same for all: half a round-trip time where both directions have it."""

    rate: str | None = None
    """Such as ``"20mbit"``, of payload; None for no limit."""

    loss: float = 0.0
    """Chance that a segment of 1448 bytes is lost, from 0 to below 1."""

    retransmission_ms: float = 200.0
    """What a lost segment costs: Linux's least retransmission timeout; one round-trip time imitates fast repair."""

    def __post_init__(self) -> None:
        for name in ("delay_ms", "retransmission_ms"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} {getattr(self, name)}: give 0 or more milliseconds")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss {self.loss}: give a chance from 0 to below 1")
        if self.rate is not None:
            bits_per_second(self.rate)

    def sending_s(self, size_bytes: int) -> float:
        """How long so many bytes occupy the path."""
        return size_bytes * 8 / bits_per_second(self.rate) if self.rate else 0.0


@dataclass
class Road:
    """One direction of a path, shared by its connections."""

    free_at_s: float = 0.0
    """When all that has entered so far has been sent."""

    def send(self, size_bytes: int, now_s: float, conditions: Conditions) -> float:
        """Take bytes in; returns when the last of them arrives, if none is lost."""
        self.free_at_s = max(now_s, self.free_at_s) + conditions.sending_s(size_bytes)
        return self.free_at_s + conditions.delay_ms / 1000


@dataclass
class Order:
    """One direction of a connection: nothing overtakes, and what is behind a lost segment waits with it."""

    random: random.Random
    passed_bytes: int = 0
    arrived_s: float = field(default=0.0)

    def deliver(self, size_bytes: int, arrives_s: float, conditions: Conditions) -> float:
        """When these bytes are delivered that arrive at ``arrives_s`` if none is lost.

        One draw for each segment that the connection completes, so that how the bytes are cut up changes nothing.
        """
        before = self.passed_bytes // SEGMENT_BYTES
        self.passed_bytes += size_bytes
        segments = self.passed_bytes // SEGMENT_BYTES - before
        lost = sum(self.random.random() < conditions.loss for _ in range(segments))
        self.arrived_s = max(arrives_s, self.arrived_s) + lost * conditions.retransmission_ms / 1000
        return self.arrived_s
