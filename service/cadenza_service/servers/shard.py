"""A shard's server: the data plane round :class:`cadenza_service.servers.shard_core.ShardCore`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np

from cadenza.plane.connection import Buffer, Connection, Handler, Refusal
from cadenza.plane.messages import Assign, Decision, Done, Key, Message, Publish, Read, Request, State
from cadenza.plane.transport import Server
from cadenza.plane.wire import Identity, ProtocolError, Role, Status
from cadenza_service.servers.shard_core import ShardCore

logger = logging.getLogger(__name__)


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
            elif self._core.assign != message:
                raise Refusal("assigned", "this shard already holds another layout")
        connection.reply(call, Done())

    def published(
        self, connection: Connection, call: int, message: Publish, bodies: Sequence[Buffer]
    ) -> None:
        with self._lock:
            self.core().publish(message, bodies)
        connection.reply(call, Done())

    def requested(
        self, connection: Connection, call: int, request: Request, bodies: Sequence[Buffer]
    ) -> None:
        identity = connection.identity
        key = Key(identity.worker, identity.incarnation, request.seq)
        with self._lock:
            received = self.core().request(identity.worker, identity.incarnation, request, bodies)
            if not self.core().waits(key):
                raise Refusal("answered", f"request {request.seq} was answered before")
            # A repeated request is not taken twice, but its answer goes to where it was last asked for.
            self._calls[key] = (connection, call)
            if received is not None and self._coordinator is not None:
                self._coordinator.send(received)

    def decided(self, decision: Decision) -> None:
        with self._lock:
            if decision.epoch < self._epoch:
                raise ProtocolError(f"a decision of epoch {decision.epoch}; epoch {self._epoch} has begun")
            for outgoing in self.core().decide(decision):
                connection, call = self._calls.pop(outgoing.key)
                connection.reply(call, outgoing.answer, outgoing.bodies)

    def read(self, connection: Connection, call: int, message: Read) -> None:
        with self._lock:
            core = self.core()
            connection.reply(call, State(core.version, core.round), core.read(message.vectors))


class _ShardHandler:
    """What the three kinds of connection share."""

    def __init__(self, shard: ShardServer) -> None:
        self._shard = shard

    def body(self, message: Message, length: int) -> Sequence[Buffer]:
        raise ProtocolError(f"an unexpected {type(message).__name__} with {length} bytes")

    def closed(self, connection: Connection, error: Exception | None) -> None:
        if error is not None:
            logger.info("the connection to %s ended: %s", connection.peer, error)


class _WorkerHandler(_ShardHandler):
    """A worker's data connection. Frames come one after another, so that one set of buffers is enough."""

    def __init__(self, shard: ShardServer) -> None:
        super().__init__(shard)
        self._bodies: list[Buffer] = []

    def body(self, message: Message, length: int) -> Sequence[Buffer]:
        try:
            core = self._shard.core()
        except Refusal as refusal:
            raise ProtocolError(str(refusal)) from None
        match message:
            case Publish(vectors=vectors):
                sizes = [part.size_bytes for part in core.slices(vectors)]
            case Request():
                sizes = [size for _, size in core.request_sizes(message)]
            case _:
                return super().body(message, length)
        if sum(sizes) != length:
            raise ProtocolError(f"{type(message).__name__} with {length} bytes; {sum(sizes)} are expected")
        self._bodies = [np.empty(size, np.uint8).data if size else memoryview(b"") for size in sizes]
        return [body for body in self._bodies if body.nbytes]

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        bodies, self._bodies = self._bodies, []
        match message:
            case Publish(vectors=vectors):
                self._shard.published(connection, call, message, bodies or self._empty(vectors))
            case Request(kind="update", vectors=vectors):
                self._shard.requested(connection, call, message, bodies or self._empty(vectors))
            case Request():
                self._shard.requested(connection, call, message, ())
            case _:
                raise ProtocolError(f"a worker sent {type(message).__name__}")

    def _empty(self, vectors: tuple[str, ...]) -> list[Buffer]:
        """Bodies for slices that hold nothing here: a frame without bytes never asks for buffers."""
        parts = self._shard.core().slices(vectors)
        if any(part.length for part in parts):
            raise ProtocolError("an update without its bytes")
        return [memoryview(b"") for _ in parts]


class _CoordinatorHandler(_ShardHandler):
    """The coordinator's connection: the layout, then its log."""

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        match message:
            case Assign():
                self._shard.assigned(connection, call, message)
            case Decision():
                self._shard.decided(message)
            case _:
                raise ProtocolError(f"the coordinator sent {type(message).__name__}")


class _ObserverHandler(_ShardHandler):
    """A connection that only reads committed state."""

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        if not isinstance(message, Read):
            raise ProtocolError(f"an observer sent {type(message).__name__}")
        self._shard.read(connection, call, message)
