"""The coordinator's connections: which message goes to which of its methods."""

from __future__ import annotations

from typing import Protocol

from cadenza.plane.connection import Connection, NoRequests
from cadenza.plane.messages import (
    Evaluating,
    Failed,
    Finish,
    Join,
    Lease,
    Log,
    Message,
    Notice,
    Published,
    Ready,
    Received,
    Report,
    Telemetry,
)
from cadenza.plane.wire import ProtocolError


class WorkerEvents(Protocol):
    """What workers can tell or ask a coordinator."""

    def greeted(self, connection: Connection) -> None: ...
    def disconnected(self, connection: Connection, error: Exception | None) -> None: ...
    def join(self, connection: Connection, call: int, message: Join) -> None: ...
    def ready(self, connection: Connection, call: int) -> None: ...
    def lease(self, connection: Connection, call: int, message: Lease) -> None: ...
    def evaluating(self, connection: Connection, call: int) -> None: ...
    def finish(self, connection: Connection, call: int) -> None: ...
    def published(self, connection: Connection, call: int) -> None: ...
    def failed(self, connection: Connection, message: Failed) -> None: ...
    def report(self, worker: int, message: Report) -> None: ...
    def telemetry(self, worker: int, message: Telemetry) -> None: ...
    def log(self, worker: int, message: Log) -> None: ...
    def notice(self, worker: int, message: Notice) -> None: ...


class ShardEvents(Protocol):
    """What shards can tell a coordinator."""

    def received(self, message: Received) -> None: ...
    def shard_lost(self, number: int, error: Exception | None) -> None: ...


class WorkerControl:
    """A worker's control connection."""

    def __init__(self, coordinator: WorkerEvents) -> None:
        self._coordinator = coordinator
        self._greeted = False

    def body(self, connection: Connection, message: Message, length: int) -> list[memoryview]:
        raise ProtocolError(f"an unexpected {type(message).__name__} with {length} bytes")

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        if not self._greeted:
            self._coordinator.greeted(connection)
            self._greeted = True
        coordinator, worker = self._coordinator, connection.identity.worker
        match message:
            case Join():
                coordinator.join(connection, call, message)
            case Ready():
                coordinator.ready(connection, call)
            case Lease():
                coordinator.lease(connection, call, message)
            case Evaluating():
                coordinator.evaluating(connection, call)
            case Finish():
                coordinator.finish(connection, call)
            case Published():
                coordinator.published(connection, call)
            case Failed():
                coordinator.failed(connection, message)
            case Report():
                coordinator.report(worker, message)
            case Telemetry():
                coordinator.telemetry(worker, message)
            case Log():
                coordinator.log(worker, message)
            case Notice():
                coordinator.notice(worker, message)
            case _:
                raise ProtocolError(f"a worker sent the coordinator {type(message).__name__}")

    def closed(self, connection: Connection, error: Exception | None) -> None:
        self._coordinator.disconnected(connection, error)


class ShardLog(NoRequests):
    """The coordinator's connection to one shard."""

    def __init__(self, coordinator: ShardEvents, number: int) -> None:
        self._coordinator = coordinator
        self._number = number

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        if not isinstance(message, Received):
            raise ProtocolError(f"a shard sent the coordinator {type(message).__name__}")
        self._coordinator.received(message)

    def closed(self, connection: Connection, error: Exception | None) -> None:
        self._coordinator.shard_lost(self._number, error)
