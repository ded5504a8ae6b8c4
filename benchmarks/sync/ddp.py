"""A training step under a session in sync mode, beside torch's DistributedDataParallel over the same links.

All contenders are in the same two processes, with the same model, data and optimizer; blocks of their steps alternate.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

from benchmarks.netlab import Network
from benchmarks.sync.report import (
    Effort,
    Findings,
    Measured,
    own_congestion_control,
    system_congestion_control,
)
from benchmarks.sync.rig import Crew, Order, Servers

NODES = ("w0", "w1")
RATES = {"20": "20mbit", "100": "100mbit"}
CODECS = ("fp32", "int8")
PORT = 29_400
CHECKED_STEPS = 3
LARGEST_DISTANCE = 1e-5

DDP, DDP_AS_FOUND = "ddp", "ddp_as_found"
COMPARED = (DDP, *CODECS)


class Race:
    """The contenders on one network."""

    def __init__(self, network: Network, crew: Crew, jobs: dict[str, Servers]) -> None:
        self._crew = crew
        crew.open("workshop", "benchmarks.sync.training:Workshop", jobs["fp32"], optimizer="sgd")
        self._act("rendezvous", address=network.address(NODES[0]), port=PORT, workers=len(NODES))
        for name, algorithm in (
            (DDP, own_congestion_control()),
            (DDP_AS_FOUND, system_congestion_control()),
        ):
            for node in NODES:
                network.set_congestion_control(node, algorithm)
            self._act("distribute", name=name)
        for codec, servers in jobs.items():
            crew.act("workshop", "join", servers, name=codec)

    def warm_up(self) -> None:
        """The first steps; fp32's and DDP's parameters are the same afterwards, or RuntimeError is raised."""
        for name in COMPARED:
            self._act("steps", name=name, count=CHECKED_STEPS)
        if (distance := self.distance()) > LARGEST_DISTANCE:
            raise RuntimeError(f"after {CHECKED_STEPS} steps, fp32 and DDP differ by {distance:.2e}")

    def distance(self) -> float:
        """The largest difference between parameters of fp32 and DDP."""
        return max(float(each["distance"]) for each in self._act("distance", one=DDP, other="fp32"))

    def block_s(self, name: str, count: int) -> float:
        """Median seconds of ``count`` steps, after one that is not counted, since others went before it."""
        seen = self._act("steps", name=name, count=count + 1)
        return float(statistics.median(taken for each in seen for taken in each["seconds"][1:]))

    def losses(self) -> dict[str, float]:
        """Each contender's mean loss of its last steps."""
        return {
            name: statistics.fmean(each["loss"] for each in self._act("loss", name=name, last=8))
            for name in COMPARED
        }

    def _act(self, method: str, **arguments: Any) -> list[Order]:
        return self._crew.act("workshop", method, **arguments)


def measure(rate: str, effort: Effort) -> tuple[dict[str, list[float]], dict[str, object]]:
    """Seconds per step of each contender, by repetition; and what else there is to tell."""
    fast = rate == "100mbit"
    repetitions = effort.pick(5 if fast else 3, 9 if fast else 5)
    count = effort.pick(3 if fast else 2, 4 if fast else 3)
    as_found = effort.pick(1, 3)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        network = stack.enter_context(Network(("head", *NODES), rate=rate))
        jobs = {codec: stack.enter_context(_job(network, codec)) for codec in CODECS}
        race = Race(network, stack.enter_context(Crew(network, NODES)), jobs)
        race.warm_up()
        for repetition in range(repetitions):
            contenders = (*COMPARED, DDP_AS_FOUND) if repetition < as_found else COMPARED
            shift = repetition % len(contenders)
            for name in (*contenders[shift:], *contenders[:shift]):
                seconds[name].append(race.block_s(name, count))
        return dict(seconds), {"distance_at_the_end": race.distance(), "loss": race.losses()}


def _job(network: Network, codec: str) -> Servers:
    sync = {"mode": "sync", "codec": codec}
    return Servers(network, sync, workers=len(NODES), shards=NODES, coordinator="head")


def run(effort: Effort) -> Findings:
    """Both rates."""
    found = Findings()
    for label, rate in RATES.items():
        seconds, also = measure(rate, effort)
        for codec in CODECS:
            ratios = [own / theirs for own, theirs in zip(seconds[codec], seconds[DDP], strict=True)]
            found.fields[f"step_vs_ddp_{codec}_{label}"] = Measured.median(ratios)
        step_s = {name: statistics.median(taken) for name, taken in seconds.items()}
        as_found = {f"{codec}_vs_ddp_as_found": step_s[codec] / step_s[DDP_AS_FOUND] for codec in CODECS}
        found.also[label] = {"step_s": step_s, **as_found, **also}
    return found
