"""How much of a sync disappears behind local steps, where these take about as long as the transfer.

In local mode with ``overlap: on``, in two workers with a shard beside each: charlm steps without a sync, a sync without
steps, and steps with syncs under way, in alternation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.netlab import Network
from benchmarks.sync.report import Effort, Findings, Measured
from benchmarks.sync.rig import Crew, Order, Servers

NODES = ("w0", "w1")
RATES = {"20": "20mbit", "100": "100mbit"}
WARM_UP_STEPS = 2
PROBED_STEPS = 30

PLAIN, ALONE, OVERLAPPED = "plain", "alone", "overlapped"


@dataclass
class Course:
    """What was measured at one rate, in seconds."""

    local_steps: int
    """Steps between two syncs."""
    steps_s: list[float] = field(default_factory=list)
    """So many steps without a sync."""
    sync_s: list[float] = field(default_factory=list)
    """A sync that is waited for."""
    with_s: list[float] = field(default_factory=list)
    """So many steps while a sync is under way, and what is left to wait for."""

    def add(self, kind: str, track: Track) -> None:
        """Measure one thing once."""
        match kind:
            case "plain":
                self.steps_s.append(track.steps_s(PLAIN, self.local_steps))
            case "alone":
                self.sync_s.append(track.sync_s(2))
            case "overlapped":
                self.with_s.append(track.overlapped_s(2))

    @property
    def hidden(self) -> list[float]:
        """By repetition, 1 − (with − without) ÷ sync alone."""
        return [
            1 - (both - steps) / sync
            for steps, sync, both in zip(self.steps_s, self.sync_s, self.with_s, strict=True)
        ]


class Track:
    """Three trainees in each of two workers: one alone, one that waits at every step, one that overlaps."""

    def __init__(self, stack: ExitStack, network: Network) -> None:
        self._stack = stack
        self._network = network
        waiting = self._job({"mode": "local", "local_steps": 1, "overlap": "off"})
        self._crew = stack.enter_context(Crew(network, NODES))
        self._crew.open("workshop", "benchmarks.sync.training:Workshop", waiting, optimizer="adamw")
        self._act("alone", name=PLAIN)
        self._crew.act("workshop", "join", waiting, name=ALONE)
        self.sync_s(WARM_UP_STEPS)
        # The quicker quarter: were the machine busy just now, there would be too few steps afterwards.
        seen = _all(self._act("steps", name=PLAIN, count=PROBED_STEPS))
        step_s = statistics.quantiles(seen, n=4)[0]
        self.local_steps = math.ceil(self.sync_s(2) / step_s)
        overlapping = self._job({"mode": "local", "local_steps": self.local_steps, "overlap": "on"})
        self._crew.act("workshop", "join", overlapping, name=OVERLAPPED)

    def steps_s(self, name: str, count: int) -> float:
        """Seconds that ``count`` steps took, the mean of both workers."""
        seen = self._act("steps", name=name, count=count)
        return statistics.fmean(sum(each["seconds"]) for each in seen)

    def sync_s(self, count: int) -> float:
        """Median seconds of a sync alone: after the backward pass, less the optimizer's step, and without what one
        worker waited because the other's backward pass took longer."""
        own_s = statistics.median(_all(self._act("after_backward", name=PLAIN, count=count)))
        seen = self._act("after_backward", name=ALONE, count=count)
        by_round = zip(*(each["seconds"] for each in seen), strict=True)
        return float(statistics.median(min(workers) for workers in by_round) - own_s)

    def overlapped_s(self, intervals: int) -> float:
        """Seconds of an interval of steps with a sync under way from its beginning; nothing is under way afterwards."""
        # Steps that end with the sending of a contribution; nothing is under way before.
        self.steps_s(OVERLAPPED, self.local_steps)
        taken_s = self.steps_s(OVERLAPPED, intervals * self.local_steps)
        self._act("drain", name=OVERLAPPED)
        return taken_s / intervals

    def _job(self, sync: dict[str, Any]) -> Servers:
        servers = Servers(self._network, sync, workers=len(NODES), shards=NODES, coordinator="head")
        return self._stack.enter_context(servers)

    def _act(self, method: str, **arguments: Any) -> list[Order]:
        return self._crew.act("workshop", method, **arguments)


def measure(rate: str, repetitions: int) -> Course:
    """All three in alternation."""
    with ExitStack() as stack:
        track = Track(stack, stack.enter_context(Network(("head", *NODES), rate=rate)))
        course = Course(track.local_steps)
        for repetition in range(repetitions):
            for kind in (PLAIN, ALONE, OVERLAPPED) if repetition % 2 == 0 else (OVERLAPPED, ALONE, PLAIN):
                course.add(kind, track)
    return course


def run(effort: Effort) -> Findings:
    """Both rates."""
    found = Findings()
    for label, rate in RATES.items():
        repetitions = effort.pick(3, 7) if label == "20" else effort.pick(6, 15)
        course = measure(rate, repetitions)
        found.fields[f"overlap_hidden_{label}"] = Measured.median(course.hidden)
        found.also[label] = {
            "local_steps": course.local_steps,
            "steps_over_sync": statistics.median(course.steps_s) / statistics.median(course.sync_s),
            "steps_s": course.steps_s,
            "sync_s": course.sync_s,
            "with_s": course.with_s,
        }
    return found


def _all(seen: Iterable[Order]) -> list[float]:
    return [taken for each in seen for taken in each["seconds"]]
