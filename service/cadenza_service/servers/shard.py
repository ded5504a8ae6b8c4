"""A shard's server: the data plane round :class:`cadenza_service.servers.shard_core.ShardCore`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from cadenza.plane.connection import Buffer, Connection, Frame, Handler, Refusal
from cadenza.plane.inflow import Inflow
from cadenza.plane.messages import (
    BARRIER_MODES,
    Assign,
    Decision,
    Done,
    Key,
    Message,
    Publish,
    Read,
    Received,
    Request,
    State,
    Tentative,
    Units,
)
from cadenza.plane.transport import Server
from cadenza.plane.turns import Turns, rotation
from cadenza.plane.uplink import Lane, Uplink
from cadenza.plane.wire import Identity, ProtocolError, Role, Status
from cadenza_service.servers.answers import Outgoing
from cadenza_service.servers.shard_core import ShardCore
from cadenza_service.servers.slots import Slot

logger = logging.getLogger(__name__)

FLOAT_BYTES = 4


class ShardServer:
    """One shard of one job, listening on ``host`` at a port of the system's choice."""

    def __init__(self, host: str, key: bytes, epoch: int) -> None:
        """
        Args:
            host: the address to listen on.
            key: the job's key, 32 bytes; who does not know it is not served.
            epoch: the job's attempt; coordinators of earlier ones are refused.
        """
        self._lock = threading.RLock()
        self._epoch = epoch
        self._core: ShardCore | None = None
        self._coordinator: Connection | None = None
        self._calls: dict[Key, tuple[Connection, int]] = {}
        self._arrived: dict[Key, float] = {}
        """Monotonic seconds at which the latest part of a request that is not answered yet was there."""
        self._uplink = Uplink("auto")
        self._inflow = Inflow()
        self._server = Server(host, key, self._accept, self._handler)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to connect to."""
        return self._server.address

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._server.close()

    def _accept(self, identity: Identity) -> Status:
        if identity.role is Role.COORDINATOR:
            with self._lock:
                if identity.epoch < self._epoch:
                    return Status.STALE
                self._epoch = identity.epoch
        return Status.OK

    def _handler(self, identity: Identity) -> Handler:
        match identity.role:
            case Role.WORKER:
                return _WorkerHandler(self)
            case Role.COORDINATOR:
                return _CoordinatorHandler(self)
            case Role.OBSERVER:
                return _ObserverHandler(self)

    # --- what the handlers call ---

    def core(self) -> ShardCore:
        """The core; raises Refusal before the coordinator has assigned a layout."""
        if self._core is None:
            raise Refusal(
                "not_assigned",
                "the coordinator has not yet told this shard what it holds; connect again later",
            )
        return self._core

    def assigned(self, connection: Connection, call: int, message: Assign) -> None:
        with self._lock:
            self._coordinator = connection
            if self._core is None:
                self._core = ShardCore(message)
                self._uplink = Uplink(message.congestion_control)
            elif self._core.assign != message:
                raise Refusal("assigned", "this shard already holds another layout")
        connection.reply(call, Done())

    def published(
        self, connection: Connection, call: int, message: Publish, bodies: Sequence[Buffer]
    ) -> None:
        with self._lock:
            self.core().publish(connection.identity.worker, message, bodies)
        connection.reply(call, Done())

    def slot(self, connection: Connection) -> Slot:
        """The memory of the worker at the other end."""
        with self._lock:
            return self.core().slot(connection.identity.worker, connection.identity.incarnation)

    def lane(self, connection: Connection) -> Lane | None:
        """How answers travel on a connection; none where it stays within the host."""
        return self._uplink.add(connection)

    def left(self, connection: Connection) -> None:
        """A worker's connection has ended."""
        self._uplink.remove(connection)

    def came(self, length: int, begun_at: float) -> None:
        """So many bytes have come from another host, the first at ``begun_at``."""
        self._inflow.came(length, begun_at, time.monotonic())

    def received(self, slot: Slot) -> None:
        """More units of a worker's update are there."""
        with self._lock:
            self._tell(self.core().news(slot))

    def requested(self, connection: Connection, call: int, request: Request) -> None:
        identity = connection.identity
        key = Key(identity.worker, identity.incarnation, request.seq)
        with self._lock:
            news = self.core().request(identity.worker, identity.incarnation, request)
            # A repeated request is not taken twice, but its answer goes to where it was last asked for.
            self._calls[key] = (connection, call)
            self._inflow.seen(request.link)
            self._tell(news)

    def decided(self, entry: Decision | Tentative) -> None:
        with self._lock:
            if entry.epoch < self._epoch:
                raise ProtocolError(f"an entry of epoch {entry.epoch}; epoch {self._epoch} has begun")
            core = self.core()
            work = core.decide(entry) if isinstance(entry, Decision) else core.tentative(entry)
            turns = pace = None
            if core.assign.mode in BARRIER_MODES:
                turns = Turns()
                if work.outgoing and isinstance(entry, Decision):
                    self._uplink.settle(1)
                    pace = self._inflow.settle()
            now = time.monotonic()
            for outgoing in rotation(work.outgoing, core.assign.shard + 1):
                self._send(outgoing, now, turns, pace)
        work.run(self._lock)

    def _send(self, outgoing: Outgoing, now: float, turns: Turns | None, pace: float | None) -> None:
        connection, call = self._calls[outgoing.key]
        if outgoing.answer is not None:
            del self._calls[outgoing.key]
        waited_s = now - self._arrived.pop(outgoing.key, now) if outgoing.answer is not None else 0.0
        lane = self._uplink.lane(connection)
        frames = _frames(outgoing, connection, call, lane, decided_at=now, waited_s=waited_s, pace=pace)
        in_turn = turns is not None and not connection.local
        connection.stream(turns.chain(connection, frames) if turns and in_turn else frames)

    def _tell(self, news: Sequence[Received]) -> None:
        for received in news:
            self._arrived[received.key] = time.monotonic()
            if self._coordinator is not None:
                self._coordinator.send(received)

    def read(self, connection: Connection, call: int, message: Read) -> None:
        with self._lock:
            core = self.core()
            connection.reply(call, State(core.version, core.round), core.read(message.vectors))


def _frames(
    outgoing: Outgoing,
    connection: Connection,
    call: int,
    lane: Lane | None,
    *,
    decided_at: float,
    waited_s: float,
    pace: float | None,
) -> Iterator[Frame]:
    """An answer's values as they are computed, and then, if the round is decided, the answer itself."""
    seen = lane.monitor.latest if lane is not None else None
    begun_at = 0.0
    if lane is not None:
        lane.begin()
    if outgoing.values is not None:
        for frame in outgoing.values.frames(connection.run_bytes // FLOAT_BYTES):
            begun_at = begun_at or time.monotonic()
            yield frame
    if outgoing.answer is not None:
        served_s = max(begun_at - decided_at, 0.0)
        answer = replace(
            outgoing.answer, waited_s=waited_s, served_s=served_s, link=seen, pace_bytes_per_s=pace
        )
        yield Frame(answer, outgoing.bodies, answers=call)


class _ShardHandler:
    """What the three kinds of connection share."""

    def __init__(self, shard: ShardServer) -> None:
        self._shard = shard

    def body(self, connection: Connection, message: Message, length: int) -> Sequence[Buffer]:
        raise ProtocolError(f"an unexpected {type(message).__name__} with {length} bytes")

    def closed(self, connection: Connection, error: Exception | None) -> None:
        if error is not None:
            logger.info("the connection to %s ended: %s", connection.peer, error)


class _WorkerHandler(_ShardHandler):
    """A worker's data connection. Frames come one after another, so that one set of buffers is enough."""

    def __init__(self, shard: ShardServer) -> None:
        super().__init__(shard)
        self._bodies: Sequence[Buffer] = ()
        self._scratch = bytearray()
        self._lane: Lane | None = None
        self._begun_at = 0.0
        self._length = 0
        """When the latest units began to come, and how many bytes they are."""
        self._seq = 0
        """Of the request that comes in, or came last."""

    def body(self, connection: Connection, message: Message, length: int) -> Sequence[Buffer]:
        try:
            match message:
                case Units():
                    self._begun_at, self._length = time.monotonic(), length
                    slot = self._shard.slot(connection)
                    self._bodies = slot.destination(message, length, self._memory)
                    return self._bodies
                case Publish(vectors=vectors):
                    return self._published(vectors, length)
                case _:
                    return super().body(connection, message, length)
        except Refusal as refusal:
            raise ProtocolError(str(refusal)) from None

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        bodies, self._bodies = self._bodies, ()
        match message:
            case Units(seq=seq):
                self._heard(connection, seq)
                slot = self._shard.slot(connection)
                # A frame without bytes never asks for buffers; a packed unit of zeros is one.
                slot.accept(message, bodies or slot.destination(message, 0, self._memory))
                if self._lane is not None:
                    self._shard.came(self._length, self._begun_at)
                self._shard.received(slot)
            case Publish(vectors=vectors):
                self._shard.published(connection, call, message, bodies or self._empty(vectors))
            case Request(seq=seq):
                self._heard(connection, seq)
                self._shard.requested(connection, call, message)
            case _:
                raise ProtocolError(f"a worker sent {type(message).__name__}")

    def closed(self, connection: Connection, error: Exception | None) -> None:
        super().closed(connection, error)
        self._shard.left(connection)

    def _heard(self, connection: Connection, seq: int) -> None:
        """A new request shows that the answer to the one before has arrived as a whole."""
        if seq <= self._seq:
            return
        if not self._seq:
            self._lane = self._shard.lane(connection)
        elif self._lane is not None:
            self._lane.end(time.monotonic())
        self._seq = seq

    def _memory(self, size: int) -> memoryview:
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        return memoryview(self._scratch)[:size]

    def _published(self, vectors: tuple[str, ...], length: int) -> Sequence[Buffer]:
        sizes = [part.size_bytes for part in self._shard.core().slices(vectors)]
        if sum(sizes) != length:
            raise ProtocolError(f"a Publish with {length} bytes; {sum(sizes)} are expected")
        self._bodies = [np.empty(size, np.uint8).data if size else memoryview(b"") for size in sizes]
        return [body for body in self._bodies if body.nbytes]

    def _empty(self, vectors: tuple[str, ...]) -> list[Buffer]:
        """Bodies for slices that hold nothing here: a frame without bytes never asks for buffers."""
        parts = self._shard.core().slices(vectors)
        if any(part.length for part in parts):
            raise ProtocolError("values without their bytes")
        return [memoryview(b"") for _ in parts]


class _CoordinatorHandler(_ShardHandler):
    """The coordinator's connection: the layout, then its log."""

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        match message:
            case Assign():
                self._shard.assigned(connection, call, message)
            case Decision() | Tentative():
                self._shard.decided(message)
            case _:
                raise ProtocolError(f"the coordinator sent {type(message).__name__}")


class _ObserverHandler(_ShardHandler):
    """A connection that only reads committed state."""

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        if not isinstance(message, Read):
            raise ProtocolError(f"an observer sent {type(message).__name__}")
        self._shard.read(connection, call, message)
