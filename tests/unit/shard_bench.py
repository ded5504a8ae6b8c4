"""A shard's server on a real port, with the coordinator's and the workers' connections in the test's hand."""

from __future__ import annotations

import threading
from typing import Any

from cadenza.plane.connection import Buffer, Connection, Frame, NoRequests, Pending
from cadenza.plane.layout import Layout
from cadenza.plane.messages import Assign, Done, Key, Message, Received, Units
from cadenza.plane.transport import connect
from cadenza.plane.wire import Identity, Role
from cadenza_service.servers.shard import ShardServer
from tests.unit.shards import PARAMETERS, update

SOON_S = 5.0
KEY = b"k" * 32


class Log(NoRequests):
    """The coordinator's end: keeps receipts."""

    def __init__(self) -> None:
        self.receipts: list[Received] = []
        self.arrived = threading.Condition()
        self.ended = threading.Event()

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        assert isinstance(message, Received)
        with self.arrived:
            self.receipts.append(message)
            self.arrived.notify_all()

    def closed(self, connection: Connection, error: Exception | None) -> None:
        self.ended.set()

    def wait_for(self, count: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.receipts) >= count, SOON_S)

    def wait_for_key(self, key: Key) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: any(each.key == key for each in self.receipts), SOON_S)


class Values(NoRequests):
    """A worker's end: puts answers' values together, in the order in which they come."""

    def __init__(self) -> None:
        self.received = b""
        self._buffer = bytearray()

    def body(self, connection: Connection, message: Message, length: int) -> list[Buffer]:
        self._buffer = bytearray(length)
        return [memoryview(self._buffer)]

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        assert isinstance(message, Units)
        self.received += self._buffer
        self._buffer = bytearray()


def sent(
    worker: Connection, seq: int, *bodies: memoryview, names: tuple[str, ...] = (PARAMETERS,)
) -> Pending:
    """An update with one unit per vector."""
    call = worker.call(update(seq, names))
    worker.stream(
        [Frame(Units(seq, name, 0, 1, "fp32", 0), [data]) for name, data in zip(names, bodies, strict=True)]
    )
    return call


class Bench:
    """A shard's server with a coordinator's connection in the test's hand."""

    def __init__(self) -> None:
        self.server = ShardServer("127.0.0.1", KEY, epoch=1)
        self.open: list[Connection] = []
        self.log = Log()
        self.coordinator = self.connect(Identity(Role.COORDINATOR, epoch=1), self.log)

    def connect(self, identity: Identity, handler: NoRequests | None = None) -> Connection:
        host, port = self.server.address
        connection = connect(host, port, KEY, identity, handler, peer="shard 0", timeout_s=SOON_S).start()
        self.open.append(connection)
        return connection

    def worker(self, number: int = 0) -> Connection:
        return self.connect(Identity(Role.WORKER, number, 1), Values())

    def close(self) -> None:
        for connection in self.open:
            connection.close()
        self.server.close()
        for connection in self.open:
            connection.join(SOON_S)

    def assign(self, layout: Layout, **fields: Any) -> None:
        assign = Assign(layout, 0, 1, "local", {"name": "average"}, **fields)
        assert self.coordinator.call(assign).result(SOON_S) == Done()
