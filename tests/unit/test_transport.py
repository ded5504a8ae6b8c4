"""Connections against hostile, broken and dying peers, over loopback."""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from cadenza.plane import sockets, transport, wire
from cadenza.plane.connection import Buffer, Connection, NoRequests, Refusal, RefusedError
from cadenza.plane.messages import Done, Evaluating, Finish, Message, Publish, Read, Ready, State, encode
from cadenza.plane.sockets import receive_exactly
from cadenza.plane.transport import Server, connect
from cadenza.plane.wire import HandshakeError, Header, Identity, ProtocolError, Role, Status

HOST = "127.0.0.1"
KEY = b"k" * 32
SOON_S = 5.0
"""Far above what loopback needs, far below any deadline that would hide a hang."""
WORKER = Identity(Role.WORKER, worker=3, incarnation=2)


@dataclass
class Echo:
    """A server's handler: echoes bodies, refuses Evaluating, breaks at Ready, never answers Finish."""

    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    body_buffer: bytearray = field(default_factory=bytearray)
    most_bytes: int = 1 << 20

    def body(self, connection: Connection, message: Message, length: int) -> Sequence[Buffer]:
        if length > self.most_bytes:
            raise ProtocolError(f"{length} bytes are too many")
        self.body_buffer = bytearray(length)
        return [memoryview(self.body_buffer)]

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        match message:
            case Publish():
                connection.reply(call, State(0, 0), [memoryview(bytes(self.body_buffer))])
            case Evaluating():
                raise Refusal("not_now", "ask again later")
            case Ready():
                raise RuntimeError("the handler broke")
            case Finish():
                pass
            case _:
                connection.reply(call, Done())

    def closed(self, connection: Connection, error: Exception | None) -> None:
        self.error = error
        self.ended.set()


class EchoServer:
    """A server with one handler per connection, and its client connections."""

    def __init__(self, accept: Callable[[Identity], Status] = lambda _: Status.OK) -> None:
        self.handlers: list[Echo] = []
        self.greeted = threading.Event()
        self.clients: list[Connection] = []
        self.server = Server(HOST, KEY, accept, self._handler)

    def _handler(self, identity: Identity) -> Echo:
        self.handlers.append(Echo())
        self.greeted.set()
        return self.handlers[-1]

    @property
    def handler(self) -> Echo:
        assert self.greeted.wait(SOON_S)
        return self.handlers[-1]

    def client(self) -> Connection:
        client = connect(*self.server.address, KEY, WORKER, peer="the server", timeout_s=SOON_S).start()
        self.clients.append(client)
        return client

    def raw(self) -> socket.socket:
        """A socket that has proved itself, for hostile frames."""
        sock = socket.create_connection(self.server.address, timeout=SOON_S)
        hello = receive_exactly(sock, wire.SERVER_HELLO_SIZE)
        client = wire.client_hello(KEY, hello, WORKER, bytes(32))
        sock.sendall(client)
        wire.read_welcome(KEY, hello, client, receive_exactly(sock, wire.WELCOME_SIZE))
        return sock


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    server = EchoServer()
    yield server
    for client in server.clients:
        client.close()
    server.server.close()


def frame(message: bytes, body: bytes = b"", *, call: int = 0, reply: bool = False, **changes: int) -> bytes:
    checksum = wire.Checksum().add(message).add(body).value()
    fields = {"message_length": len(message), "body_length": len(body), "checksum": checksum, **changes}
    return wire.pack_header(Header(call, reply, **fields)) + message + body


def cadenza_threads() -> set[str]:
    names = ("send to", "receive from", "greet", "accept")
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(names)}


def ports(sock: socket.socket) -> tuple[int, ...]:
    """Its own and, if it is connected, its peer's."""
    try:
        return sock.getsockname()[1], sock.getpeername()[1]
    except OSError:
        return (sock.getsockname()[1],)


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


# --- calls ---


def test_bodies_come_back_into_the_buffers_that_the_caller_names(echo: EchoServer) -> None:
    into = [memoryview(bytearray(3)), memoryview(bytearray(4))]
    call = echo.client().call(Publish(("v",)), [memoryview(b"abc"), memoryview(b"defg")], lambda *_: into)
    assert call.result(SOON_S) == State(0, 0)
    assert [bytes(part) for part in into] == [b"abc", b"defg"]


def test_many_pieces_and_more_bytes_than_any_socket_buffer(echo: EchoServer) -> None:
    pieces = [memoryview(bytes([index % 251]) * 701) for index in range(1_400)]
    whole = b"".join(pieces)
    into = bytearray(len(whole))
    call = echo.client().call(Publish(("v",)), pieces, lambda *_: [memoryview(into)])
    call.result(SOON_S)
    assert bytes(into) == whole


def test_a_refusal_reaches_the_caller_and_the_connection_lives_on(echo: EchoServer) -> None:
    client = echo.client()
    with pytest.raises(RefusedError, match="the server: ask again later") as caught:
        client.call(Evaluating()).result(SOON_S)
    assert caught.value.code == "not_now"
    assert client.call(Read(())).result(SOON_S) == Done()


def test_a_handler_that_breaks_ends_the_connection_and_the_calls_in_flight(echo: EchoServer) -> None:
    client = echo.client()
    waiting = client.call(Finish())
    broken = client.call(Ready())
    for call in (waiting, broken):
        with pytest.raises(ConnectionError):
            call.result(SOON_S)
    assert echo.handler.ended.wait(SOON_S)
    assert "the handler broke" in str(echo.handler.error)
    assert echo.client().call(Read(())).result(SOON_S) == Done()


def test_a_call_has_a_deadline(echo: EchoServer) -> None:
    with pytest.raises(TimeoutError, match=r"the server did not answer within 0\.01 s"):
        echo.client().call(Finish()).result(0.01)


def test_closing_fails_what_is_in_flight_and_what_comes_later_with_the_reason(echo: EchoServer) -> None:
    client = echo.client()
    waiting = client.call(Finish())
    client.close(ConnectionError("the job failed: out of luck"))
    client.close()
    for call in (waiting, client.call(Finish())):
        with pytest.raises(ConnectionError, match="out of luck"):
            call.result(SOON_S)
    client.send(Done())
    assert not client.flush(SOON_S)


def test_what_was_queued_before_finish_arrives(echo: EchoServer) -> None:
    client = echo.client()
    calls = [client.call(Publish(("v",)), [memoryview(b"x" * 100_000)]) for _ in range(20)]
    client.finish()
    assert echo.handler.ended.wait(SOON_S)
    assert len(echo.handler.body_buffer) == 100_000
    for call in calls:
        with contextlib.suppress(ConnectionError):
            call.result(SOON_S)


def test_a_message_above_the_limit_is_not_sent(echo: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 100)
    client = echo.client()
    with pytest.raises(ValueError, match=r"a Publish of \d+ bytes; at most 100"):
        client.call(Publish(("v" * 200,)))
    assert client.call(Read(())).result(SOON_S) == Done()


# --- frames that the protocol forbids ---


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * wire.HEADER_SIZE_BYTES,
        bytes(range(256)) * 4,
        frame(b""),
        frame(b"\xc1"),
        frame(encode(Done())[:-1]),
        frame(encode(Done()) + b"\x00"),
        frame(b"\x81\xa4type\xa4Evil"),
        frame(b"\x82\xa4type\xa4Done\xa5extra\x01"),
        frame(b"\x91" * 100_000),
        frame(encode(Done()), checksum=1),
        frame(encode(Publish(("v",))), b"body", checksum=1),
        frame(encode(Publish(("v",))), body_length=2**64 - 1),
        frame(encode(Publish(("v",))), body_length=(1 << 20) + 1),
        frame(encode(Done()), message_length=wire.MAX_MESSAGE_BYTES + 1),
        frame(encode(Done()), call=1, reply=True),
    ],
    ids=[
        "zeros",
        "bytes",
        "empty",
        "no_msgpack",
        "cut",
        "longer",
        "unknown_message",
        "unknown_field",
        "nested",
        "checksum",
        "body_checksum",
        "endless_body",
        "oversized_body",
        "oversized_message",
        "unasked_reply",
    ],
)
def test_a_forbidden_frame_ends_its_connection_and_no_other(echo: EchoServer, data: bytes) -> None:
    with echo.raw() as sock:
        sock.sendall(data)
        assert echo.handler.ended.wait(SOON_S)
        assert echo.handler.error is not None
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert echo.client().call(Read(())).result(SOON_S) == Done()


def test_a_frame_that_ends_halfway_is_not_handled(echo: EchoServer) -> None:
    data = frame(encode(Publish(("v",))), b"x" * 1_000)
    for end in (1, wire.HEADER_SIZE_BYTES, wire.HEADER_SIZE_BYTES + 3, len(data) - 1):
        echo.greeted.clear()
        with echo.raw() as sock:
            sock.sendall(data[:end])
        assert echo.handler.ended.wait(SOON_S)
        assert "closed the connection" in str(echo.handler.error)


class Peer:
    """A server in a test's hand: it answers one connection with bytes of the test's choice."""

    def __init__(self) -> None:
        self.listener = socket.create_server((HOST, 0))
        self.address: tuple[str, int] = self.listener.getsockname()[:2]

    def greet(self) -> socket.socket:
        sock, _ = self.listener.accept()
        sock.settimeout(SOON_S)
        hello = wire.server_hello(bytes(32))
        sock.sendall(hello)
        client = receive_exactly(sock, wire.CLIENT_HELLO_SIZE)
        sock.sendall(wire.welcome(KEY, hello, client, Status.OK))
        return sock


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.listener.close()


def open_pair(peer: Peer) -> tuple[Connection, socket.socket]:
    accepted: list[socket.socket] = []
    thread = threading.Thread(target=lambda: accepted.append(peer.greet()))
    thread.start()
    client = connect(*peer.address, KEY, WORKER, peer="shard 1", timeout_s=SOON_S).start()
    thread.join(SOON_S)
    return client, accepted[0]


STATE = encode(State(1, 1))
GONE = "closed the connection|reset by peer"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (frame(STATE, b"12345678", call=1, reply=True)[:-1], GONE),
        (frame(STATE, b"12345678", call=1, reply=True)[:-8], GONE),
        (frame(STATE, b"12345678", call=1, reply=True)[:40], GONE),
        (frame(STATE, b"12345678", call=1, reply=True, checksum=5), "checksum is wrong"),
        (frame(STATE, b"123456789", call=1, reply=True), "sends 9 bytes .* 8 are expected"),
        (frame(STATE, b"1234567", call=1, reply=True), "sends 7 bytes .* 8 are expected"),
        (frame(STATE, b"12345678", call=2, reply=True), "answers call 2, which is not open"),
        (frame(STATE, b"", call=0), "unexpected State"),
    ],
    ids=["mid_body", "no_body", "mid_message", "damaged", "long", "short", "other_call", "request"],
)
def test_a_broken_answer_fails_its_call_at_once(peer: Peer, answer: bytes, says: str) -> None:
    client, sock = open_pair(peer)
    call = client.call(Read(()), into=lambda *_: [memoryview(bytearray(8))])
    with sock:
        sock.sendall(answer)
    with pytest.raises(ConnectionError, match=says):
        call.result(SOON_S)
    client.join(SOON_S)


def test_a_destination_that_breaks_fails_its_call_at_once(peer: Peer) -> None:
    client, sock = open_pair(peer)

    def nowhere(message: Message, length: int) -> Sequence[Buffer]:
        raise KeyError("parameters.float64")

    call = client.call(Read(()), into=nowhere)
    with sock:
        sock.sendall(frame(STATE, b"12345678", call=1, reply=True))
        with pytest.raises(ConnectionError, match=r"parameters\.float64"):
            call.result(SOON_S)
    client.join(SOON_S)


def test_an_answer_without_a_place_for_its_body_fails_its_call(peer: Peer) -> None:
    client, sock = open_pair(peer)
    call = client.call(Read(()))
    with sock:
        sock.sendall(frame(STATE, b"12345678", call=1, reply=True))
        with pytest.raises(ProtocolError, match="where none are expected"):
            call.result(SOON_S)
    client.join(SOON_S)


def test_an_answer_in_drips_is_put_together(peer: Peer) -> None:
    client, sock = open_pair(peer)
    into = bytearray(8)
    call = client.call(Read(()), into=lambda *_: [memoryview(into)])
    with sock:
        for byte in frame(STATE, b"12345678", call=1, reply=True):
            sock.sendall(bytes([byte]))
        assert call.result(SOON_S) == State(1, 1)
    assert into == b"12345678"
    client.close()
    client.join(SOON_S)


def test_an_answer_counts_once(peer: Peer) -> None:
    client, sock = open_pair(peer)
    call = client.call(Read(()))
    with sock:
        sock.sendall(frame(STATE, call=1, reply=True) + frame(encode(State(9, 9)), call=1, reply=True))
        client.join(SOON_S)
    assert client.closed
    assert call.result(SOON_S) == State(1, 1)


# --- handshakes ---


def refused(server: EchoServer, first: bytes) -> bytes:
    """What a server answers to ``first`` until it ends the connection."""
    with socket.create_connection(server.server.address, timeout=SOON_S) as sock:
        receive_exactly(sock, wire.SERVER_HELLO_SIZE)
        sock.sendall(first)
        with contextlib.suppress(ConnectionResetError):
            received = b""
            while piece := sock.recv(4096):
                received += piece
        return received


@pytest.mark.parametrize(
    "first", [b"\x00", b"GET / HTTP/1.1\r\n", bytes(range(84))], ids=["zeros", "http", "bytes"]
)
def test_garbage_instead_of_a_hello_makes_no_handler(echo: EchoServer, first: bytes) -> None:
    answer = refused(echo, (first * wire.CLIENT_HELLO_SIZE)[: wire.CLIENT_HELLO_SIZE])
    assert answer == wire.welcome(KEY, b"", b"", Status.WRONG_KEY)
    assert not echo.handlers


def test_a_replayed_handshake_makes_no_handler(echo: EchoServer) -> None:
    recorded = wire.client_hello(KEY, wire.server_hello(bytes(32)), WORKER, bytes(32))
    assert refused(echo, recorded)[6] == Status.WRONG_KEY
    assert not echo.handlers


def test_the_client_says_which_server_refused_it_and_why() -> None:
    server = EchoServer(accept=lambda identity: Status.STALE)
    host, port = server.server.address
    with pytest.raises(HandshakeError, match=f"shard 1 at {host}:{port} refuses: a newer incarnation"):
        connect(host, port, KEY, WORKER, peer="shard 1", timeout_s=SOON_S)
    with pytest.raises(HandshakeError, match="the job's key does not match"):
        connect(host, port, b"x" * 32, WORKER, peer="shard 1", timeout_s=SOON_S)
    server.server.close()
    with pytest.raises(ConnectionError, match=f"shard 1 at {host}:{port} cannot be reached"):
        connect(host, port, KEY, WORKER, peer="shard 1", timeout_s=SOON_S)


def drip_until_the_end(sock: socket.socket, most: int) -> bool:
    """Send one byte every 50 ms; whether the other side ends the connection before ``most`` are sent."""
    sock.settimeout(0.05)
    for _ in range(most):
        try:
            sock.sendall(b"C")
            if not sock.recv(1):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def test_a_client_that_drips_its_hello_is_given_up(echo: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_S", 0.2)
    begun_at = time.monotonic()
    with socket.create_connection(echo.server.address, timeout=SOON_S) as sock:
        receive_exactly(sock, wire.SERVER_HELLO_SIZE)
        assert drip_until_the_end(sock, wire.CLIENT_HELLO_SIZE - 1)
    assert time.monotonic() - begun_at < 2
    assert not echo.handlers


def test_a_server_that_drips_its_hello_is_given_up(peer: Peer) -> None:
    given_up = threading.Event()

    def drip() -> None:
        sock, _ = peer.listener.accept()
        with sock, contextlib.suppress(OSError):
            for byte in wire.server_hello(bytes(32)):
                sock.sendall(bytes([byte]))
                if given_up.wait(0.05):
                    return

    thread = threading.Thread(target=drip)
    thread.start()
    begun_at = time.monotonic()
    with pytest.raises(ConnectionError, match=r"shard 1 .* broke the handshake off"):
        connect(*peer.address, KEY, WORKER, peer="shard 1", timeout_s=0.2)
    assert time.monotonic() - begun_at < 1.5
    given_up.set()
    thread.join(SOON_S)


# --- the end ---


def test_after_closing_no_thread_and_no_socket_remains() -> None:
    before = cadenza_threads()
    server = EchoServer()
    clients = [server.client() for _ in range(5)]
    for client in clients:
        client.call(Read(())).result(SOON_S)
    silent = [socket.create_connection(server.server.address, timeout=SOON_S) for _ in range(3)]
    for sock in silent:
        receive_exactly(sock, wire.SERVER_HELLO_SIZE)
    port = server.server.address[1]
    ours = [sock for sock in sockets._open_sockets if sock.fileno() >= 0 and port in ports(sock)]
    assert len(ours) >= 1 + 2 * len(clients)
    begun_at = time.monotonic()
    server.server.close()
    server.server.close()
    for client in clients:
        client.join(SOON_S)
    assert time.monotonic() - begun_at < 3
    assert eventually(lambda: cadenza_threads() <= before)
    assert eventually(lambda: all(sock.fileno() < 0 for sock in ours))
    for sock in silent:
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        sock.close()


def test_a_connection_that_never_started_is_closed_too(peer: Peer) -> None:
    accepted: list[socket.socket] = []
    thread = threading.Thread(target=lambda: accepted.append(peer.greet()))
    thread.start()
    client = connect(*peer.address, KEY, WORKER, peer="shard 1", timeout_s=SOON_S)
    thread.join(SOON_S)
    client.close()
    with accepted[0] as sock:
        assert sock.recv(1) == b""
    client.start()
    assert client.closed


def test_a_server_goes_on_after_it_could_not_accept(
    echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = echo.server._listener
    failures = [OSError(errno.EMFILE, "too many open files"), OSError(errno.ECONNABORTED, "aborted")]
    failed = threading.Event()

    class Failing:
        def accept(self) -> Any:
            if failures:
                raise failures.pop()
            failed.set()
            return listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    echo.server._listener = Failing()  # type: ignore[assignment]
    echo.client().call(Read(())).result(SOON_S)
    assert failed.wait(SOON_S)
    assert echo.client().call(Read(())).result(SOON_S) == Done()


FORKING = """
import os, sys
from cadenza.plane.transport import connect
from cadenza.plane.wire import Identity, Role
connection = connect("127.0.0.1", int(sys.argv[1]), b"k" * 32, Identity(Role.WORKER), peer="", timeout_s=10).start()
held = connect("127.0.0.1", int(sys.argv[1]), b"k" * 32, Identity(Role.WORKER), peer="", timeout_s=10)
if os.fork() == 0:
    os.write(1, b"child\\n")
    os.read(0, 1)
    os._exit(0)
connection.join(60)
"""


def test_a_forked_child_does_not_hide_its_parents_death(echo: EchoServer) -> None:
    _, port = echo.server.address
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"child\n"
        assert eventually(lambda: len(echo.handlers) == 2)
        process.kill()
        ended = [handler.ended.wait(SOON_S) for handler in echo.handlers]
        child_lives = process.stdin.write(b"x") == 1
        process.stdin.close()
        process.stdout.read()
    assert ended == [True, True]
    assert child_lives


def test_a_connection_ends_while_both_sides_send(echo: EchoServer) -> None:
    client = echo.client()
    calls = [
        client.call(Publish(("v",)), [memoryview(bytes(200_000))], lambda _, n: [memoryview(bytearray(n))])
        for _ in range(50)
    ]
    calls[0].result(SOON_S)
    threads = [threading.Thread(target=end) for end in (client.close, echo.server.close, client.finish)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    for call in calls:
        with contextlib.suppress(ConnectionError):
            call.result(SOON_S)
    client.join(SOON_S)
    assert not {name for name in cadenza_threads() if "the server" in name}


def test_no_requests_means_none(peer: Peer) -> None:
    client, sock = open_pair(peer)
    handler = NoRequests()
    with pytest.raises(ProtocolError, match="an unexpected Done with 5 bytes"):
        handler.body(client, Done(), 5)
    with pytest.raises(ProtocolError, match="an unexpected Done"):
        handler.handle(client, 0, Done())
    client.close()
    client.join(SOON_S)
    sock.close()
