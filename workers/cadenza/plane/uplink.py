"""Everything that one process sends to other hosts: watched by the link monitor, tuned and paced together.

A worker has one for its updates, a shard one for its answers. Connections within a host are left alone.
"""

from __future__ import annotations

import threading
from collections import deque

from cadenza.plane.congestion import TransportPlan, choosable, plan_for
from cadenza.plane.connection import Connection
from cadenza.plane.monitor import LeftOut, LinkFacts, LinkMonitor, LinkSample

REMEMBERED_ROUNDS = 16
GROWTH = 1.05
"""Above the best of the rounds that are remembered: a rate that only followed what was achieved could only fall."""


class Lane:
    """One connection to another host: its monitor, and the sample that the next facts begin with."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.monitor = LinkMonitor()
        self.least_rtt_s: float | None = None
        """The kernel's own minimum. Too low by a little where packets queue nowhere, which does no harm to a size of a
        buffer; the monitor's base is too high where our own bulk transfers are all that it sees."""
        self.fresh: LinkFacts | None = None
        """What the latest transfer showed, until a round is settled with it."""
        self._before: LinkSample | None = None

    def begin(self) -> None:
        """A transfer begins. Where the latest one was too small to say anything, it goes on."""
        if self._before is None:
            self._before = self.connection.sample()

    def end(self, now: float) -> LinkFacts | LeftOut | None:
        """The transfer has arrived as a whole: what it showed."""
        before, after = self._before, self.connection.sample()
        if before is None or after is None:
            return None
        if after.tcp.min_rtt_us is not None:
            self.least_rtt_s = after.tcp.min_rtt_us / 1e6
        facts = self.monitor.observe(before, after, now)
        if facts is not None:
            self.fresh = facts
        if self.monitor.latest not in (LeftOut.SMALL, LeftOut.BRIEF):
            self._before = None
        return self.monitor.latest


class Uplink:
    """The lanes of one process. Thread-safe.

    Args:
        setting: what ``CADENZA_CONGESTION_CONTROL`` says.

    Raises:
        CongestionControlError: this process may not choose what was set.
    """

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._lock = threading.Lock()
        self._lanes: dict[Connection, Lane] = {}
        self._plan: TransportPlan | None = None
        self._goodputs: deque[float] = deque(maxlen=REMEMBERED_ROUNDS)

    def add(self, connection: Connection) -> Lane | None:
        """Take a connection in; none where it stays within the host."""
        if connection.local:
            connection.tune(plan_for(self._setting, choosable(), 1, None, None, local=True))
            return None
        with self._lock:
            lane = self._lanes[connection] = Lane(connection)
            plan = self._plan
        connection.tune(plan or plan_for(self._setting, choosable(), 1, None, None))
        return lane

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._lanes.pop(connection, None)

    def lane(self, connection: Connection) -> Lane | None:
        """The lane of a connection; none where it stays within the host."""
        return self._lanes.get(connection)

    def settle(self, fan_in: int, pace_bytes_per_s: float | None = None) -> None:
        """A round is over: choose how to send in the next one.

        Args:
            fan_in: connections that share the narrowest link at a time, by this process's best knowledge.
            pace_bytes_per_s: at which rate all of these together should send, if whoever they send to has said so.
        """
        with self._lock:
            lanes = list(self._lanes.values())
            facts = [lane.fresh for lane in lanes if lane.fresh is not None]
            if not facts:
                return
            for lane in lanes:
                lane.fresh = None
            self._goodputs.append(sum(f.goodput_bytes_per_s for f in facts) / len(facts))
            rate = pace_bytes_per_s or GROWTH * fan_in * max(self._goodputs)
            known = [lane.least_rtt_s for lane in lanes if lane.least_rtt_s is not None]
            rtt_s = min(known) if known else min(f.base_rtt_s for f in facts)
            plan = plan_for(self._setting, choosable(), fan_in, rate, rtt_s)
            changed, self._plan = plan != self._plan, plan
        if changed:
            for lane in lanes:
                lane.connection.tune(plan)
