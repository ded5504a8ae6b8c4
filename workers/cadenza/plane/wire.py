"""Bytes on the wire: the handshake's fixed-size records and the frame header. No sockets here.

A connection begins with three records of fixed size, so that nothing is parsed or allocated for a peer
that has not proved that it knows the job's key::

    server -> client   ServerHello   version, nonce
    client -> server   ClientHello   version, role, worker, incarnation, epoch, nonce, proof
    server -> client   Welcome       status, version, proof

Both proofs are HMAC-SHA256 under the job's key over everything that was said before, with a label for the
direction. After that, frames: header, MessagePack, bulk bytes. See docs/protocol.md.

This module imports neither ray nor torch.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from dataclasses import dataclass

import xxhash

PROTOCOL_VERSION = 2
KEY_SIZE_BYTES = 32
NONCE_SIZE_BYTES = 32
PROOF_SIZE_BYTES = 32

MAX_MESSAGE_BYTES = 64 << 20
"""A layout of a hundred thousand tensors stays below it; a larger length is a broken or hostile frame."""


class ProtocolError(ConnectionError):
    """The peer sent what the protocol forbids; the connection is of no more use."""


class HandshakeError(ConnectionError):
    """The peer refused us, or is not what we took it for."""


class Role(enum.IntEnum):
    """Who connects."""

    WORKER = 1
    COORDINATOR = 2
    OBSERVER = 3
    """Reads committed state, such as the supervisor when it stores the model."""


class Status(enum.IntEnum):
    """The server's verdict on a ClientHello."""

    OK = 0
    WRONG_VERSION = 1
    WRONG_KEY = 2
    STALE = 3
    """An epoch or incarnation below one that was seen."""


STATUS_TEXT = {
    Status.WRONG_VERSION: "it speaks another version of the protocol; run workers and service of the same release",
    Status.WRONG_KEY: "the job's key does not match; this is another job's address",
    Status.STALE: "a newer incarnation of this process is already known",
}

_SERVER_HELLO = struct.Struct(f"!4sHH{NONCE_SIZE_BYTES}s")
_CLIENT_HELLO = struct.Struct(f"!4sHBxIIQ{NONCE_SIZE_BYTES}s")
_WELCOME = struct.Struct("!4sHBx")
_MAGIC = b"CDNZ"

SERVER_HELLO_SIZE = _SERVER_HELLO.size
CLIENT_HELLO_SIZE = _CLIENT_HELLO.size + PROOF_SIZE_BYTES
WELCOME_SIZE = _WELCOME.size + PROOF_SIZE_BYTES


@dataclass(frozen=True)
class Identity:
    """Who a client says it is; covered by its proof."""

    role: Role
    worker: int = 0
    incarnation: int = 0
    epoch: int = 0


def server_hello(nonce: bytes) -> bytes:
    """The server's first record."""
    return _SERVER_HELLO.pack(_MAGIC, PROTOCOL_VERSION, 0, nonce)


def read_server_hello(data: bytes) -> None:
    """Check the server's first record; raises HandshakeError."""
    magic, version, _, _ = _SERVER_HELLO.unpack(data)
    if magic != _MAGIC:
        raise HandshakeError("the peer is not a Cadenza server")
    if version != PROTOCOL_VERSION:
        raise HandshakeError(
            f"the server speaks protocol {version}, we speak {PROTOCOL_VERSION}; run the same release on both"
        )


def client_hello(key: bytes, hello: bytes, identity: Identity, nonce: bytes) -> bytes:
    """The client's answer to the server's ``hello``."""
    fields = _CLIENT_HELLO.pack(
        _MAGIC, PROTOCOL_VERSION, identity.role, identity.worker, identity.incarnation, identity.epoch, nonce
    )
    return fields + _proof(key, b"client", hello + fields)


def read_client_hello(key: bytes, hello: bytes, data: bytes) -> tuple[Status, Identity | None]:
    """The verdict on a client's record, and who it is if that is proved."""
    fields, proof = data[: _CLIENT_HELLO.size], data[_CLIENT_HELLO.size :]
    magic, version, role, worker, incarnation, epoch, _ = _CLIENT_HELLO.unpack(fields)
    if magic != _MAGIC or not hmac.compare_digest(proof, _proof(key, b"client", hello + fields)):
        return Status.WRONG_KEY, None
    if version != PROTOCOL_VERSION or role not in Role.__members__.values():
        return Status.WRONG_VERSION, None
    return Status.OK, Identity(Role(role), worker, incarnation, epoch)


def welcome(key: bytes, hello: bytes, client: bytes, status: Status) -> bytes:
    """The server's verdict, proved unless the client did not know the key."""
    fields = _WELCOME.pack(_MAGIC, PROTOCOL_VERSION, status)
    if status is Status.WRONG_KEY:
        return fields + bytes(PROOF_SIZE_BYTES)
    return fields + _proof(key, b"server", hello + client + fields)


def read_welcome(key: bytes, hello: bytes, client: bytes, data: bytes) -> None:
    """Check the server's verdict; raises HandshakeError."""
    fields, proof = data[: _WELCOME.size], data[_WELCOME.size :]
    magic, _, status = _WELCOME.unpack(fields)
    if magic != _MAGIC or status not in Status.__members__.values():
        raise HandshakeError("the peer is not a Cadenza server")
    if status == Status.WRONG_KEY:
        raise HandshakeError(STATUS_TEXT[Status.WRONG_KEY])
    if not hmac.compare_digest(proof, _proof(key, b"server", hello + client + fields)):
        raise HandshakeError("the server does not know the job's key")
    if status != Status.OK:
        raise HandshakeError(STATUS_TEXT[Status(status)])


def _proof(key: bytes, label: bytes, data: bytes) -> bytes:
    return hmac.new(key, label + data, hashlib.sha256).digest()


# --- frames ----------------------------------------------------------------------------------------

_HEADER = struct.Struct("!2sBBIIIQQ")
_FRAME_MAGIC = b"cz"
HEADER_SIZE_BYTES = _HEADER.size

FLAG_REPLY = 1
FLAG_TAG = 2
"""A 16-byte authentication tag follows the body. Reserved: version 2 sends and accepts none."""
_KNOWN_FLAGS = FLAG_REPLY


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before each message: lengths in bytes, and the checksum over message and body."""

    call: int
    """Pairs a reply with its request; 0 where none is expected."""
    reply: bool
    message_length: int
    body_length: int
    checksum: int


def pack_header(header: Header) -> bytes:
    """The header as HEADER_SIZE_BYTES bytes."""
    flags = FLAG_REPLY if header.reply else 0
    return _HEADER.pack(
        _FRAME_MAGIC,
        PROTOCOL_VERSION,
        flags,
        header.call,
        header.message_length,
        0,
        header.body_length,
        header.checksum,
    )


def unpack_header(data: bytes | bytearray | memoryview) -> Header:
    """The header in ``data``; raises ProtocolError on anything that version 2 does not send."""
    magic, version, flags, call, message_length, reserved, body_length, checksum = _HEADER.unpack(data)
    if magic != _FRAME_MAGIC or version != PROTOCOL_VERSION:
        raise ProtocolError(f"not a frame of protocol {PROTOCOL_VERSION}")
    if flags & ~_KNOWN_FLAGS or reserved:
        raise ProtocolError(f"a frame with unknown flags {flags:#x}")
    if message_length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {message_length} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return Header(call, bool(flags & FLAG_REPLY), message_length, body_length, checksum)


class Checksum:
    """XXH3 (64 bits) over a frame's message and body, piece by piece: finds damage, proves nothing about the sender."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def add(self, data: bytes | bytearray | memoryview) -> Checksum:
        self._state.update(data)
        return self

    def value(self) -> int:
        return self._state.intdigest()
