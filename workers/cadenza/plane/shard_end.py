"""A worker's end of its connection to one shard: updates go out unit by unit, and answers come in."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from cadenza.plane.codecs import Compressor, Turn, sparse
from cadenza.plane.connection import Buffer, Connection, Frame, NoRequests, Pending
from cadenza.plane.holdings import NATIVE, Holdings, Place
from cadenza.plane.layout import as_bytes
from cadenza.plane.link import Arrays
from cadenza.plane.messages import Message, Request, Units
from cadenza.plane.turns import Turns
from cadenza.plane.uplink import Lane
from cadenza.plane.wire import ProtocolError

SERVER = -1
"""A server's number where a codec draws at random."""


class Incoming:
    """Where the answer to one request goes."""

    def __init__(self, seq: int, into: Arrays, changes: Arrays) -> None:
        self.seq = seq
        self.into = into
        """The vectors themselves, for values that are exact, and for gradients."""
        self.changes = changes
        """Memory for changes, which may come again until the round is decided; empty in sync mode."""
        self.begun_at = 0.0
        """Monotonic seconds at which the first values came; 0 before."""


class ShardEnd(NoRequests):
    """One shard, seen from a worker.

    Args:
        number: the shard's.
        holdings: what the shard holds.
        compressor: encodes updates, and remembers what they left out.
        seed: the job's.
    """

    def __init__(self, number: int, holdings: Holdings, compressor: Compressor, seed: int) -> None:
        self.number = number
        self.holdings = holdings
        self.incoming: Incoming | None = None
        self._compressor = compressor
        self._codec = compressor.codec.name
        self._seed = seed
        self._scratch = bytearray()
        """The sender thread's."""
        self._received = bytearray()
        """The receiver thread's."""
        self._prepared = False
        """Whether the frame that is being received was given its buffers."""

    connection: Connection
    lane: Lane | None = None
    """None where the shard is on this host."""

    # --- sending ---

    def update(
        self,
        request: Request,
        values: Arrays,
        packed: Collection[int],
        turns: Turns | None,
        whole: Callable[[Message, int], Sequence[Buffer]],
    ) -> Pending:
        """Send a request, and every unit of its update; with ``turns``, after what was chained before.

        ``whole`` says where an answer's own bytes go, in case that the round was skipped.
        """
        pending = self.connection.call(self.telling(request), into=whole)
        every = range(len(self.holdings.places))
        frames = self.frames(request.seq, request.base_version, values, every, packed)
        self.connection.stream(turns.chain(self.connection, frames) if turns else frames, pending)
        return pending

    def telling(self, request: Request) -> Request:
        """The request, with what this shard should know of the link."""
        return request if self.lane is None else replace(request, link=self.lane.monitor.latest)

    def frames(
        self,
        seq: int,
        turn: int,
        values: Arrays,
        positions: Sequence[int],
        packed: Collection[int] = (),
        ready: Callable[[], None] | None = None,
    ) -> Iterator[Frame]:
        """Frames with the units at ``positions``; those in ``packed`` travel by themselves, without their zeros."""
        if ready is not None:
            ready()
        most = self.connection.run_bytes // 4
        for run in self.holdings.runs(positions, most):
            if packed and any(position in packed for position in run):
                for position in run:
                    one = range(position, position + 1)
                    yield self._frame(seq, turn, values, one, packed=position in packed)
            else:
                yield self._frame(seq, turn, values, run, packed=False)

    def _frame(self, seq: int, turn: int, values: Arrays, run: range, *, packed: bool) -> Frame:
        places = self.holdings.places[run.start : run.stop]
        vector = places[0].vector
        codec = self._codec if self.holdings.encoded(vector, self._codec) and not packed else NATIVE
        body: list[Buffer] = []
        if packed:
            data = sparse.pack(values[vector][places[0].unit.start : places[0].unit.stop])
            packed = data is not None
            body = [] if data is None else [memoryview(data)]
        if codec != NATIVE:
            body = self._encoded(places, values[vector], turn)
        elif not packed:
            body = [as_bytes(piece) for piece in _pieces(places, values[vector])]
        return Frame(Units(seq, vector, places[0].number, len(run), codec, turn, packed), body)

    def _encoded(self, places: Sequence[Place], vector: NDArray[Any], turn: int) -> list[Buffer]:
        sizes = [self._compressor.size_bytes(place.unit, turn) for place in places]
        if len(self._scratch) < sum(sizes):
            self._scratch = bytearray(sum(sizes))
        body = memoryview(self._scratch)[: sum(sizes)]
        start = 0
        for place, size in zip(places, sizes, strict=True):
            values = _wide(vector[place.unit.start : place.unit.stop])
            self._compressor.encode(values, place.unit, turn, body[start : start + size])
            start += size
        return [body]

    # --- receiving ---

    def body(self, connection: Connection, message: Message, length: int) -> Sequence[Buffer]:
        incoming = self._expected(message)
        if not isinstance(message, Units):
            return super().body(connection, message, length)
        self._prepared = True
        if not incoming.begun_at:
            incoming.begun_at = time.monotonic()
        positions = self.holdings.positions(message)
        if message.packed:
            self.holdings.check_packed(message, positions, length)
            return [self._memory(length)]
        size = self.holdings.size_bytes(message, positions)
        if size != length:
            raise ProtocolError(
                f"{length} bytes for {message.count} units of {message.vector}; {size} are expected"
            )
        if message.codec != NATIVE:
            return [self._memory(length)]
        places = self.holdings.places[positions.start : positions.stop]
        return [as_bytes(piece) for piece in _pieces(places, incoming.into[message.vector])]

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        incoming = self._expected(message)
        assert isinstance(message, Units)
        if not self._prepared:
            # A frame without bytes never asks for buffers; a packed unit of zeros is one.
            self.body(connection, message, 0)
        self._prepared = False
        if not message.packed and message.codec == NATIVE:
            return
        positions = self.holdings.positions(message)
        data = memoryview(self._received)
        target: NDArray[Any] = incoming.changes.get(message.vector, incoming.into[message.vector])
        for position in positions:
            place = self.holdings.places[position]
            values = target[place.unit.start : place.unit.stop]
            if message.packed:
                length = self._length
                sparse.unpack(data[:length], len(values), values)
                continue
            codec = self.holdings.codec(message)
            size = codec.size_bytes(place.unit, message.turn)
            codec.decode(data[:size], place.unit, Turn(self._seed, message.turn, SERVER), values)
            data = data[size:]

    def _expected(self, message: Message) -> Incoming:
        if not isinstance(message, Units):
            raise ProtocolError(f"shard {self.number} sent {type(message).__name__}")
        incoming = self.incoming
        if incoming is None or incoming.seq != message.seq:
            raise ProtocolError(
                f"shard {self.number} sent values for request {message.seq}, which is not open"
            )
        if message.vector not in incoming.into:
            raise ProtocolError(
                f"shard {self.number} sent values of {message.vector}, which were not asked for"
            )
        return incoming

    def _memory(self, size: int) -> memoryview:
        if len(self._received) < size:
            self._received = bytearray(size)
        self._length = size
        return memoryview(self._received)[:size]

    _length = 0


def _pieces(places: Sequence[Place], vector: NDArray[Any]) -> list[NDArray[Any]]:
    """Views of the units' values in the whole vector; neighbours are one."""
    edges: list[list[int]] = []
    for place in places:
        if edges and edges[-1][1] == place.unit.start:
            edges[-1][1] = place.unit.stop
        else:
            edges.append([place.unit.start, place.unit.stop])
    return [vector[start:stop] for start, stop in edges]


def _wide(values: NDArray[Any]) -> NDArray[Any]:
    """16-bit values as float32, which codecs work on."""
    return values.astype(np.float32) if values.dtype.itemsize < 4 else values
