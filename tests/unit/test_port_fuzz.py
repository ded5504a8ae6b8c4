"""Whatever comes to a shard's port, by whoever, the shard goes on serving a good worker, with the right weights."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cadenza.plane import messages, transport, wire
from cadenza.plane.connection import Frame
from cadenza.plane.holdings import Holdings
from cadenza.plane.layout import Cut, as_bytes
from cadenza.plane.messages import Key, Publish, Read, Request, Units, encode
from cadenza.plane.sockets import receive_exactly
from cadenza.plane.wire import Header, Identity, Role, Status
from tests.unit.shard_bench import KEY, SOON_S, Bench, Values
from tests.unit.shards import BUFFERS, PARAMETERS, decision, layout_of, merge, replies, update

Array = NDArray[Any]
LENGTH, UNIT = 40, 16
VECTORS = (PARAMETERS, BUFFERS)
LAYOUT, CUT = layout_of(LENGTH, LENGTH, 3), Cut(1, UNIT)
PACKAGES = ("cadenza", "cadenza_service")
ATTACKER = Identity(Role.WORKER, worker=7, incarnation=3)
fuzz = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
"""Examples of one test share a shard: it has to survive them all."""


class Errors(logging.Handler):
    """Keeps what is logged as an error: an exception that nobody expected, for which input may never be the cause."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record))


class Yard(Bench):
    """A shard with a good worker that takes part in rounds, and sockets for those that are not good."""

    def __init__(self, length: int = LENGTH, unit: int = UNIT) -> None:
        super().__init__()
        self.length = length
        self.errors = Errors()
        for name in PACKAGES:
            logging.getLogger(name).addHandler(self.errors)
        self.assign(layout_of(length, length, 3), cut=Cut(1, unit))
        self.values = Values()
        self.good = self.connect(Identity(Role.WORKER, 0, 1), self.values)
        self.rng = np.random.default_rng(1)
        self.weights = np.zeros(2 * length, np.float32)
        self.turn = 0
        self.lives = 0
        """Of worker 7, so that each begins with nothing."""
        self.round()
        self.connections = set(self.server._server._connections)

    def round(self) -> None:
        """One update of the good worker is merged and answered, soon and rightly."""
        self.turn += 1
        delta = self.rng.normal(size=2 * self.length).astype(np.float32)
        self.weights = self.weights + delta
        self.values.received = b""
        call = self.good.call(update(self.turn, VECTORS))
        self.good.stream(self.frames(delta))
        key = Key(0, 1, self.turn)
        self.log.wait_for_key(key)
        self.coordinator.send(
            decision(self.turn, self.turn, parts=merge(1.0, seq=self.turn), replies=replies(key))
        )
        call.result(SOON_S)
        assert self.values.received == self.weights.tobytes()

    def frames(self, delta: Array) -> Iterator[Frame]:
        for place in self.server.core().holdings.places:
            part = delta[: self.length] if place.vector == PARAMETERS else delta[self.length :]
            message = Units(self.turn, place.vector, place.number, 1, "fp32", 0)
            yield Frame(message, [as_bytes(part[place.start : place.stop])])

    def raw(self) -> socket.socket:
        return socket.create_connection(self.server.address, timeout=SOON_S)

    def proved(self, identity: Identity | None = None) -> socket.socket:
        """A socket of someone who knows the job's key; without an identity, of a new life of worker 7."""
        if identity is None:
            self.lives += 1
            identity = Identity(Role.WORKER, 7, self.lives)
        sock = self.raw()
        hello = receive_exactly(sock, wire.SERVER_HELLO_SIZE)
        client = wire.client_hello(KEY, hello, identity, bytes(32))
        sock.sendall(client)
        wire.read_welcome(KEY, hello, client, receive_exactly(sock, wire.WELCOME_SIZE))
        return sock

    def check(self) -> None:
        """All is as before: a new worker is let in, a round goes through, nothing of the others is left."""
        self.round()
        assert eventually(lambda: self.server._server._connections == self.connections)
        assert not self.server._server._greeting
        assert self.errors.records == []

    def close(self) -> None:
        super().close()
        for name in PACKAGES:
            logging.getLogger(name).removeHandler(self.errors)


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def ended(sock: socket.socket) -> bool:
    """Whether the other side ends the connection once we have said all."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionError):
        while sock.recv(65_536):
            pass
    return True


def attack(yard: Yard, sock: socket.socket, data: bytes) -> None:
    """Say ``data``, and nothing more."""
    with sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
        assert ended(sock)
    yard.check()


def frame(message: bytes, body: bytes = b"", *, call: int = 0, reply: bool = False, **changes: int) -> bytes:
    checksum = wire.Checksum().add(message).add(body).value()
    fields = {"message_length": len(message), "body_length": len(body), "checksum": checksum, **changes}
    return wire.pack_header(Header(call, reply, **fields)) + message + body


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No thread is left over, and with the threads that use them no socket."""
    before = set(threading.enumerate())
    yield
    assert eventually(lambda: set(threading.enumerate()) <= before)


@pytest.fixture
def yard() -> Iterator[Yard]:
    with nothing_left():
        yard = Yard()
        yard.check()
        yield yard
        yard.check()
        yard.close()


UNITS = [
    Units(1, PARAMETERS, 0, 1, "fp32", 0),
    Units(1, PARAMETERS, 1, 2, "fp32", 0),
    Units(1, PARAMETERS, 0, 1, "int8", 3),
    Units(1, PARAMETERS, 0, 1, "topk:0.2", 3),
    Units(1, PARAMETERS, 0, 1, "fp32", 0, packed=True),
    Units(1, BUFFERS, 2, 1, "fp32", 0),
]
HOLDINGS = Holdings(LAYOUT, CUT, 0)
SIZES = [
    12 if message.packed else HOLDINGS.size_bytes(message, HOLDINGS.positions(message)) for message in UNITS
]
FRAMES = [
    frame(encode(update(1, VECTORS)), call=1),
    *(frame(encode(message), bytes(size)) for message, size in zip(UNITS, SIZES, strict=True)),
    frame(encode(Request("fetch", 1, -1, VECTORS)), call=2),
    frame(encode(Request("abstain", 1, 0, ())), call=3),
    frame(encode(Publish(())), call=4),
]
"""What a worker might say."""


def test_these_frames_are_what_a_worker_might_say(yard: Yard) -> None:
    with yard.proved() as sock:
        sock.sendall(b"".join(FRAMES))
        header = wire.unpack_header(receive_exactly(sock, wire.HEADER_SIZE_BYTES))
        assert (header.call, header.reply) == (4, True), "all was taken, and the Publish answered"
    yard.check()


# --- before the handshake ---


@fuzz
@given(data=st.binary(max_size=2 * wire.CLIENT_HELLO_SIZE))
def test_bytes_instead_of_a_hello(yard: Yard, data: bytes) -> None:
    attack(yard, yard.raw(), data)


@fuzz
@given(at=st.integers(0, wire.CLIENT_HELLO_SIZE - 1), bit=st.integers(0, 7), rest=st.binary(max_size=64))
def test_a_hello_with_a_changed_bit(yard: Yard, at: int, bit: int, rest: bytes) -> None:
    sock = yard.raw()
    hello = bytearray(
        wire.client_hello(KEY, receive_exactly(sock, wire.SERVER_HELLO_SIZE), ATTACKER, bytes(32))
    )
    hello[at] ^= 1 << bit
    with sock:
        sock.sendall(bytes(hello) + rest)
        with contextlib.suppress(ConnectionError):
            assert receive_exactly(sock, wire.WELCOME_SIZE)[6] == Status.WRONG_KEY
        assert ended(sock)
    yard.check()


def test_a_recorded_session_is_refused_and_changes_nothing(yard: Yard) -> None:
    sock = yard.raw()
    hello = receive_exactly(sock, wire.SERVER_HELLO_SIZE)
    values = np.full(LENGTH, 5.0, np.float32)
    session = wire.client_hello(KEY, hello, ATTACKER, bytes(32))
    session += frame(encode(Publish((PARAMETERS,))), values.tobytes(), call=1)
    session += b"".join(FRAMES)
    sock.sendall(session)
    receive_exactly(sock, wire.WELCOME_SIZE)
    # The recorded session was a good one: it published.
    assert eventually(lambda: bool((yard.server.core().weights.committed[PARAMETERS] == 5.0).all()))
    sock.close()
    yard.weights[:LENGTH] = 5.0
    yard.check()
    slot = yard.server.core().slot(ATTACKER.worker, ATTACKER.incarnation)
    seen = slot.seq, slot.request
    with yard.raw() as again:
        receive_exactly(again, wire.SERVER_HELLO_SIZE)
        again.sendall(session)
        with contextlib.suppress(ConnectionError):
            assert receive_exactly(again, wire.WELCOME_SIZE)[6] == Status.WRONG_KEY
        assert ended(again)
    assert (slot.seq, slot.request) == seen
    yard.check()


def test_a_hello_that_drips_is_given_up_at_the_deadline(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_S", 0.3)
    begun_at = time.monotonic()
    with yard.raw() as sock:
        hello = wire.client_hello(KEY, receive_exactly(sock, wire.SERVER_HELLO_SIZE), ATTACKER, bytes(32))
        given_up = drip(sock, hello)
        yard.round()
        assert given_up.wait(SOON_S)
    assert 0.3 <= time.monotonic() - begun_at < 2
    yard.check()


def test_many_that_say_nothing_keep_nobody_out(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "HANDSHAKE_TIMEOUT_S", 0.3)
    silent = [yard.raw() for _ in range(40)]
    yard.round()
    yard.worker(1).close()
    for sock in silent:
        with sock:
            assert ended(sock)
    yard.check()


def drip(sock: socket.socket, data: bytes) -> threading.Event:
    """Send a byte every 50 ms on a thread; set once the other side has ended the connection."""
    given_up = threading.Event()
    sock.settimeout(0.05)

    def send() -> None:
        for byte in data:
            try:
                sock.sendall(bytes([byte]))
                if not sock.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            return
        given_up.set()

    threading.Thread(target=send, daemon=True).start()
    return given_up


# --- after it ---


@fuzz
@given(data=st.binary(max_size=300), role=st.sampled_from([Role.WORKER, Role.OBSERVER, Role.COORDINATOR]))
def test_bytes_instead_of_frames(yard: Yard, data: bytes, role: Role) -> None:
    attack(yard, yard.proved(Identity(role, 7, 3, epoch=1)), data)


@fuzz
@given(
    number=st.integers(0, len(FRAMES) - 1),
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    before=st.integers(0, 2),
)
def test_frames_with_changed_bytes(
    yard: Yard, number: int, changes: list[tuple[int, int]], before: int
) -> None:
    data = bytearray(FRAMES[number])
    for at, value in changes:
        data[at % len(data)] = value
    attack(yard, yard.proved(), b"".join(FRAMES[1 : 1 + before]) + bytes(data))


@fuzz
@given(number=st.integers(0, len(FRAMES) - 1), end=st.integers(0, 10_000), reset=st.booleans())
def test_frames_that_are_cut_off(yard: Yard, number: int, end: int, reset: bool) -> None:
    data = FRAMES[number]
    sock = yard.proved()
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    attack(yard, sock, data[: end % len(data)])


numbers = st.one_of(
    st.integers(0, 4), st.sampled_from([2**31, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)])
)
scalars = st.one_of(
    numbers,
    st.none(),
    st.booleans(),
    st.floats(),
    st.binary(max_size=6),
    st.sampled_from([*VECTORS, "static.uint8", "fp32", "int8", "topk:0.5", "powersgd", "", "x"]),
    st.text(max_size=4),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = sorted(
    set(vars(messages)) & {kind.__name__ for kind in messages.Message.__subclasses__()} - {"Publish"}
)
"""All messages but the one with which a worker may set the weights."""
named = st.sampled_from(NAMES).flatmap(
    lambda name: st.fixed_dictionaries(
        {}, optional=dict.fromkeys(getattr(messages, name).__struct_fields__, anything)
    ).map(lambda fields: {"type": name, **fields})
)
likely = st.integers(0, 2)
almost = st.fixed_dictionaries(
    {
        "type": st.just("Units"),
        "seq": st.one_of(st.just(1), numbers),
        "vector": st.sampled_from([*VECTORS, *VECTORS, "static.uint8", "x"]),
        "first": st.one_of(likely, numbers),
        "count": st.one_of(st.just(1), likely, numbers),
        "codec": st.sampled_from(
            ["fp32", "fp32", "int8", "topk:0.5", "qsgd", "powersgd:2", "sign", "x", "topk:9"]
        ),
        "turn": st.one_of(likely, numbers),
        "packed": st.booleans(),
    }
)
asked = st.fixed_dictionaries(
    {
        "type": st.just("Request"),
        "kind": st.sampled_from(["update", "fetch", "abstain", "x"]),
        "seq": st.one_of(st.just(1), numbers),
        "base_version": st.one_of(likely, numbers),
        "vectors": st.sampled_from([VECTORS, (), VECTORS[:1], ("x",), ("static.uint8",)]),
    },
    optional={"samples": numbers, "steps": numbers, "loss": st.floats(), "present": st.binary(max_size=9)},
)

fitting = st.sampled_from(SIZES).map(bytes)


@settings(fuzz, max_examples=120)
@given(
    said=st.lists(
        st.tuples(st.one_of(almost, asked, named), st.one_of(st.just(b""), fitting, st.binary(max_size=130))),
        min_size=1,
        max_size=4,
    ),
    call=st.sampled_from([0, 1, 2**32 - 1]),
    reply=st.sampled_from([False, False, False, True]),
    role=st.sampled_from([Role.WORKER, Role.WORKER, Role.WORKER, Role.OBSERVER]),
    begun=st.booleans(),
)
def test_frames_that_are_whole_and_say_anything(
    yard: Yard, said: list[tuple[dict[str, Any], bytes]], call: int, reply: bool, role: Role, begun: bool
) -> None:
    sock = yard.proved(None if role is Role.WORKER else Identity(role))
    data = [frame(msgspec.msgpack.encode(message), body, call=call, reply=reply) for message, body in said]
    attack(yard, sock, FRAMES[0] * begun + b"".join(data))


@settings(fuzz, max_examples=120)
@given(choice=st.integers(0, len(UNITS) - 1), data=st.binary(min_size=104, max_size=104), again=st.booleans())
def test_units_of_the_right_size_with_any_bytes(yard: Yard, choice: int, data: bytes, again: bool) -> None:
    whole = frame(encode(UNITS[choice]), data[: SIZES[choice]])
    attack(yard, yard.proved(), FRAMES[0] * again + whole + whole * again)


def test_units_of_every_other_size(yard: Yard) -> None:
    for message, right in zip(UNITS, SIZES, strict=True):
        for size in {0, 1, 2, right - 1, right + 1, 2 * right, 1_000} - {right}:
            attack(yard, yard.proved(), FRAMES[0] + frame(encode(message), bytes(size)))


@pytest.mark.parametrize(
    "message",
    [
        *UNITS,
        update(1, VECTORS),
        Request("fetch", 1, -1, VECTORS),
        Publish((PARAMETERS,)),
        Publish(VECTORS),
        Read(VECTORS),
        decision(1, 1),
    ],
    ids=lambda message: type(message).__name__,
)
@pytest.mark.parametrize("length", [2**20, 2**60, 2**64 - 1])
def test_a_frame_that_claims_to_be_huge_allocates_nothing(yard: Yard, message: Any, length: int) -> None:
    data = frame(encode(message), call=1, body_length=length)
    sock = yard.proved()
    tracemalloc.start()
    try:
        with sock:
            sock.sendall(data)
            assert ended(sock)
        yard.check()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("length", [wire.MAX_MESSAGE_BYTES + 1, 2**32 - 1])
def test_a_message_beyond_the_limit_allocates_nothing(yard: Yard, length: int) -> None:
    sock = yard.proved()
    tracemalloc.start()
    try:
        attack(yard, sock, frame(b"", message_length=length))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_frame_that_stops_in_the_middle_keeps_nobody_waiting(yard: Yard) -> None:
    ends = (1, wire.HEADER_SIZE_BYTES - 1, wire.HEADER_SIZE_BYTES + 5, len(FRAMES[1]) - 1)
    held = [yard.proved(Identity(Role.WORKER, 7 + number, 1)) for number in range(len(ends))]
    for sock, end in zip(held, ends, strict=True):
        sock.sendall(FRAMES[1][:end])
    for _ in range(5):
        yard.round()
    for sock in held:
        sock.close()
    yard.check()


def test_frames_that_drip_keep_nobody_waiting_and_still_count(yard: Yard) -> None:
    """All but the last bytes come at once, so that the test is over in a second."""
    request, parts = FRAMES[7], 12
    with yard.proved(ATTACKER) as sock:
        sock.sendall(request[:-parts])
        begun_at = time.monotonic()
        drip(sock, request[-parts:])
        rounds = 0
        while time.monotonic() - begun_at < 0.3:
            yard.round()
            rounds += 1
        key = Key(ATTACKER.worker, ATTACKER.incarnation, 1)
        assert key not in {receipt.key for receipt in yard.log.receipts}
        yard.log.wait_for_key(key)
    assert rounds > 5
    yard.check()


def test_a_worker_that_takes_no_answer_keeps_nobody_waiting() -> None:
    with nothing_left():
        yard = Yard(length=1 << 17, unit=1 << 15)
        sock = yard.proved(ATTACKER)
        connections = yard.server._server._connections
        assert eventually(lambda: len(connections - yard.connections) == 1)
        (connection,) = connections - yard.connections
        slot = yard.server.core().slot(ATTACKER.worker, ATTACKER.incarnation)
        for seq in range(1, 20):
            key = Key(ATTACKER.worker, ATTACKER.incarnation, seq)
            sock.sendall(frame(encode(Request("fetch", seq, -1, VECTORS)), call=seq))
            yard.log.wait_for_key(key)
            yard.turn += 1
            version = yard.server.core().version
            yard.coordinator.send(decision(yard.turn, version, replies=replies(key, version=version)))
            assert eventually(lambda: slot.answered)
        assert not connection.flush(0.02), "its answers are more than the kernel takes"
        for _ in range(3):
            yard.round()
        yard.close()
        sock.close()
