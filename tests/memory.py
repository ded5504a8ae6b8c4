"""A job without sockets or threads: the coordinator's core and the shards' cores, driven step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.codecs import as_bytes
from cadenza.plane.layout import Layout, Tensor, Vector, cut
from cadenza.plane.messages import Answer, Assign, Decision, Publish, Request, Span
from cadenza.spec import Mode
from cadenza_service.coordination.progress import TrainingProgress
from cadenza_service.coordination.rounds import Output, RoundRules, Rounds
from cadenza_service.servers.shard_core import ShardCore
from tests.harness import job_spec

Array = NDArray[Any]
VECTOR = "parameters.float64"


def vector_layout(length: int) -> Layout:
    """A model of one float64 parameter."""
    return Layout(
        vectors=(Vector("parameters", "float64", length),),
        tensors=(Tensor("w", "float64", (length,), VECTOR, 0),),
        trainable=("w",),
    )


@dataclass(frozen=True)
class Got:
    """An answer as a worker gets it."""

    answer: Answer
    values: Array


class MemoryJob:
    """Workers push float64 vectors; answers are kept until they are taken."""

    def __init__(
        self,
        length: int,
        *,
        mode: Mode,
        workers: int,
        shards: int = 2,
        staleness: int = 0,
        local_steps: int = 1,
        outer: dict[str, Any] | None = None,
    ) -> None:
        self.layout = vector_layout(length)
        self.length = length
        rules = RoundRules(mode, local_steps, staleness, epoch=1, shards=shards, round_timeout_s=60.0)
        self.rounds = Rounds(rules, TrainingProgress(job_spec()))
        self.shards = [
            ShardCore(Assign(self.layout, number, shards, mode, outer or {"name": "average"}))
            for number in range(shards)
        ]
        self.answers: dict[int, Got] = {}
        self.outputs: list[Output] = []
        self._seq = dict.fromkeys(range(workers), 0)
        self._parts: dict[int, dict[int, tuple[Answer, Array]]] = {}
        for worker in range(workers):
            self.rounds.join(worker, 1)
        self.rounds.start()

    def publish(self, values: Array) -> None:
        for number, shard in enumerate(self.shards):
            start, stop = cut(self.length, number, len(self.shards))
            shard.publish(Publish((VECTOR,)), [as_bytes(np.ascontiguousarray(values[start:stop]))])

    def push(
        self,
        worker: int,
        values: Array,
        *,
        base: int,
        samples: int = 1,
        steps: int = 1,
        seq: int | None = None,
        spans: tuple[Span, ...] = (),
    ) -> None:
        """Send one update to every shard, and carry out what follows."""
        if seq is None:
            self._seq[worker] += 1
            seq = self._seq[worker]
        request = Request(
            "update",
            seq,
            base,
            (VECTOR,),
            samples=samples,
            steps=steps,
            loss=0.0,
            present=b"\x01",
            spans=spans,
        )
        for number, shard in enumerate(self.shards):
            start, stop = cut(self.length, number, len(self.shards))
            received = shard.request(worker, 1, request, [as_bytes(np.ascontiguousarray(values[start:stop]))])
            if received is not None:
                self.carry_out(self.rounds.received(received, now=0.0))

    def carry_out(self, outputs: list[Output]) -> None:
        self.outputs += outputs
        for decision in outputs:
            if isinstance(decision, Decision):
                for number, shard in enumerate(self.shards):
                    for outgoing in shard.decide(decision):
                        values = np.frombuffer(b"".join(outgoing.bodies), np.float64)
                        self._parts.setdefault(outgoing.key.worker, {})[number] = (outgoing.answer, values)
        for worker, parts in list(self._parts.items()):
            if len(parts) == len(self.shards):
                del self._parts[worker]
                whole = np.concatenate([parts[number][1] for number in sorted(parts)])
                self.answers[worker] = Got(parts[0][0], whole)

    def take(self, worker: int) -> Got:
        """The answer that ``worker`` waits for; KeyError if it is not there yet."""
        return self.answers.pop(worker)

    def weights(self) -> Array:
        return np.concatenate(
            [np.frombuffer(b"".join(shard.read((VECTOR,))), np.float64) for shard in self.shards]
        )
