"""Eight workers that all send 1 MB to one host at the same moment, again and again.

One way: the push half of rounds that are answered once all of it is there. Full duplex: rounds that are answered in
16 groups while later parts still come.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from benchmarks.netlab import Network
from benchmarks.netlab.shaping import GOODPUT_SHARE, transfer_s
from benchmarks.sync.report import Effort, Findings, Measured
from benchmarks.sync.rig import Crew, Servers

WORKERS = 8
LENGTH = 1 << 18
"""float32 values: 1 MiB."""

RATES = {"20": "20mbit", "100": "100mbit"}
SETTINGS = ("auto", "bbr")
"""Of CADENZA_CONGESTION_CONTROL. The first is the default, for which the bars are."""

GROUPS = {"one_way": 1, "full_duplex": 16}
WARM_UP_ROUNDS = 6
"""In which the plane learns the link's rate."""


@dataclass(frozen=True)
class Incast:
    """Rounds over the one-way limit: bytes of all workers, at the host's rate, over 0.956."""

    one_way: list[float]
    full_duplex: list[float]

    @property
    def goodput(self) -> float:
        """Payload over time, over the rate, in all one-way rounds together."""
        return GOODPUT_SHARE / statistics.fmean(self.one_way)

    @property
    def worst(self) -> float:
        return max(self.one_way)

    @property
    def fan_in(self) -> float:
        return statistics.median(self.full_duplex)


def measure(rate: str, setting: str, count: int) -> Incast:
    """``count`` rounds of each kind on a network of their own."""
    nodes = [f"w{number}" for number in range(WORKERS)]
    least_s = transfer_s(4 * LENGTH * WORKERS, rate)
    seen: defaultdict[str, list[float]] = defaultdict(list)
    with Network(("head", "host", *nodes), rate=rate) as network, Crew(network, nodes) as crew:
        for kind, groups in GROUPS.items():
            sync = {"mode": "local", "local_steps": 1, "overlap": "off", "groups": groups}
            with Servers(
                network,
                sync,
                workers=WORKERS,
                shards=["host"],
                coordinator="head",
                congestion_control=setting,
            ) as servers:
                crew.open(kind, "benchmarks.sync.programs:Pusher", servers, length=LENGTH)
                for number in range(WARM_UP_ROUNDS + count):
                    # Round by round: so all of them begin at the same moment.
                    workers = crew.act(kind, "rounds", count=1)
                    if number >= WARM_UP_ROUNDS:
                        seen[kind].append(SPANS[kind](workers) / least_s)
    return Incast(**seen)


def one_way_s(workers: list[dict[str, Any]]) -> float:
    """From the first worker's beginning to the first answer's: until then all bytes went one way."""
    return float(min(w["answered_at"][0] for w in workers) - min(w["begun_at"][0] for w in workers))


def round_s(workers: list[dict[str, Any]]) -> float:
    """From the first worker's beginning to the last answer's end."""
    return float(max(w["ended_at"][0] for w in workers) - min(w["begun_at"][0] for w in workers))


SPANS = {"one_way": one_way_s, "full_duplex": round_s}


def run(effort: Effort) -> Findings:
    """Both rates; the setting that has no bars in full only. A field has the worse of the rates."""
    found: dict[str, dict[str, Incast]] = {
        setting: {
            label: measure(rate, setting, effort.pick(3, 10) if label == "20" else effort.pick(6, 20))
            for label, rate in RATES.items()
        }
        for setting in SETTINGS[: effort.pick(1, 2)]
    }
    own = found[SETTINGS[0]].values()
    fields = {
        "incast_goodput": _worst(min, [each.goodput for each in own]),
        "incast_worst_round": _worst(max, [each.worst for each in own]),
        "fan_in_vs_limit": _worst(max, [each.fan_in for each in own]),
    }
    also = {
        setting: {
            label: {
                "goodput": each.goodput,
                "worst_round": each.worst,
                "fan_in": each.fan_in,
                "one_way_rounds": each.one_way,
                "full_duplex_rounds": each.full_duplex,
            }
            for label, each in by_rate.items()
        }
        for setting, by_rate in found.items()
    }
    return Findings(fields, also)


def _worst(of: Any, values: list[float]) -> Measured:
    return Measured(of(values), values)
