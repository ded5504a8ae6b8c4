"""How our connections share a slow link: congestion control, pacing, send buffers and the size of a run of bytes.

Many workers that send to one shard at the same moment meet in one queue, a router's, of perhaps 128 KB (incast;
Phanishayee, Krevat, Vasudevan, Andersen, Ganger, Gibson, Seshan, FAST 2008). Cubic and reno fill it and back off; BBR
takes no notice of losses and sends a sixth of its segments twice. What is chosen here, and what was measured, is told
in docs/network.md. `plan_for` decides and is pure; `choosable`, `is_local` and `tune` are the shell around it.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import struct
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

logger = logging.getLogger(__name__)

AVAILABLE: Final = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")

_SO_MAX_PACING_RATE: Final = 47
"""Linux's number, which Python's socket module does not have. Counts payload, and needs no privilege."""
_UNPACED: Final = 2**32 - 1
"""No limit, in the option's 32-bit form."""

KB: Final = 1024
LOCAL_RUN_BYTES: Final = 1024 * KB
"""Between processes of one host, runs of 64 KB cost a third of the speed."""
LEAST_RUN_BYTES: Final = 16 * KB
MOST_RUN_BYTES: Final = 64 * KB
RUN_S: Final = 0.01
"""A run of each sharer together should take the link this long. The last runs' answers are what a pipelined round
takes longer than one way: 8 workers at 100 Mbit/s take 1.03 times as long with runs of 16 KB, 1.13 with 64 KB."""
QUEUE_BYTES: Final = 64 * KB
"""What all who share a link may have handed over beyond rate · RTT: half of a small router's queue, since the kernel
counts its own overhead and lets twice as much in."""
SLACK_S: Final = 0.002
"""Until a thread that could send runs again: what the link carries meanwhile lies in the buffer."""
FEW_BUFFER_BYTES: Final = 128 * KB
"""For one or two senders: less lets a link run dry while a busy machine does something else for a few milliseconds."""
LEAST_BUFFER_BYTES: Final = 16 * KB
"""The kernel fills a segment of 64 KB before it looks at the limit: a smaller limit changes nothing."""
MOST_BUFFER_BYTES: Final = 4096 * KB
PACED_FROM: Final = 3
"""Cubic and reno share a link between two well enough; from three on, pacing keeps them in step."""
PACING_SHARE: Final = 0.99
"""Of the known rate: a queue that arises drains again. Three per cent too fast costs 8 workers as much as 10 % too slow."""
FIRST_RATE_BYTES_PER_S: Final = 12_500_000.0
"""BBR's pace, for all who share the link, until a rate is known: 100 Mbit/s. A first state of 500 MB takes 40 s."""


class Setting(StrEnum):
    """What ``CADENZA_CONGESTION_CONTROL`` may say."""

    AUTO = "auto"
    """cubic, else reno, else bbr with pacing: the first that this process may choose."""
    CUBIC = "cubic"
    RENO = "reno"
    BBR = "bbr"


AUTO_ORDER: Final = (Setting.CUBIC, Setting.RENO, Setting.BBR)


class CongestionControlError(Exception):
    """The congestion control that is set cannot be had here."""


class TransportPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How one connection sends."""

    congestion_control: str | None
    """None: the system's default stays, since the connection does not leave the host."""
    pacing_bytes_per_s: int | None
    """Payload bytes per second at most; none: unpaced."""
    send_buffer_bytes: int | None
    """SO_SNDBUF: about what the program may hand over beyond what is acknowledged; none: the kernel's autotuning."""
    run_bytes: int
    """How many bytes to cut a vector into."""


def plan_for(
    setting: Setting | str,
    allowed: Sequence[str],
    fan_in: int,
    rate_bytes_per_s: float | None,
    rtt_s: float | None,
    *,
    local: bool = False,
) -> TransportPlan:
    """How to send to, or answer from, a host that ``fan_in`` connections share.

    Args:
        setting: what the user chose.
        allowed: congestion controls that this process may choose; see :func:`choosable`.
        fan_in: connections that send over the narrowest link at the same moment, this one included.
        rate_bytes_per_s: what that link carries of payload, for all of them together; none: not known yet.
        rtt_s: its round-trip time without our queue. None: not known yet; then the kernel sizes the send buffer, since
            one that is too small would throttle a long link.
        local: the peer is on the same host, so that there is no link to share.

    Raises:
        ValueError: ``fan_in``, rate or time is out of range, or ``setting`` unknown.
        CongestionControlError: ``setting`` is not among ``allowed``.
    """
    _check(fan_in, rate_bytes_per_s, rtt_s)
    if local:
        return TransportPlan(
            congestion_control=None,
            pacing_bytes_per_s=None,
            send_buffer_bytes=None,
            run_bytes=LOCAL_RUN_BYTES,
        )
    chosen = choose(Setting(setting), allowed)
    return TransportPlan(
        congestion_control=chosen.value,
        pacing_bytes_per_s=_pacing(chosen, fan_in, rate_bytes_per_s),
        send_buffer_bytes=_buffer(fan_in, rate_bytes_per_s, rtt_s),
        run_bytes=_run(fan_in, rate_bytes_per_s),
    )


def choose(setting: Setting, allowed: Sequence[str]) -> Setting:
    """The congestion control to use. Raises CongestionControlError where ``setting`` cannot be had."""
    wanted = AUTO_ORDER if setting is Setting.AUTO else (setting,)
    for candidate in wanted:
        if candidate.value in allowed:
            return candidate
    raise CongestionControlError(
        f"CADENZA_CONGESTION_CONTROL={setting.value}: this process may choose {', '.join(allowed) or 'none'} only; "
        "set one of these or auto, or add it to net.ipv4.tcp_allowed_congestion_control"
    )


def _pacing(chosen: Setting, fan_in: int, rate_bytes_per_s: float | None) -> int | None:
    if chosen is not Setting.BBR and (rate_bytes_per_s is None or fan_in < PACED_FROM):
        return None
    share = PACING_SHARE * (rate_bytes_per_s or FIRST_RATE_BYTES_PER_S) / fan_in
    return max(1, int(share))


def _buffer(fan_in: int, rate_bytes_per_s: float | None, rtt_s: float | None) -> int | None:
    if rate_bytes_per_s is None or rtt_s is None:
        return None
    under_way = rate_bytes_per_s * (rtt_s + SLACK_S) + QUEUE_BYTES
    least = FEW_BUFFER_BYTES if fan_in < PACED_FROM else LEAST_BUFFER_BYTES
    return int(min(MOST_BUFFER_BYTES, max(least, under_way / fan_in)))


def _run(fan_in: int, rate_bytes_per_s: float | None) -> int:
    runs = int((rate_bytes_per_s or 0.0) * RUN_S / fan_in) // LEAST_RUN_BYTES
    return min(MOST_RUN_BYTES, max(1, runs) * LEAST_RUN_BYTES)


def _check(fan_in: int, rate_bytes_per_s: float | None, rtt_s: float | None) -> None:
    if fan_in < 1:
        raise ValueError(f"fan_in {fan_in}: count this connection too, so give at least 1")
    if rate_bytes_per_s is not None and not 0 < rate_bytes_per_s < float("inf"):
        raise ValueError(
            f"rate_bytes_per_s {rate_bytes_per_s}: give a rate above 0, or None while none is known"
        )
    if rtt_s is not None and not 0 <= rtt_s < float("inf"):
        raise ValueError(f"rtt_s {rtt_s}: give seconds of at least 0, or None while none are known")


@lru_cache(maxsize=1)
def choosable() -> tuple[str, ...]:
    """The congestion controls of `AUTO_ORDER` that the kernel has and lets this process choose."""
    try:
        available = AVAILABLE.read_text().split()
    except OSError:  # Not Linux.
        return ()
    return tuple(name.value for name in AUTO_ORDER if name.value in available and _may_choose(name))


def _may_choose(name: Setting) -> bool:
    # tcp_allowed_congestion_control does not tell what a privileged process may do: trying does.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.value.encode())
        except (PermissionError, FileNotFoundError):
            return False
    return True


def is_local(sock: socket.socket) -> bool:
    """Whether the peer of a connected socket is on this host: on loopback, or at the socket's own address."""
    own, peer = sock.getsockname()[0], sock.getpeername()[0]
    return bool(own == peer or ipaddress.ip_address(peer).is_loopback)


def tune(sock: socket.socket, plan: TransportPlan) -> None:
    """Have a connected socket send as planned; may be called again with a newer plan, at any time.

    A plan without a size for the send buffer leaves it as it is: the kernel cannot be told to size it again.

    Raises:
        OSError: the socket is closed, or this process may not choose the congestion control.
    """
    if plan.congestion_control is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, plan.congestion_control.encode())
    if plan.send_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, plan.send_buffer_bytes)
    pacing = _UNPACED if plan.pacing_bytes_per_s is None else min(plan.pacing_bytes_per_s, _UNPACED - 1)
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", pacing))
    _tell(plan.congestion_control, plan.pacing_bytes_per_s is not None)


@lru_cache
def _tell(congestion_control: str | None, paced: bool) -> None:
    """Log a choice the first time that it is made in this process."""
    if congestion_control is None:
        logger.info("connections within this host keep the system's congestion control")
    else:
        logger.info("connections to other hosts use %s%s", congestion_control, ", paced" if paced else "")
