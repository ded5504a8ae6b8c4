"""TCP_INFO: a recorded structure, shorter ones of older kernels, and a live connection."""

from __future__ import annotations

import socket
import struct
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.plane import tcp_info
from cadenza.plane.tcp_info import TcpInfo

FIELDS = {
    "state": 0, "app_limited": 7, "mss": 16, "unacked": 24, "rtt_us": 68, "rttvar_us": 72, "snd_cwnd": 80,
    "rcv_rtt_us": 92, "total_retrans": 100, "bytes_acked": 120, "bytes_received": 128, "notsent_bytes": 144,
    "min_rtt_us": 148, "delivery_rate": 160, "busy_us": 168, "rwnd_limited_us": 176, "sndbuf_limited_us": 184,
    "delivered_ce": 196, "bytes_sent": 200, "bytes_retrans": 208,
}  # fmt: skip
"""Offsets in <linux/tcp.h>."""
WIDE = {
    "bytes_acked",
    "bytes_received",
    "delivery_rate",
    "busy_us",
    "rwnd_limited_us",
    "sndbuf_limited_us",
} | {
    "bytes_sent",
    "bytes_retrans",
}
ALWAYS = {name for name, offset in FIELDS.items() if offset <= 100}


def size_of(name: str) -> int:
    return 1 if name in ("state", "app_limited") else 8 if name in WIDE else 4


def structure(values: dict[str, int], length: int = 280) -> bytes:
    data = bytearray(b"\xee" * length)
    for name, value in values.items():
        struct.pack_into({1: "=B", 4: "=I", 8: "=Q"}[size_of(name)], data, FIELDS[name], value)
    return bytes(data)


def test_every_field_is_read_from_its_place() -> None:
    values = {name: 1000 + number for number, name in enumerate(FIELDS)} | {"state": 1, "app_limited": 0}
    info = tcp_info.parse(structure(values))
    assert {name: getattr(info, name) for name in FIELDS} == {**values, "app_limited": False}


@pytest.mark.skipif(sys.byteorder != "little", reason="the bit's place depends on the byte order")
def test_the_neighbours_of_the_app_limited_bit_do_not_matter() -> None:
    assert tcp_info.parse(structure({"app_limited": 0b001})).app_limited
    assert not tcp_info.parse(structure({"app_limited": 0b110})).app_limited


@given(length=st.integers(104, 400))
def test_what_a_kernel_does_not_tell_is_none_and_the_rest_is_right(length: int) -> None:
    values = dict.fromkeys(FIELDS, 7)
    info = tcp_info.parse(structure(values, max(length, 280))[:length])
    for name, offset in FIELDS.items():
        there = name in ALWAYS or offset + size_of(name) <= length
        assert (getattr(info, name) is not None) == there, name


@pytest.mark.parametrize("length", [0, 7, 103])
def test_a_structure_without_the_basics_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"TCP_INFO has {length} bytes, at least 104 are needed"):
        tcp_info.parse(bytes(length))


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")
def test_a_live_connection_tells_what_it_moved() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        before = tcp_info.read(sender)
        sender.sendall(bytes(50_000))
        assert len(receiver.recv(50_000, socket.MSG_WAITALL)) == 50_000
        receiver.sendall(b"!")
        assert sender.recv(1) == b"!"
        after, other = tcp_info.read(sender), tcp_info.read(receiver)
    assert after.state == 1
    assert after.bytes_acked is not None
    assert before.bytes_acked is not None
    assert after.bytes_acked - before.bytes_acked == 50_000
    assert (after.bytes_sent or 0) >= 50_000
    assert other.bytes_received == 50_000
    assert 0 < after.rtt_us < 5_000_000
    assert (before.total_retrans, before.mss > 500) == (0, True)


def test_elsewhere_than_on_linux_there_is_a_reason_and_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "this is darwin" in (tcp_info.supported() or "")
    with socket.socket() as sock, pytest.raises(NotImplementedError, match="on Linux only"):
        tcp_info.read(sock)


def test_the_facts_travel_as_plain_numbers() -> None:
    info = tcp_info.parse(structure(dict.fromkeys(FIELDS, 9), 280)[:150])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=TcpInfo) == info
