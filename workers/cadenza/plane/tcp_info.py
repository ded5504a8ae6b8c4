"""What Linux knows about one TCP connection: TCP_INFO, read without privileges.

The kernel only ever appends to its structure, so an older kernel returns a shorter one. A field that is not there is
None, never 0: nothing retransmitted and nothing known are different facts. The layout is that of <linux/tcp.h>.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Final

import msgspec

_LEADING: Final = struct.Struct("=8B24I")
"""Up to tcpi_total_retrans: all that Linux 2.6 had."""

_STATE, _FLAGS = 0, 7
_SND_MSS, _UNACKED, _RTT, _RTTVAR, _SND_CWND, _RCV_RTT, _TOTAL_RETRANS = 10, 12, 23, 24, 26, 29, 31
"""Indices into what ``_LEADING`` unpacks."""

_APP_LIMITED_BIT: Final = 0x01 if sys.byteorder == "little" else 0x80
"""The first bit field of its byte; the compiler puts it at the end at which the machine counts from."""

_BYTES_ACKED = (120, struct.Struct("=Q"))
_BYTES_RECEIVED = (128, struct.Struct("=Q"))
_NOTSENT_BYTES = (144, struct.Struct("=I"))
_MIN_RTT = (148, struct.Struct("=I"))
_DELIVERY_RATE = (160, struct.Struct("=Q"))
_BUSY_TIME = (168, struct.Struct("=Q"))
_RWND_LIMITED = (176, struct.Struct("=Q"))
_SNDBUF_LIMITED = (184, struct.Struct("=Q"))
_DELIVERED_CE = (196, struct.Struct("=I"))
_BYTES_SENT = (200, struct.Struct("=Q"))
_BYTES_RETRANS = (208, struct.Struct("=Q"))
"""Offset in bytes, and form, of the later fields."""

_READ_BYTES: Final = 512
"""More than any kernel's structure, which was 280 bytes long in Linux 6.18."""


class TcpInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Raw facts about one connection at one moment, as this end of it sees them.

    All counters are since the connection began. Those of the sender (``bytes_acked`` to ``notsent_bytes``) say
    something about what this end sends only. None: this kernel does not tell.
    """

    state: int
    """1 while established, as in <linux/tcp_states.h>."""
    rtt_us: int
    """The smoothed round-trip time of what this end sends (RFC 6298); the kernel's last one while it sends nothing."""
    rttvar_us: int
    rcv_rtt_us: int
    """The receiver's estimate, from how long its window takes to fill; 0 before it has one."""
    mss: int
    """Payload bytes of a full segment."""
    snd_cwnd: int
    """The congestion window, in segments."""
    unacked: int
    """Segments in flight."""
    total_retrans: int
    """Segments that were sent again."""
    app_limited: bool
    """Whether ``delivery_rate`` was limited by what the program sent, not by the network."""
    min_rtt_us: int | None
    bytes_acked: int | None
    bytes_received: int | None
    bytes_sent: int | None
    """Payload bytes sent, those sent again included."""
    bytes_retrans: int | None
    notsent_bytes: int | None
    """Bytes in the send buffer that have not been sent once."""
    delivery_rate: int | None
    """The kernel's latest sample, in bytes/s: a hint, off by a third where the rate is low."""
    busy_us: int | None
    """Time with unacknowledged or unsent data. Counted in kernel ticks of 1-10 ms."""
    rwnd_limited_us: int | None
    """The part of ``busy_us`` in which only the receiver's window held the sender back."""
    sndbuf_limited_us: int | None
    """The part of ``busy_us`` in which only the send buffer's size did."""
    delivered_ce: int | None
    """Segments that arrived with a mark of congestion (ECN)."""


def supported() -> str | None:
    """None where TCP_INFO can be read on this system; otherwise a sentence why not."""
    if sys.platform != "linux":
        return f"TCP_INFO is read on Linux only and this is {sys.platform}: there are no facts about links"
    return None


def read(sock: socket.socket) -> TcpInfo:
    """The facts about ``sock`` now. One system call, about 2 µs.

    Raises:
        NotImplementedError: this system has no TCP_INFO; see :func:`supported`.
        OSError: the socket is closed or not TCP.
    """
    if (reason := supported()) is not None:
        raise NotImplementedError(reason)
    return parse(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _READ_BYTES))


def parse(data: bytes) -> TcpInfo:
    """The facts in ``data``, which may be a shorter structure of an older kernel, or a longer one of a newer.

    Raises:
        ValueError: ``data`` is shorter than any kernel's structure.
    """
    if len(data) < _LEADING.size:
        raise ValueError(
            f"TCP_INFO has {len(data)} bytes, at least {_LEADING.size} are needed: a kernel this old tells too little"
        )
    leading = _LEADING.unpack_from(data)

    def later(place: tuple[int, struct.Struct]) -> int | None:
        offset, form = place
        if len(data) < offset + form.size:
            return None
        value: int = form.unpack_from(data, offset)[0]
        return value

    return TcpInfo(
        state=leading[_STATE],
        rtt_us=leading[_RTT],
        rttvar_us=leading[_RTTVAR],
        rcv_rtt_us=leading[_RCV_RTT],
        mss=leading[_SND_MSS],
        snd_cwnd=leading[_SND_CWND],
        unacked=leading[_UNACKED],
        total_retrans=leading[_TOTAL_RETRANS],
        app_limited=bool(leading[_FLAGS] & _APP_LIMITED_BIT),
        min_rtt_us=later(_MIN_RTT),
        bytes_acked=later(_BYTES_ACKED),
        bytes_received=later(_BYTES_RECEIVED),
        bytes_sent=later(_BYTES_SENT),
        bytes_retrans=later(_BYTES_RETRANS),
        notsent_bytes=later(_NOTSENT_BYTES),
        delivery_rate=later(_DELIVERY_RATE),
        busy_us=later(_BUSY_TIME),
        rwnd_limited_us=later(_RWND_LIMITED),
        sndbuf_limited_us=later(_SNDBUF_LIMITED),
        delivered_ce=later(_DELIVERED_CE),
    )
