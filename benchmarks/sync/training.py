"""Workers that train examples/charlm.py's model: under a session, under torch's DDP, or each alone."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
from benchmarks.sync.programs import connect
from examples.charlm import CONTEXT, CharacterModel, cross_entropy, load
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from cadenza.plane.link import Arrays
from cadenza.plane.messages import Request
from cadenza.plane.network import NetworkLink
from cadenza.training.session import Session

BATCH = 8


class Batches:
    """Random windows of the training text; the same for everybody who gives the same seed."""

    def __init__(self, codes: Tensor, seed: int) -> None:
        self._codes = codes
        self._random = torch.Generator().manual_seed(seed)

    def take(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [BATCH, CONTEXT]."""
        starts = torch.randint(0, len(self._codes) - CONTEXT - 1, (BATCH, 1), generator=self._random)
        windows = self._codes[starts + torch.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, 1:]


class Trainee:
    """One model with its optimizer and its data. All begin with the same weights.

    Args:
        worker: whose share of the data.
        codes: the text.
        vocabulary: how many characters there are.
        kind: of the optimizer.
        rate: its learning rate.
    """

    def __init__(
        self, worker: int, codes: Tensor, vocabulary: int, kind: type[SGD] | type[AdamW], rate: float
    ) -> None:
        torch.manual_seed(0)
        self.module = CharacterModel(vocabulary)
        self.model: nn.Module = self.module
        self.optimizer: Optimizer = kind(self.module.parameters(), lr=rate)
        self.losses: list[float] = []
        self._batches = Batches(codes, seed=worker)
        self._session: Session | None = None

    def join(self, link: NetworkLink) -> None:
        """Train in a job."""
        self._session = Session(self.module, self.optimizer, link=link).__enter__()

    def distribute(self, group: Any) -> None:
        """Train under torch's DDP."""
        self.model = DistributedDataParallel(self.module, process_group=group)

    def step(self) -> float:
        """One optimizer step; seconds that it took after the backward pass."""
        loss = cross_entropy(self.model, *self._batches.take())
        loss.backward()
        begun_at = time.perf_counter()
        if self._session is not None:
            self._session.step(loss, samples=BATCH)
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()
        took_s = time.perf_counter() - begun_at
        self.losses.append(loss.item())
        return took_s

    def steps(self, count: int) -> list[float]:
        """Seconds of each of ``count`` steps."""
        seconds = []
        for _ in range(count):
            begun_at = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begun_at)
        return seconds

    def parameters(self) -> Tensor:
        """All of them, flat."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.module.parameters()])


class WatchedLink(NetworkLink):
    """A link whose latest request can be waited for."""

    def begin(self, request: Request, values: Arrays, into: Arrays) -> Any:
        self.latest = super().begin(request, values, into)
        return self.latest


class Workshop:
    """A worker process's trainees by name."""

    def __init__(self, seat: dict[str, Any], optimizer: str) -> None:
        torch.set_num_threads(1)
        self._worker: int = seat["worker"]
        self._codes, _, self._vocabulary = load()
        self._optimizer = optimizer
        self._trainees: dict[str, Trainee] = {}
        self._links: dict[str, WatchedLink] = {}

    def alone(self, name: str) -> dict[str, Any]:
        """A new trainee without others; how many parameters it has."""
        kind, rate = {"sgd": (SGD, 0.1), "adamw": (AdamW, 1e-3)}[self._optimizer]
        self._trainees[name] = Trainee(self._worker, self._codes, self._vocabulary, kind, rate)
        return {"parameters": self._trainees[name].parameters().numel()}

    def join(self, name: str, seat: dict[str, Any]) -> None:
        """A new trainee in a job."""
        self.alone(name)
        link = self._links[name] = WatchedLink(connect(seat))
        self._trainees[name].join(link)

    def rendezvous(self, address: str, port: int, workers: int) -> None:
        """Meet the other workers for torch.distributed."""
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://{address}:{port}", rank=self._worker, world_size=workers
        )

    def distribute(self, name: str) -> None:
        """A new trainee under DDP, with connections of its own: they take the congestion control that the route has now."""
        self.alone(name)
        self._trainees[name].distribute(torch.distributed.new_group(backend="gloo"))

    def steps(self, name: str, count: int) -> dict[str, Any]:
        """Seconds of each step."""
        return {"seconds": self._trainees[name].steps(count)}

    def after_backward(self, name: str, count: int) -> dict[str, Any]:
        """Seconds after the backward pass in each of ``count`` steps."""
        return {"seconds": [self._trainees[name].step() for _ in range(count)]}

    def drain(self, name: str) -> None:
        """Wait until nothing is under way."""
        self._links[name].latest.result()

    def distance(self, one: str, other: str) -> dict[str, Any]:
        """The largest difference between two trainees' parameters."""
        difference = self._trainees[one].parameters() - self._trainees[other].parameters()
        return {"distance": float(difference.abs().max())}

    def loss(self, name: str, last: int) -> dict[str, Any]:
        """The mean training loss of the latest steps, and how many steps there were."""
        losses = self._trainees[name].losses
        return {"loss": statistics.fmean(losses[-last:]), "steps": len(losses)}
