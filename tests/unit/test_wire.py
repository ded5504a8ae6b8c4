"""The handshake's records and the frame header, against hostile bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.plane import wire
from cadenza.plane.wire import HandshakeError, Header, Identity, ProtocolError, Role, Status

KEY = bytes(range(32))
OTHER_KEY = bytes(32)
NONCES = bytes(32), b"\x01" * 32, b"\x02" * 32
COORDINATOR = Identity(Role.COORDINATOR, epoch=7)

identities = st.builds(
    Identity,
    st.sampled_from(Role),
    worker=st.integers(0, 2**32 - 1),
    incarnation=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**64 - 1),
)


def exchange(identity: Identity = COORDINATOR, status: Status = Status.OK) -> tuple[bytes, bytes, bytes]:
    """An honest handshake's three records."""
    hello = wire.server_hello(NONCES[0])
    client = wire.client_hello(KEY, hello, identity, NONCES[1])
    return hello, client, wire.welcome(KEY, hello, client, status)


@settings(deadline=None)
@given(identity=identities)
def test_both_sides_prove_themselves_and_the_identity_arrives(identity: Identity) -> None:
    hello, client, welcome = exchange(identity)
    assert (len(hello), len(client), len(welcome)) == (
        wire.SERVER_HELLO_SIZE,
        wire.CLIENT_HELLO_SIZE,
        wire.WELCOME_SIZE,
    )
    wire.read_server_hello(hello)
    assert wire.read_client_hello(KEY, hello, client) == (Status.OK, identity)
    wire.read_welcome(KEY, hello, client, welcome)


def test_another_key_is_refused_in_both_directions() -> None:
    hello, client, _ = exchange()
    assert wire.read_client_hello(OTHER_KEY, hello, client) == (Status.WRONG_KEY, None)
    forged = wire.welcome(OTHER_KEY, hello, client, Status.OK)
    with pytest.raises(HandshakeError, match="does not know the job's key"):
        wire.read_welcome(KEY, hello, client, forged)


def test_a_recorded_client_hello_does_not_open_a_second_connection() -> None:
    _, recorded, _ = exchange()
    assert wire.read_client_hello(KEY, wire.server_hello(NONCES[2]), recorded) == (Status.WRONG_KEY, None)


def test_a_recorded_welcome_does_not_pass_for_another_client_hello() -> None:
    hello, _, welcome = exchange()
    second = wire.client_hello(KEY, hello, COORDINATOR, NONCES[2])
    with pytest.raises(HandshakeError):
        wire.read_welcome(KEY, hello, second, welcome)


@settings(deadline=None, max_examples=150)
@given(at=st.integers(0, wire.CLIENT_HELLO_SIZE - 1), bit=st.integers(0, 7))
def test_no_bit_of_a_client_hello_can_be_changed(at: int, bit: int) -> None:
    hello, client, _ = exchange()
    changed = bytearray(client)
    changed[at] ^= 1 << bit
    assert wire.read_client_hello(KEY, hello, bytes(changed)) == (Status.WRONG_KEY, None)


@settings(deadline=None, max_examples=150)
@given(at=st.integers(0, wire.WELCOME_SIZE - 1), bit=st.integers(0, 7))
def test_no_bit_of_a_welcome_can_be_changed(at: int, bit: int) -> None:
    hello, client, welcome = exchange()
    changed = bytearray(welcome)
    changed[at] ^= 1 << bit
    with pytest.raises(HandshakeError):
        wire.read_welcome(KEY, hello, client, bytes(changed))


@pytest.mark.parametrize("status", [Status.WRONG_VERSION, Status.WRONG_KEY, Status.STALE])
def test_a_refusal_says_why(status: Status) -> None:
    hello, client, welcome = exchange(status=status)
    with pytest.raises(HandshakeError) as caught:
        wire.read_welcome(KEY, hello, client, welcome)
    assert str(caught.value) == wire.STATUS_TEXT[status]


def test_who_does_not_know_the_key_gets_no_proof() -> None:
    _, _, welcome = exchange(status=Status.WRONG_KEY)
    assert welcome.endswith(bytes(wire.PROOF_SIZE_BYTES))


def test_another_version_is_refused_by_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    hello, old, _ = exchange()
    monkeypatch.setattr(wire, "PROTOCOL_VERSION", wire.PROTOCOL_VERSION + 1)
    assert wire.read_client_hello(KEY, hello, old) == (Status.WRONG_VERSION, None)
    with pytest.raises(HandshakeError, match="the server speaks protocol 2, we speak 3"):
        wire.read_server_hello(hello)


def test_a_role_that_does_not_exist_is_refused_though_it_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    hello = wire.server_hello(NONCES[0])
    client = wire.client_hello(KEY, hello, Identity(9), NONCES[1])  # type: ignore[arg-type]
    assert wire.read_client_hello(KEY, hello, client) == (Status.WRONG_VERSION, None)


def test_another_service_on_the_port_is_not_taken_for_ours() -> None:
    with pytest.raises(HandshakeError, match="not a Cadenza server"):
        wire.read_server_hello(b"HTTP/1.1 400 Bad Request".ljust(wire.SERVER_HELLO_SIZE, b" "))


# --- frames ---

headers = st.builds(
    Header,
    call=st.integers(0, 2**32 - 1),
    reply=st.booleans(),
    message_length=st.integers(0, wire.MAX_MESSAGE_BYTES),
    body_length=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
)


@settings(deadline=None)
@given(header=headers)
def test_headers_survive_the_wire(header: Header) -> None:
    packed = wire.pack_header(header)
    assert len(packed) == wire.HEADER_SIZE_BYTES
    assert wire.unpack_header(packed) == header


@settings(deadline=None, max_examples=300)
@given(data=st.binary(min_size=wire.HEADER_SIZE_BYTES, max_size=wire.HEADER_SIZE_BYTES))
def test_garbage_is_a_protocol_error_or_a_header_within_bounds(data: bytes) -> None:
    try:
        header = wire.unpack_header(data)
    except ProtocolError:
        return
    assert wire.pack_header(header) == data
    assert header.message_length <= wire.MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("offset", "value", "says"),
    [
        (0, b"xx", "not a frame"),
        (2, b"\x00", "not a frame"),
        (2, b"\x03", "not a frame"),
        (3, bytes([wire.FLAG_TAG]), "unknown flags 0x2"),
        (3, b"\x80", "unknown flags 0x80"),
        (8, struct.pack("!I", wire.MAX_MESSAGE_BYTES + 1), "at most"),
        (12, b"\x00\x00\x00\x01", "unknown flags"),
    ],
    ids=["magic", "old", "new", "tag", "flag", "length", "reserved"],
)
def test_what_this_version_does_not_send_is_refused(offset: int, value: bytes, says: str) -> None:
    data = bytearray(wire.pack_header(Header(1, True, 10, 0, 0)))
    data[offset : offset + len(value)] = value
    with pytest.raises(ProtocolError, match=says):
        wire.unpack_header(data)


def test_the_checksum_does_not_depend_on_the_pieces() -> None:
    whole = wire.Checksum().add(b"message and body").value()
    assert wire.Checksum().add(b"message").add(b"").add(memoryview(b" and body")).value() == whole
    assert wire.Checksum().add(b"message and bodz").value() != whole
