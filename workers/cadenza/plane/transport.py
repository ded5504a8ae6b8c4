"""Both ends of a TCP connection until it is verified: connecting as a client, accepting as a server."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable

from cadenza.plane import wire
from cadenza.plane.connection import Connection, Handler, NoRequests
from cadenza.plane.sockets import abort, keep_from_children, make_ready, receive_by
from cadenza.plane.wire import HandshakeError, Identity, Status

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
"""Six small packets; a peer that needs longer is not one of ours or its link is of no use for training."""

ACCEPT_RETRY_S = 0.1
"""After a failure to accept, such as for want of file descriptors; they come back as other connections end."""

CLOSE_TIMEOUT_S = 5.0
"""For threads whose socket is shut down: they end as soon as they run."""


def connect(
    host: str,
    port: int,
    key: bytes,
    identity: Identity,
    handler: Handler | None = None,
    *,
    peer: str,
    timeout_s: float,
) -> Connection:
    """Connect to a server and prove who we are; the caller starts the connection.

    Args:
        key: the job's key, KEY_SIZE_BYTES bytes.
        peer: how error texts call the other side, such as ``shard 1``.
        timeout_s: seconds for connecting, and again for the handshake.

    Raises:
        HandshakeError: the server refused or is not what it should be.
        ConnectionError: it cannot be reached; the text names it.
    """
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise ConnectionError(f"{peer} at {host}:{port} cannot be reached: {error}") from error
    keep_from_children(sock)
    deadline = time.monotonic() + timeout_s
    try:
        hello = receive_by(deadline, sock, wire.SERVER_HELLO_SIZE)
        wire.read_server_hello(hello)
        client = wire.client_hello(key, hello, identity, secrets.token_bytes(wire.NONCE_SIZE_BYTES))
        sock.sendall(client)
        wire.read_welcome(key, hello, client, receive_by(deadline, sock, wire.WELCOME_SIZE))
    except HandshakeError as error:
        sock.close()
        raise HandshakeError(f"{peer} at {host}:{port} refuses: {error}") from None
    except OSError as error:
        sock.close()
        raise ConnectionError(f"{peer} at {host}:{port} broke the handshake off: {error}") from error
    make_ready(sock)
    return Connection(sock, peer, identity, handler or NoRequests())


class Server:
    """Accepts connections on a port of the system's choice; each proves itself in a thread of its own."""

    def __init__(
        self,
        host: str,
        key: bytes,
        accept: Callable[[Identity], Status],
        handler: Callable[[Identity], Handler],
    ) -> None:
        """``accept`` may refuse a proved identity (stale ones); ``handler`` makes one handler per connection."""
        self._key = key
        self._accept = accept
        self._make_handler = handler
        self._listener = socket.create_server((host, 0), backlog=128)
        keep_from_children(self._listener)
        self._connections: set[Connection] = set()
        self._greeting: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept_loop, name="accept", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to connect to."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def close(self) -> None:
        """Stop listening and end all connections, and wait for their threads. Idempotent."""
        with self._lock:
            self._closing.set()
            connections = list(self._connections)
            greeting = list(self._greeting)
        for sock in (self._listener, *greeting):
            abort(sock)
        for connection in connections:
            connection.close()
        for connection in connections:
            connection.join(CLOSE_TIMEOUT_S)
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)
        self._listener.close()

    def _accept_loop(self) -> None:
        while not self._closing.is_set():
            try:
                sock, (host, port, *_) = self._listener.accept()
            except OSError as error:
                if not self._closing.wait(ACCEPT_RETRY_S):
                    logger.warning("a connection could not be accepted: %s", error)
                continue
            keep_from_children(sock)
            peer = f"{host}:{port}"
            threading.Thread(target=self._greet, args=(sock, peer), name=f"greet {peer}", daemon=True).start()

    def _greet(self, sock: socket.socket, peer: str) -> None:
        with self._lock:
            self._greeting.add(sock)
        try:
            identity = None if self._closing.is_set() else self._handshake(sock)
        except OSError as error:
            logger.debug("%s failed the handshake: %s", peer, error)
            identity = None
        finally:
            with self._lock:
                self._greeting.discard(sock)
        if identity is None:
            sock.close()
            return
        make_ready(sock)
        self._serve(sock, peer, identity)

    def _handshake(self, sock: socket.socket) -> Identity | None:
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        hello = wire.server_hello(secrets.token_bytes(wire.NONCE_SIZE_BYTES))
        sock.sendall(hello)
        client = receive_by(deadline, sock, wire.CLIENT_HELLO_SIZE)
        status, identity = wire.read_client_hello(self._key, hello, client)
        if identity is not None:
            status = self._accept(identity)
        sock.sendall(wire.welcome(self._key, hello, client, status))
        return identity if status is Status.OK else None

    def _serve(self, sock: socket.socket, peer: str, identity: Identity) -> None:
        name = f"{identity.role.name.lower()} {identity.worker} ({peer})"
        handler = _Forgetting(self._make_handler(identity), self._forget)
        connection = Connection(sock, name, identity, handler)
        with self._lock:
            self._connections.add(connection)
        connection.start()
        if self._closing.is_set():
            connection.close()

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)


class _Forgetting:
    """A handler that also tells the server when its connection has ended."""

    def __init__(self, inner: Handler, forget: Callable[[Connection], None]) -> None:
        self._inner = inner
        self._forget = forget
        self.body = inner.body
        self.handle = inner.handle

    def closed(self, connection: Connection, error: Exception | None) -> None:
        self._forget(connection)
        self._inner.closed(connection, error)
