"""One framed connection: a sender and a receiver thread, calls matched with replies.

Bulk bodies are received straight into the buffer that the caller (for replies) or the handler (for
requests) names, so that no byte is copied twice and no length from the wire decides an allocation.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from cadenza.plane import congestion, tcp_info, wire
from cadenza.plane.congestion import TransportPlan
from cadenza.plane.messages import Message, Refused, decode, encode
from cadenza.plane.monitor import LinkSample
from cadenza.plane.sockets import abort, receive_exactly, receive_into, send_pieces
from cadenza.plane.wire import Header, Identity, ProtocolError

logger = logging.getLogger(__name__)

Buffer = memoryview

MOST_RUN_BYTES = 1 << 20
"""On a fast link, where each frame's own cost shows."""


class Handler(Protocol):
    """What a connection does with the peer's requests. Called on the receiver thread."""

    def body(self, connection: Connection, message: Message, length: int) -> Sequence[Buffer]:
        """Where the request's ``length`` bytes go, in order; raises ProtocolError if they are not expected."""

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        """Carry the request out, and reply at some time if ``call`` is not 0. May raise Refusal."""

    def closed(self, connection: Connection, error: Exception | None) -> None:
        """The connection ended; ``error`` is none where we closed it."""


class Frame(NamedTuple):
    """A message that is about to be sent, with its bulk bytes."""

    message: Message
    bodies: Sequence[Buffer] = ()
    answers: int = 0
    """The peer's call that it answers; 0 for none."""


class Refusal(Exception):
    """A request that is not carried out; the peer gets ``code`` and the text."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RefusedError(Exception):
    """The peer did not carry our request out."""

    def __init__(self, refused: Refused, peer: str) -> None:
        super().__init__(f"{peer}: {refused.message}")
        self.code = refused.code


class NoRequests:
    """The handler of a connection on which only we ask."""

    def body(self, connection: Connection, message: Message, length: int) -> Sequence[Buffer]:
        raise ProtocolError(f"an unexpected {type(message).__name__} with {length} bytes")

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        raise ProtocolError(f"an unexpected {type(message).__name__}")

    def closed(self, connection: Connection, error: Exception | None) -> None:
        """Calls in flight fail by themselves."""


@dataclass
class Pending:
    """A call in flight."""

    peer: str
    into: Callable[[Message, int], Sequence[Buffer]] | None = None
    sent_at: float = 0.0
    """Monotonic seconds at which the last byte was handed to the kernel; 0 before."""
    begun_at: float = 0.0
    """Monotonic seconds at which the reply's header was there."""
    ended_at: float = 0.0
    """Monotonic seconds at which all of the reply was there."""
    _done: threading.Event = field(default_factory=threading.Event)
    _reply: Message | None = None
    _error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether :meth:`result` returns, or raises, without waiting."""
        return self._done.is_set()

    def result(self, timeout_s: float) -> Message:
        """The reply.

        Raises:
            TimeoutError: none came in ``timeout_s`` seconds.
            RefusedError: the peer refused.
            ConnectionError: the connection ended first.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"{self.peer} did not answer within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        if isinstance(self._reply, Refused):
            raise RefusedError(self._reply, self.peer)
        return self._reply

    def resolve(self, reply: Message) -> None:
        self._reply = reply
        self.ended_at = time.monotonic()
        self._done.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._done.set()


class _Single:
    """A frame in the queue of outgoing ones; its message is fixed, its bytes are read when it is sent."""

    __slots__ = ("bodies", "call", "data", "pending", "reply")

    def __init__(
        self, message: Message, bodies: Sequence[Buffer], call: int, reply: bool, pending: Pending | None
    ) -> None:
        self.data = encode(message)
        if len(self.data) > wire.MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a {type(message).__name__} of {len(self.data)} bytes; at most {wire.MAX_MESSAGE_BYTES} can be sent"
            )
        self.bodies = bodies
        self.call = call
        self.reply = reply
        self.pending = pending


class _Series:
    """Frames in the queue of outgoing ones that are made one after another, as they are sent."""

    __slots__ = ("frames", "pending")

    def __init__(self, frames: Iterable[Frame], pending: Pending | None) -> None:
        self.frames = frames
        self.pending = pending


class _Farewell:
    """The end of the queue of outgoing frames."""


class _Flush:
    """A mark in the queue of outgoing frames."""

    def __init__(self) -> None:
        self.done = threading.Event()


_Queued = _Single | _Series | _Farewell | _Flush


class Connection:
    """One verified TCP connection. Thread-safe, except that the threads begin with :meth:`start`."""

    def __init__(self, sock: socket.socket, peer: str, identity: Identity, handler: Handler) -> None:
        self.peer = peer
        self.identity = identity
        """Who the connecting side is."""
        self.sent_bytes = 0
        self.received_bytes = 0
        self.run_bytes = MOST_RUN_BYTES
        """How much one frame of a long transfer should carry: little on a slow link, so that the pipeline fills soon."""
        self._sock = sock
        self._local = _is_local(sock)
        self._peer_host = _peer_host(sock)
        self._handler = handler
        self._outgoing: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._calls: dict[int, Pending] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        self._error: Exception | None = None
        self._sender_ended = False
        self._users = 0
        """Threads that use the socket. Only the last one closes it: its number is soon another socket's."""
        self._threads = [
            threading.Thread(target=self._use, args=(loop,), name=f"{what} {peer}", daemon=True)
            for loop, what in ((self._send_loop, "send to"), (self._receive_loop, "receive from"))
        ]

    def start(self) -> Connection:
        with self._lock:
            if self._closed:
                return self
            self._users = len(self._threads)
        for thread in self._threads:
            thread.start()
        return self

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, message: Message, bodies: Sequence[Buffer] = ()) -> None:
        """Queue a one-way message; the buffers must not change until it is sent. Lost if the connection ends."""
        self._queue(_Single(message, bodies, 0, False, None))

    def stream(self, frames: Iterable[Frame], pending: Pending | None = None) -> None:
        """Queue frames that are made when their turn comes: on the sender's thread, which they may let wait.

        A frame's buffers may be used again once the next frame is asked for. An exception in ``frames`` ends the
        connection. ``pending`` is a call that all of them belong to, for its time of sending.
        """
        self._queue(_Series(frames, pending))

    def call(
        self,
        message: Message,
        bodies: Sequence[Buffer] = (),
        into: Callable[[Message, int], Sequence[Buffer]] | None = None,
    ) -> Pending:
        """Send a request; ``into(reply, length)`` says where a reply's body goes (raise ProtocolError to refuse it)."""
        pending = Pending(self.peer, into)
        number = next(self._numbers)
        frame = _Single(message, bodies, number, False, pending)
        with self._lock:
            if self._closed:
                pending.fail(self._error or ConnectionError(f"the connection to {self.peer} is closed"))
                return pending
            self._calls[number] = pending
        self._queue(frame)
        return pending

    def reply(self, call: int, message: Message, bodies: Sequence[Buffer] = ()) -> None:
        """Answer the peer's request ``call``; nothing is sent where it wants no answer."""
        if call:
            self._queue(_Single(message, bodies, call, True, None))

    def refuse(self, call: int, refusal: Refusal) -> None:
        """Answer the peer's request ``call`` with a refusal."""
        self.reply(call, Refused(refusal.code, str(refusal)))

    @property
    def peer_host(self) -> str:
        """The peer's address; empty where the connection had ended before it was used."""
        return self._peer_host

    @property
    def local(self) -> bool:
        """Whether the peer is on this host."""
        return self._local

    def tune(self, plan: TransportPlan) -> None:
        """Send as planned from now on; nothing happens where the connection has ended."""
        self.run_bytes = plan.run_bytes
        with contextlib.suppress(OSError):
            congestion.tune(self._sock, plan)

    def sample(self) -> LinkSample | None:
        """The sending side as it is now; none where the system does not tell, or the connection has ended."""
        if tcp_info.supported() is not None:
            return None
        try:
            facts = tcp_info.read(self._sock)
        except OSError:
            return None
        return LinkSample(at_s=time.monotonic(), tcp=facts, moved_bytes=self.sent_bytes)

    def finish(self) -> None:
        """End the connection once everything queued so far is sent."""
        self._outgoing.put(_Farewell())

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was queued so far is handed to the kernel; false if that takes longer, or cannot be."""
        marker = _Flush()
        self._outgoing.put(marker)
        if self._sender_ended:
            self._release_flushes()
        return marker.done.wait(timeout_s) and not self._closed

    def close(self, reason: Exception | None = None) -> None:
        """End the connection and fail the calls in flight, with ``reason`` if given.

        Idempotent; does not wait for the threads.
        """
        self._end(reason)

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end, after :meth:`close`."""
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(timeout_s)

    def _queue(self, frame: _Queued) -> None:
        if not self._closed:
            self._outgoing.put(frame)

    def _use(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        finally:
            with self._lock:
                self._users -= 1
                last = not self._users
            if last:
                self._sock.close()

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed, self._error = True, error
            calls, self._calls = self._calls, {}
            unused = not self._users
        abort(self._sock)
        if unused:
            self._sock.close()
        self._outgoing.put(None)
        reason = error or ConnectionError(f"the connection to {self.peer} was closed")
        for pending in calls.values():
            pending.fail(reason)
        self._handler.closed(self, error)

    def _send_loop(self) -> None:
        try:
            self._send_queued()
        except OSError as error:
            self._end(ConnectionError(f"sending to {self.peer} failed: {error}"))
        except Exception as error:
            logger.exception("making a frame for %s failed", self.peer)
            self._end(ConnectionError(f"making a frame for {self.peer} failed: {error!r}"))
        finally:
            self._end(ConnectionError(f"sending to {self.peer} ended"))
            self._sender_ended = True
            self._release_flushes()

    def _release_flushes(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                frame = self._outgoing.get_nowait()
                if isinstance(frame, _Flush):
                    frame.done.set()

    def _send_queued(self) -> None:
        while (queued := self._outgoing.get()) is not None:
            match queued:
                case _Flush():
                    queued.done.set()
                case _Farewell():
                    self._end(None)
                    return
                case _Single():
                    self._transmit(queued.data, queued.bodies, queued.call, reply=queued.reply)
                    self._sent(queued.pending)
                case _Series():
                    for message, bodies, answers in queued.frames:
                        self._transmit(encode(message), bodies, answers, reply=bool(answers))
                    self._sent(queued.pending)

    def _transmit(self, data: bytes, bodies: Sequence[Buffer], call: int, *, reply: bool) -> None:
        checksum = wire.Checksum().add(data)
        length = 0
        for body in bodies:
            checksum.add(body)
            length += body.nbytes
        header = wire.pack_header(Header(call, reply, len(data), length, checksum.value()))
        send_pieces(self._sock, [memoryview(header + data), *bodies])
        self.sent_bytes += len(header) + len(data) + length

    def _sent(self, pending: Pending | None) -> None:
        if pending is not None:
            pending.sent_at = time.monotonic()

    def _receive_loop(self) -> None:
        try:
            while not self._closed:
                self._receive_frame()
        except (OSError, ProtocolError, msgspec.MsgspecError) as error:
            if not self._closed:
                logger.debug("the connection to %s ends: %s", self.peer, error)
            text = str(error) or type(error).__name__
            self._end(error if isinstance(error, ProtocolError) else ConnectionError(f"{self.peer}: {text}"))
        except Exception as error:
            logger.exception("handling a frame from %s failed", self.peer)
            self._end(ConnectionError(f"handling a frame from {self.peer} failed: {error!r}"))

    def _receive_frame(self) -> None:
        header = wire.unpack_header(receive_exactly(self._sock, wire.HEADER_SIZE_BYTES))
        begun_at = time.monotonic()
        data = receive_exactly(self._sock, header.message_length)
        message = decode(data)
        pending = self._open_call(header.call) if header.reply else None
        if pending is not None:
            pending.begun_at = begun_at
        bodies = self._destination(header, message, pending)
        checksum = wire.Checksum().add(data)
        for body in bodies:
            receive_into(self._sock, body)
            checksum.add(body)
        if checksum.value() != header.checksum:
            raise ProtocolError(f"a damaged {type(message).__name__} from {self.peer}: its checksum is wrong")
        self.received_bytes += wire.HEADER_SIZE_BYTES + header.message_length + header.body_length
        if pending is None:
            self._handle(header.call, message)
            return
        with self._lock:
            self._calls.pop(header.call, None)
        pending.resolve(message)

    def _open_call(self, call: int) -> Pending:
        """The call that a reply belongs to. It stays open until all of the reply is there, so that an end fails it."""
        with self._lock:
            pending = self._calls.get(call)
        if pending is None:
            raise ProtocolError(f"{self.peer} answers call {call}, which is not open")
        return pending

    def _destination(self, header: Header, message: Message, pending: Pending | None) -> Sequence[Buffer]:
        if not header.body_length:
            return ()
        if pending is None:
            bodies = self._handler.body(self, message, header.body_length)
        elif pending.into is not None:
            bodies = pending.into(message, header.body_length)
        else:
            raise ProtocolError(
                f"{self.peer} answers with {header.body_length} bytes where none are expected"
            )
        expected = sum(body.nbytes for body in bodies)
        if expected != header.body_length:
            raise ProtocolError(
                f"{self.peer} sends {header.body_length} bytes with {type(message).__name__}; {expected} are expected"
            )
        return bodies

    def _handle(self, call: int, message: Message) -> None:
        try:
            self._handler.handle(self, call, message)
        except Refusal as refusal:
            self.refuse(call, refusal)


def _is_local(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    try:
        return congestion.is_local(sock)
    except OSError:  # It has ended: there is nothing to tune, and its first use will tell.
        return True


def _peer_host(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except (OSError, IndexError):
        return ""
