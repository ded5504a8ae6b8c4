"""Shards without sockets: a core, both ends' real frames handed over by the test, and short ways to say all that."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.codecs import Compressor
from cadenza.plane.connection import Frame
from cadenza.plane.holdings import Holdings
from cadenza.plane.layout import NUMPY_TYPES, Cut, Layout, Tensor, Vector, as_bytes
from cadenza.plane.messages import (
    Answer,
    Assign,
    Decision,
    Key,
    Note,
    Part,
    Received,
    Reply,
    Request,
    Tentative,
    Units,
)
from cadenza.plane.shard_end import Incoming, ShardEnd
from cadenza_service.servers.answers import Outgoing, Work
from cadenza_service.servers.shard_core import ShardCore
from cadenza_service.servers.slots import Slot

Array = NDArray[Any]
PARAMETERS, BUFFERS, STATIC = "parameters.float32", "buffers.float32", "static.uint8"


def layout_of(parameters: int = 4, buffers: int = 2, static: int = 3, dtype: str = "float32") -> Layout:
    """A model whose vectors have these lengths; those of length 0 are left out."""
    vectors = (
        Vector("parameters", dtype, parameters),
        Vector("buffers", dtype, buffers),
        Vector("static", "uint8", static),
    )
    kept = tuple(vector for vector in vectors if vector.length)
    tensors = tuple(Tensor(v.role, v.dtype, (v.length,), v.name, 0) for v in kept)
    return Layout(kept, tensors, tuple(t.name for t in tensors if t.name == "parameters"))


def core_of(
    layout: Layout,
    mode: str = "local",
    shard: int = 0,
    shards: int = 1,
    *,
    unit: int = 16_384,
    groups: int = 1,
    codec: str = "fp32",
    **outer: Any,
) -> ShardCore:
    cut = Cut(shards, unit, striped=mode == "sync")
    assign = Assign(
        layout, shard, shards, mode, outer or {"name": "average"}, cut, codec=codec, groups=groups, seed=5
    )
    return ShardCore(assign)


def body(*values: float, dtype: str = "float32") -> memoryview:
    return as_bytes(np.array(values, NUMPY_TYPES[dtype]))


def update(seq: int = 1, vectors: tuple[str, ...] = (PARAMETERS, BUFFERS), **fields: Any) -> Request:
    return Request("update", seq, fields.pop("base_version", 0), vectors, samples=1, **fields)


def decision(index: int, version: int, **fields: Any) -> Decision:
    return Decision(index=index, epoch=1, round=fields.pop("round", index), version=version, **fields)


def merge(*weights: float, seq: int = 1) -> tuple[Part, ...]:
    return tuple(Part(Key(worker, 1, seq), weight, weight) for worker, weight in enumerate(weights))


def replies(*keys: Key, version: int = 1) -> tuple[Reply, ...]:
    return tuple(Reply(key, Note(version, 1, 1)) for key in keys)


def values_of(bodies: Iterable[memoryview], dtype: Any = np.float32) -> list[float]:
    return [float(value) for value in np.frombuffer(b"".join(bodies), dtype)]


def fresh(size: int) -> memoryview:
    """Memory for a frame that is decoded."""
    return memoryview(bytearray(size))


def hand_over(slot: Slot, message: Units, data: bytes | memoryview) -> None:
    """What a shard's connection does with a frame."""
    view = memoryview(data)
    targets = slot.destination(message, view.nbytes, fresh)
    for target in targets:
        target[:] = view[: target.nbytes]
        view = view[target.nbytes :]
    slot.accept(message, targets)


def frames_of(core: ShardCore, seq: int, values: dict[str, Array]) -> list[tuple[Units, memoryview]]:
    """The shard's slices of an update, a unit in each frame."""
    return [
        (
            Units(seq, place.vector, place.number, 1, "fp32", 0),
            as_bytes(np.ascontiguousarray(values[place.vector][place.start : place.stop])),
        )
        for place in core.holdings.places
    ]


def contribute(
    core: ShardCore, worker: int, seq: int, values: dict[str, Array], **fields: Any
) -> list[Received]:
    """An update of the shard's slices, unit by unit after its request."""
    news = core.request(worker, 1, update(seq, core.holdings.travelling, **fields))
    slot = core.slot(worker, 1)
    for message, data in frames_of(core, seq, values):
        hand_over(slot, message, data)
        news += core.news(slot)
    return news


def push(core: ShardCore, worker: int, seq: int, *bodies: memoryview) -> list[Received]:
    """An update whose slices are these bytes, in layout order."""
    values = {
        name: np.frombuffer(data, core.holdings.wire_type(name))
        for name, data in zip(core.holdings.travelling, bodies, strict=True)
    }
    return contribute(core, worker, seq, values)


def carry_out(core: ShardCore, entry: Decision | Tentative) -> Work:
    """Carry an entry of the log out, with all that is to compute."""
    work = core.decide(entry) if isinstance(entry, Decision) else core.tentative(entry)
    work.run()
    return work


def bodies_of(outgoing: Outgoing) -> list[memoryview]:
    """All bytes of an answer, in order; not copied."""
    frames = outgoing.values.frames() if outgoing.values is not None else ()
    return [*(data for frame in frames for data in frame.bodies), *outgoing.bodies]


class Peer:
    """A worker's end of its connection to one core."""

    def __init__(self, core: ShardCore, worker: int) -> None:
        assign = core.assign
        lengths = {v.name: v.length for v in assign.layout.vectors if v.role == "parameters"}
        self.worker = worker
        self.compressor = Compressor(assign.codec, lengths, seed=assign.seed, worker=worker)
        holdings = Holdings(assign.layout, assign.cut, assign.shard)
        self.end = ShardEnd(assign.shard, holdings, self.compressor, assign.seed)
        self.end.connection = SimpleNamespace(run_bytes=1 << 20)  # type: ignore[assignment]
        self.into: dict[str, Array] = {
            v.name: np.zeros(v.length, NUMPY_TYPES[v.dtype]) for v in assign.layout.vectors
        }
        self.changes: dict[str, Array] = {
            name: np.zeros_like(values)
            for name, values in self.into.items()
            if assign.mode != "sync" and holdings.answered_encoded(name, assign.codec)
        }
        self.answers: list[Answer] = []
        self._core = core

    def push(
        self,
        seq: int,
        values: dict[str, Array],
        turn: int = 0,
        packed: Collection[int] = (),
        positions: Sequence[int] | None = None,
    ) -> list[Received]:
        """Send an update; ``values`` are whole vectors."""
        self.end.incoming = Incoming(seq, self.into, self.changes)
        base = self.answers[-1].note.version if self.answers else 0
        request = update(seq, self._core.holdings.travelling, base_version=base)
        news = self._core.request(self.worker, 1, request)
        slot = self._core.slot(self.worker, 1)
        every = range(len(self.end.holdings.places)) if positions is None else positions
        for message, bodies, _ in self.end.frames(seq, turn, values, every, packed):
            assert isinstance(message, Units)
            hand_over(slot, message, b"".join(bodies))
            news += self._core.news(slot)
        return news

    def fetch(self, seq: int, base_version: int) -> list[Received]:
        """Ask for the committed values of all vectors."""
        self.end.incoming = Incoming(seq, self.into, self.changes)
        return self._core.request(self.worker, 1, Request("fetch", seq, base_version, tuple(self.into)))

    def pull(self, outgoing: Outgoing) -> None:
        """Receive an answer, or the part of it that is there."""
        for frame in outgoing.values.frames() if outgoing.values is not None else ():
            self._receive(frame)
        answer = outgoing.answer
        if answer is None:
            return
        data = b"".join(outgoing.bodies)
        for name, part in self.end.holdings.slices.items() if data else ():
            if name in answer.vectors:
                for piece in part.pieces(self.into[name]):
                    piece[:] = np.frombuffer(data[: piece.nbytes], piece.dtype)
                    data = data[piece.nbytes :]
        assert not data
        if answer.content == "change":
            for name, change in self.changes.items():
                self.into[name] += change
        self.answers.append(answer)

    def slice(self, name: str) -> Array:
        """What the worker holds of the shard's part of a vector."""
        return np.concatenate([self.into[name][:0], *self.end.holdings.slices[name].pieces(self.into[name])])

    def _receive(self, frame: Frame) -> None:
        message, bodies, _ = frame
        connection: Any = self.end.connection
        data = memoryview(b"".join(bodies))
        if data.nbytes:  # A frame without bytes asks for no buffers.
            for target in self.end.body(connection, message, data.nbytes):
                target[:] = data[: target.nbytes]
                data = data[target.nbytes :]
        assert not data.nbytes
        self.end.handle(connection, 0, message)
