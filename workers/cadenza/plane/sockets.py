"""What is done with a bare socket; and the sockets that a forked child must not keep."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref

_SENDMSG_PIECES = 512
"""Below the kernel's limit (IOV_MAX, 1,024) of pieces in one sendmsg."""

_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_inherited_sockets() -> None:
    # A forked child (a DataLoader worker) that kept our sockets would hide this process's death from its
    # peers: the kernel ends a connection only when the last copy is closed.
    for inherited in list(_open_sockets):
        with contextlib.suppress(OSError):
            inherited.close()


os.register_at_fork(after_in_child=_close_inherited_sockets)


def keep_from_children(sock: socket.socket) -> None:
    """Have forked children close their copy of ``sock``."""
    _open_sockets.add(sock)


def receive_exactly(sock: socket.socket, length: int) -> bytes:
    """``length`` bytes; raises ConnectionError if the peer ends before."""
    data = bytearray(length)
    receive_into(sock, memoryview(data))
    return bytes(data)


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill ``view``; raises ConnectionError if the peer ends before."""
    got = 0
    while got < len(view):
        # Where the kernel fills the whole buffer before it wakes us, a bulk transfer takes a quarter less CPU.
        count = sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the peer closed the connection")
        got += count


def receive_by(deadline: float, sock: socket.socket, length: int) -> bytes:
    """Like :func:`receive_exactly`, but until ``deadline`` (monotonic): dripping bytes gains a peer no time.

    Raises:
        TimeoutError: the deadline passed.
        ConnectionError: the peer ended before.
    """
    data = bytearray()
    while len(data) < length:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left_s)
        piece = sock.recv(length - len(data))
        if not piece:
            raise ConnectionError("the peer closed the connection")
        data += piece
    return bytes(data)


def send_pieces(sock: socket.socket, pieces: list[memoryview]) -> None:
    """Send all of ``pieces``, in order, without joining them."""
    pieces = [piece for piece in pieces if piece.nbytes]
    while pieces:
        sent = sock.sendmsg(pieces[:_SENDMSG_PIECES])
        while pieces and sent >= pieces[0].nbytes:
            sent -= pieces.pop(0).nbytes
        if sent:
            pieces[0] = pieces[0][sent:]


def make_ready(sock: socket.socket) -> None:
    """After the handshake: no time limit, and small frames leave at once."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def abort(sock: socket.socket) -> None:
    """End both directions; threads that wait in the socket return."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
