"""A parameter server's core: committed weights, waiting contributions, and what a decision does to them.

Pure state: no socket, no thread, no clock. Everything follows from the requests that arrived and from the
coordinator's log, whose entries are carried out in order, so that all shards of a job agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.codecs import CODECS, as_bytes
from cadenza.plane.connection import Refusal
from cadenza.plane.layout import NUMPY_TYPES, Slice, accumulator
from cadenza.plane.messages import Answer, Assign, Decision, Key, Part, Publish, Received, Reply, Request
from cadenza.plane.wire import ProtocolError
from cadenza_service.servers.aggregate import ServerOptimizer, server_optimizer, weighted_sum

Array = NDArray[Any]


@dataclass(frozen=True)
class Outgoing:
    """An answer for one request, with the arrays that are its body, in wire form."""

    key: Key
    answer: Answer
    bodies: tuple[memoryview, ...]


@dataclass(frozen=True)
class _Round:
    """sync: what one committed round answered, kept for a worker that is evaluating."""

    version: int
    present: bytes
    bodies: dict[str, memoryview]


class ShardCore:
    """One shard of one job."""

    def __init__(self, assign: Assign) -> None:
        self.assign = assign
        self.version = 0
        self.round = 0
        self.record: Decision | None = None
        """The latest commit's record, kept with the weights."""
        layout = assign.layout
        self._slices = {
            part.vector: part for part in layout.slices(assign.shard, assign.shards, layout.every())
        }
        self._roles = {vector.name: vector.role for vector in layout.vectors}
        self._state: dict[str, Array] = {
            name: np.zeros(
                part.length, NUMPY_TYPES["uint8"] if part.dtype == "uint8" else accumulator(part.dtype)
            )
            for name, part in self._slices.items()
        }
        self._optimizers: dict[str, ServerOptimizer] = {
            name: server_optimizer(assign.outer) for name in self._slices if self._roles[name] == "parameters"
        }
        self._index = 0
        self._requests: dict[Key, tuple[Request, dict[str, Array]]] = {}
        self._last_seq: dict[tuple[int, int], int] = {}
        self._incarnations: dict[int, int] = {}
        self._history: deque[_Round] = deque()

    # --- sizes ---

    def request_sizes(self, request: Request) -> list[tuple[Slice, int]]:
        """Each slice in an update's body with its bytes; raises ProtocolError for anything but a well-formed update."""
        if request.kind != "update":
            raise ProtocolError(f"a request of kind {request.kind} with a body")
        if request.vectors != self.assign.layout.travelling():
            raise ProtocolError(
                f"an update of {request.vectors} instead of {self.assign.layout.travelling()}"
            )
        codec = CODECS.get(request.codec)
        if codec is None:
            raise ProtocolError(f"an update in the unknown codec {request.codec!r}")
        return [(self._slices[name], codec.size_bytes(self._slices[name])) for name in request.vectors]

    def slices(self, vectors: Iterable[str]) -> list[Slice]:
        """The shard's slices of the named vectors; raises ProtocolError on an unknown name."""
        names = tuple(vectors)
        unknown = [name for name in names if name not in self._slices]
        if unknown:
            raise ProtocolError(f"vectors that the layout does not have: {', '.join(unknown)}")
        return [self._slices[name] for name in self._slices if name in names]

    # --- events ---

    def publish(self, message: Publish, bodies: Sequence[memoryview]) -> None:
        """A worker's values of whole vectors become the committed ones."""
        for part, body in zip(self.slices(message.vectors), bodies, strict=True):
            values = np.frombuffer(body, NUMPY_TYPES[part.dtype])
            self._state[part.vector] = values.astype(self._state[part.vector].dtype)

    def request(
        self, worker: int, incarnation: int, request: Request, bodies: Sequence[memoryview]
    ) -> Received | None:
        """A worker's request is complete; none is returned where it is already known.

        Raises:
            Refusal: it comes from an old incarnation of the worker.
            ProtocolError: it is not well-formed.
        """
        key = Key(worker, incarnation, request.seq)
        if incarnation < self._incarnations.get(worker, incarnation):
            raise Refusal("stale_incarnation", f"worker {worker} has been replaced by a newer incarnation")
        if request.seq <= self._last_seq.get((worker, incarnation), 0):
            return None
        values, finite = self._decode(request, bodies)
        self._incarnations[worker] = incarnation
        self._last_seq[worker, incarnation] = request.seq
        self._requests[key] = (request, values)
        return Received(
            shard=self.assign.shard,
            key=key,
            kind=request.kind,
            base_version=request.base_version,
            samples=request.samples,
            steps=request.steps,
            loss=request.loss,
            finite=finite,
            present=request.present,
            spans=request.spans,
            reason=request.reason,
        )

    def waits(self, key: Key) -> bool:
        """Whether a request is here and not answered yet."""
        return key in self._requests

    def _decode(self, request: Request, bodies: Sequence[memoryview]) -> tuple[dict[str, Array], bool]:
        """An update's values by vector, and whether all are finite."""
        if request.kind != "update":
            self.slices(request.vectors)
            return {}, True
        parts = [part for part, _ in self.request_sizes(request)]
        codec = CODECS[request.codec]
        values = {part.vector: codec.decode(body, part) for part, body in zip(parts, bodies, strict=True)}
        return values, all(bool(np.isfinite(array).all()) for array in values.values())

    def decide(self, decision: Decision) -> list[Outgoing]:
        """Carry out the next entry of the coordinator's log, and return the answers that it releases."""
        if decision.index != self._index + 1:
            raise ProtocolError(f"entry {decision.index} of the coordinator's log after entry {self._index}")
        self._index = decision.index
        self.round = decision.round
        gradient = self._merge(decision) if decision.parts else None
        self.version = decision.version
        if gradient is not None and decision.keep_after is not None:
            self._history.append(_Round(decision.version, decision.present, gradient))
        for key in decision.discard:
            self._drop_values(key)
        answers = [self._answer(reply, decision, gradient) for reply in decision.replies]
        self._forget(decision.keep_after)
        return answers

    def _forget(self, keep_after: int | None) -> None:
        while self._history and (keep_after is None or self._history[0].version <= keep_after):
            self._history.popleft()

    def read(self, vectors: Iterable[str]) -> list[memoryview]:
        """The committed values of the named vectors, in their own types, in layout order."""
        return [self._wire(part.vector) for part in self.slices(vectors)]

    # --- merging ---

    def _merge(self, decision: Decision) -> dict[str, memoryview] | None:
        """Apply a commit; in sync mode return its answer: mean gradients, and committed buffers."""
        self.record = decision
        sync = self.assign.mode == "sync"
        answer: dict[str, memoryview] = {}
        for name in self.assign.layout.travelling():
            total = self._aggregate(name, decision.parts)
            if sync and self._roles[name] == "parameters":
                answer[name] = _to_wire(total, self._slices[name])
                continue
            optimizer = self._optimizers.get(name)
            state = self._state[name]
            self._state[name] = state + total if optimizer is None else optimizer.step(state, total)
            answer[name] = self._wire(name)
        for part in decision.parts:
            self._drop_values(part.key)
        return answer if sync else None

    def _aggregate(self, name: str, parts: Sequence[Part]) -> Array:
        buffers = self._roles[name] == "buffers"
        weights = [part.buffer_weight if buffers else part.weight for part in parts]
        return weighted_sum([self._requests[part.key][1][name] for part in parts], weights)

    def _drop_values(self, key: Key) -> None:
        request, _ = self._requests[key]
        self._requests[key] = (request, {})

    # --- answering ---

    def _answer(self, reply: Reply, decision: Decision, gradient: dict[str, memoryview] | None) -> Outgoing:
        request, _ = self._requests.pop(reply.key)
        if request.kind == "fetch":
            return self._answer_fetch(reply, request)
        names = self.assign.layout.travelling()
        if self.assign.mode != "sync":
            return self._weights(reply, names)
        if gradient is None:
            return Outgoing(reply.key, Answer("unchanged", reply.note), ())
        answer = Answer("gradient", reply.note, names, present=(decision.present,))
        return Outgoing(reply.key, answer, tuple(gradient[name] for name in names))

    def _answer_fetch(self, reply: Reply, request: Request) -> Outgoing:
        if request.base_version == self.version:
            return Outgoing(reply.key, Answer("unchanged", reply.note), ())
        if self.assign.mode == "sync" and request.base_version >= 0:
            return self._replay(reply, request)
        return self._weights(reply, request.vectors)

    def _weights(self, reply: Reply, names: Iterable[str]) -> Outgoing:
        parts = self.slices(names)
        answer = Answer("weights", reply.note, tuple(part.vector for part in parts))
        return Outgoing(reply.key, answer, tuple(self._wire(part.vector) for part in parts))

    def _replay(self, reply: Reply, request: Request) -> Outgoing:
        missed = [kept for kept in self._history if kept.version > request.base_version]
        if [kept.version for kept in missed] != list(range(request.base_version + 1, self.version + 1)):
            # The coordinator never lets an evaluating worker fall behind what is kept, so this is a bug's last net.
            raise ProtocolError(f"version {request.base_version} is older than the rounds that are kept")
        names = self.assign.layout.travelling()
        answer = Answer("gradients", reply.note, names, present=tuple(kept.present for kept in missed))
        return Outgoing(reply.key, answer, tuple(kept.bodies[name] for kept in missed for name in names))

    def _wire(self, name: str) -> memoryview:
        return _to_wire(self._state[name], self._slices[name])


def _to_wire(values: Array, part: Slice) -> memoryview:
    """The values in the vector's own type. Arrays are never written to again, so that a view is safe to send later."""
    return as_bytes(np.ascontiguousarray(values, dtype=NUMPY_TYPES[part.dtype]))
