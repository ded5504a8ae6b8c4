"""A worker's connection to the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from cadenza.plane.connection import Connection, NoRequests, Pending, RefusedError
from cadenza.plane.link import LinkError
from cadenza.plane.messages import Ended, Failed, Log, Message, Notice, Stream
from cadenza.plane.transport import connect
from cadenza.plane.wire import Identity, ProtocolError, Role

CONTROL_TIMEOUT_S = 60.0
"""A control call is one small message each way; a coordinator that needs longer is lost."""

_Reply = TypeVar("_Reply", bound=Message)


class Control:
    """A worker's connection to the coordinator. Thread-safe."""

    def __init__(self, connection: Connection, worker: int, incarnation: int, key: bytes) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.key = key
        self._connection = connection

    @classmethod
    def connect(
        cls, host: str, port: int, key: bytes, *, worker: int, incarnation: int, timeout_s: float = 10.0
    ) -> Control:
        """Connect to the job's coordinator.

        Raises:
            ConnectionError: it cannot be reached, or refuses; the text says why.
        """
        handler = _EndingOthers()
        identity = Identity(Role.WORKER, worker, incarnation)
        connection = connect(host, port, key, identity, handler, peer="the coordinator", timeout_s=timeout_s)
        control = cls(connection.start(), worker, incarnation, key)
        control._handler = handler
        return control

    _handler: _EndingOthers

    def close_with(self, connection: Connection) -> None:
        """When the coordinator is gone, end ``connection`` too, so that nobody waits on it for a round that cannot come."""
        self._handler.others.append(connection)
        if self._connection.closed:
            connection.close()

    def ask(self, message: Message, reply: type[_Reply], timeout_s: float = CONTROL_TIMEOUT_S) -> _Reply:
        """Send ``message`` and wait for a reply of the given type; raises LinkError."""
        return expect(self._connection.call(message), reply, timeout_s)

    def ask_either(self, message: Message, timeout_s: float = CONTROL_TIMEOUT_S) -> Message:
        """Send ``message`` and wait for a reply of whatever type; raises LinkError."""
        return result_of(self._connection.call(message), timeout_s)

    def tell(self, message: Message) -> None:
        """Send a one-way message; it is lost if the connection ends."""
        self._connection.send(message)

    def failed(self, failure: Failed) -> None:
        """Report that this worker failed, and wait until the report is on its way."""
        self.tell(failure)
        self.flush()

    def log(self, lines: Sequence[tuple[float, Stream, str]]) -> None:
        """Pass printed lines on: seconds since the Unix epoch, stream, text."""
        self.tell(Log(tuple(lines)))

    def notice(
        self, kind: str, message: str, severity: Literal["info", "warning", "error"] = "info", **data: Any
    ) -> None:
        """Make an event."""
        self.tell(Notice(kind, message, severity, data))

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until what was told is handed to the kernel."""
        self._connection.flush(timeout_s)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


class _EndingOthers(NoRequests):
    """Ends the data connections when the control connection ends or the coordinator says that the attempt did."""

    def __init__(self) -> None:
        self.others: list[Connection] = []

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        if not isinstance(message, Ended):
            raise ProtocolError(f"the coordinator sent {type(message).__name__}")
        reason = ConnectionError(f"the job failed: {message.reason}")
        for other in list(self.others):
            other.close(reason)
        connection.close(reason)

    def closed(self, connection: Connection, error: Exception | None) -> None:
        for other in list(self.others):
            other.close(ConnectionError("the connection to the coordinator ended"))


def result_of(call: Pending, timeout_s: float) -> Message:
    """The reply to a call, of whatever type; raises LinkError."""
    try:
        return call.result(timeout_s)
    except (TimeoutError, RefusedError, ConnectionError) as error:
        raise LinkError(str(error)) from error


def expect(call: Pending, reply: type[_Reply], timeout_s: float) -> _Reply:
    """The reply to a call, of the given type; raises LinkError."""
    result = result_of(call, timeout_s)
    if not isinstance(result, reply):
        raise LinkError(f"{call.peer} answered with {type(result).__name__} instead of {reply.__name__}")
    return result
