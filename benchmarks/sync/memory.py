"""Whether worker and shard hold more memory after ten thousand rounds than before."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.sync.programs import connect
from benchmarks.sync.report import Effort, Findings, Measured
from benchmarks.sync.rig import Crew, Loopback, Servers
from torch import nn
from torch.optim import SGD

from cadenza.plane.network import NetworkLink
from cadenza.training.session import Session

WORKERS = 2
WIDTH = 64
WARM_UP_ROUNDS = 500
SYNC = {"mode": "local", "local_steps": 1, "overlap": "off"}


class SmallTrainee:
    """A session round a model of one layer, so that rounds take no time."""

    def __init__(self, seat: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seat["worker"])
        self._model = nn.Linear(WIDTH, WIDTH)
        optimizer = SGD(self._model.parameters(), lr=1e-3)
        self._session = Session(self._model, optimizer, link=NetworkLink(connect(seat))).__enter__()

    def rounds(self, count: int) -> None:
        """``count`` steps, each with a round."""
        inputs = torch.ones(1, WIDTH)
        for _ in range(count):
            loss = self._model(inputs).square().mean()
            loss.backward()
            self._session.step(loss, samples=1)


def run(effort: Effort) -> Findings:
    """Two workers, one shard, and the coordinator, which is told of apart."""
    rounds = effort.pick(2_000, 10_000)
    places = Loopback()
    with (
        Servers(places, SYNC, workers=WORKERS, shards=["host"], coordinator="host") as servers,
        Crew(places, ["host"] * WORKERS) as crew,
    ):
        processes = {"coordinator": servers.head, "shard": servers.shards[0]}
        processes |= {f"worker_{number}": worker for number, worker in enumerate(crew.workers)}

        def resident_mb() -> dict[str, float]:
            return {name: process.ask("usage")["resident_bytes"] / 1e6 for name, process in processes.items()}

        crew.open("trainee", f"{__name__}:SmallTrainee", servers)
        crew.act("trainee", "rounds", count=WARM_UP_ROUNDS)
        before = resident_mb()
        crew.act("trainee", "rounds", count=rounds)
        after = resident_mb()
    growth = {name: after[name] - before[name] for name in processes}
    judged = [value for name, value in growth.items() if name != "coordinator"]
    return Findings(
        {"rss_growth_mb": Measured(max(judged), judged)},
        {"growth_mb": growth, "resident_mb": after, "rounds": rounds},
    )
