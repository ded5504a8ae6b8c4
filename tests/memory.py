"""A job without sockets or threads: the coordinator's core and the shards' cores, driven step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.connection import Refusal
from cadenza.plane.layout import Cut, Layout, Tensor, Vector, as_bytes
from cadenza.plane.messages import Answer, Assign, Decision, Publish, Request, Span, Tentative, Units
from cadenza.spec import Mode
from cadenza_service.coordination.progress import TrainingProgress
from cadenza_service.coordination.rounds import Output, RoundRules, Rounds
from cadenza_service.servers.answers import Values
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
        groups: int = 1,
        unit: int = 4,
    ) -> None:
        self.layout = vector_layout(length)
        self.length = length
        rules = RoundRules(
            mode, local_steps, staleness, epoch=1, shards=shards, round_timeout_s=60.0, groups=groups
        )
        self.rounds = Rounds(rules, TrainingProgress(job_spec()))
        self.shards = [
            ShardCore(
                Assign(
                    self.layout,
                    number,
                    shards,
                    mode,
                    outer or {"name": "average"},
                    Cut(shards, unit),
                    groups=groups,
                )
            )
            for number in range(shards)
        ]
        self.answers: dict[int, Got] = {}
        self.outputs: list[Output] = []
        self._seq = dict.fromkeys(range(workers), 0)
        self._parts: dict[int, dict[int, Answer]] = {}
        """Answers by worker and shard, until all shards have answered."""
        self._pulled: dict[int, Array] = {}
        """What each worker was sent, where it lies in the whole vector."""
        for worker in range(workers):
            self.rounds.join(worker, 1)
        self.rounds.start()

    def publish(self, values: Array) -> None:
        for shard in self.shards:
            (part,) = shard.slices((VECTOR,))
            shard.publish(0, Publish((VECTOR,)), [as_bytes(np.concatenate([values[:0], *part.pieces(values)]))])

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
        for shard in self.shards:
            self._push_values(shard, worker, seq, base, values)
            try:
                news = shard.request(worker, 1, request)
            except Refusal:  # It was answered before.
                continue
            for received in news:
                self.carry_out(self.rounds.received(received, now=0.0))

    def _push_values(self, shard: ShardCore, worker: int, seq: int, base: int, values: Array) -> None:
        slot = shard.slot(worker, 1)
        for place in shard.holdings.places:
            message = Units(seq, VECTOR, place.number, 1, "fp32", base)
            body = as_bytes(np.ascontiguousarray(values[place.unit.start : place.unit.stop]))
            (target,) = slot.destination(message, body.nbytes, lambda size: memoryview(bytearray(size)))
            target[:] = body
            slot.accept(message, [target])

    def carry_out(self, outputs: list[Output]) -> None:
        self.outputs += outputs
        for entry in outputs:
            if isinstance(entry, Decision | Tentative):
                for number, shard in enumerate(self.shards):
                    self._carry_out(number, shard, entry)
        for worker, parts in list(self._parts.items()):
            if len(parts) == len(self.shards):
                del self._parts[worker]
                self.answers[worker] = Got(parts[0], self._pulled[worker].copy())

    def _carry_out(self, number: int, shard: ShardCore, entry: Decision | Tentative) -> None:
        work = shard.decide(entry) if isinstance(entry, Decision) else shard.tentative(entry)
        work.run()
        for outgoing in work.outgoing:
            worker = outgoing.key.worker
            pulled = self._pulled.setdefault(worker, np.zeros(self.length))
            if outgoing.values is not None:
                self._pull(shard, outgoing.values, pulled)
            if outgoing.answer is not None:
                if outgoing.bodies:
                    (part,) = shard.slices((VECTOR,))
                    whole = np.frombuffer(b"".join(outgoing.bodies), np.float64)
                    for unit, place in zip(part.units, shard.holdings.places, strict=True):
                        pulled[unit.start : unit.stop] = whole[place.start : place.stop]
                self._parts.setdefault(worker, {})[number] = outgoing.answer

    def _pull(self, shard: ShardCore, values: Values, pulled: Array) -> None:
        for frame in values.frames():
            assert isinstance(frame.message, Units)
            for position, body in zip(shard.holdings.positions(frame.message), frame.bodies, strict=True):
                unit = shard.holdings.places[position].unit
                pulled[unit.start : unit.stop] = np.frombuffer(body, np.float64)

    def take(self, worker: int) -> Got:
        """The answer that ``worker`` waits for; KeyError if it is not there yet."""
        return self.answers.pop(worker)

    def weights(self) -> Array:
        weights = np.zeros(self.length)
        for shard in self.shards:
            (body,) = shard.read((VECTOR,))
            values = np.frombuffer(body, np.float64)
            for place in shard.holdings.places:
                weights[place.unit.start : place.unit.stop] = values[place.start : place.stop]
        return weights
