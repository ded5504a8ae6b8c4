"""One round of a vector as large as charlm's, a shard on each worker's node, beside what the links allow."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from benchmarks.netlab import Network
from benchmarks.netlab.shaping import transfer_s
from benchmarks.sync.report import Effort, Findings, Measured
from benchmarks.sync.rig import Crew, Servers

LENGTH = 1_288_448
"""float32 values: 5.15 MB."""

SYNC = {"mode": "local", "local_steps": 1, "overlap": "off"}
CASES = {"2w_100": (2, "100mbit"), "2w_20": (2, "20mbit"), "3w_100": (3, "100mbit"), "3w_20": (3, "20mbit")}
WARM_UP_ROUNDS = 2
"""In which the plane learns the links' rate."""


@dataclass(frozen=True)
class Rounds:
    """Some rounds of one case."""

    by_worker: list[list[float]]
    """Each worker's rounds, over the limit."""
    commit_shares: list[float]
    """Of each round: the time in which all had arrived, and no answer had begun."""

    @property
    def typical(self) -> float:
        """The median over workers of the median over rounds."""
        return statistics.median(statistics.median(rounds) for rounds in self.by_worker)


def limit_s(workers: int, rate: str) -> float:
    """A round's least time: each worker's link carries the other shards' parts one way, and its own from the others the
    other way; the answers double that. 2 (W - 1) / W of the vector each way, at the rate, over 0.956."""
    return transfer_s(4 * LENGTH * 2 * (workers - 1) // workers, rate)


def measure(workers: int, rate: str, count: int) -> Rounds:
    """``count`` rounds on a network of their own."""
    nodes = [f"w{number}" for number in range(workers)]
    with (
        Network(("head", *nodes), rate=rate) as network,
        Servers(network, SYNC, workers=workers, shards=nodes, coordinator="head") as servers,
        Crew(network, nodes) as crew,
    ):
        crew.open("pusher", "benchmarks.sync.programs:Pusher", servers, length=LENGTH)
        crew.act("pusher", "rounds", count=WARM_UP_ROUNDS)
        seen = crew.act("pusher", "rounds", count=count)
        moments = [shard.ask("moments", count=count)["moments"] for shard in servers.shards]
    least_s = limit_s(workers, rate)
    return Rounds([[taken / least_s for taken in durations(each)] for each in seen], commits(seen, moments))


def durations(seen: dict[str, Any]) -> list[float]:
    """Seconds of each of a worker's rounds."""
    return [
        ended_at - begun_at for begun_at, ended_at in zip(seen["begun_at"], seen["ended_at"], strict=True)
    ]


def commits(seen: list[dict[str, Any]], moments: list[list[list[float]]]) -> list[float]:
    """By round, the commit's share: from when the last shard had everything until the last one knew of the decision and
    could begin to answer.

    Args:
        seen: by worker.
        moments: by shard and round, when the last update was there, and when the decision was; the clocks are one
            machine's.
    """
    shares = []
    taken = [durations(each) for each in seen]
    for number in range(len(taken[0])):
        arrived_at = max(shard[number][0] for shard in moments)
        decided_at = max(shard[number][1] for shard in moments)
        begun_s = min(each["served_s"][number] for each in seen)
        round_s = statistics.median(each[number] for each in taken)
        shares.append((decided_at - arrived_at + begun_s) / round_s)
    return shares


def run(effort: Effort) -> Findings:
    """All cases, in alternation."""
    found: defaultdict[str, list[Rounds]] = defaultdict(list)
    for _ in range(effort.pick(1, 3)):
        for case, (workers, rate) in CASES.items():
            found[case].append(measure(workers, rate, effort.pick(*counts(rate))))
    fields = {
        f"round_vs_limit_{case}": Measured(
            statistics.median(each.typical for each in runs),
            [taken for each in runs for rounds in each.by_worker for taken in rounds],
        )
        for case, runs in found.items()
    }
    commit = {
        case: statistics.median(share for each in runs for share in each.commit_shares)
        for case, runs in found.items()
    }
    fields["commit_cost"] = Measured(max(commit.values()), list(commit.values()))
    limits = {case: limit_s(workers, rate) for case, (workers, rate) in CASES.items()}
    return Findings(fields, {"commit_share_by_case": commit, "limit_s": limits, "values": LENGTH})


def counts(rate: str) -> tuple[int, int]:
    """Rounds at a time, quick and in full."""
    return (9, 15) if rate == "100mbit" else (5, 7)
