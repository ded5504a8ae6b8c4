"""One connection through the proxy: two pumps, one each way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.netlab.conditions import Conditions, Order, Road

PIECE_BYTES = 16_384
"""Read at once: 1.3 ms at 100 Mbit/s."""

BUFFER_BYTES = 262_144
"""Each of the proxy's sockets' buffers; the system would let them grow to many megabytes, unseen by `window_bytes`."""

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing sends RST."""


@dataclass
class Pump:
    """One direction of a connection: bytes come in, wait as long as the conditions say, and go out in order."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    conditions: Callable[[], Conditions]
    road: Road
    order: Order
    flowing: asyncio.Event
    window_bytes: int
    _held_bytes: int = 0
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _queue: asyncio.Queue[tuple[float, bytes]] = field(default_factory=asyncio.Queue)

    async def run(self) -> None:
        """Until the end of what comes in has been passed on."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take())
            tasks.create_task(self._give())

    async def _take(self) -> None:
        self._room.set()
        piece = b"-"
        while piece:  # The end, an empty piece, travels as data do.
            await self._room.wait()
            piece = await self.reader.read(PIECE_BYTES)
            self._put(piece)

    def _put(self, piece: bytes) -> None:
        conditions = self.conditions()
        arrives_s = self.road.send(len(piece), asyncio.get_running_loop().time(), conditions)
        self._queue.put_nowait((self.order.deliver(len(piece), arrives_s, conditions), piece))
        self._count(len(piece))

    async def _give(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s, piece = await self._queue.get()
            if (wait_s := due_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            await self.flowing.wait()
            if not piece:
                self.writer.write_eof()
                return
            self.writer.write(piece)
            await self.writer.drain()
            self._count(-len(piece))

    def _count(self, change_bytes: int) -> None:
        self._held_bytes += change_bytes
        if self._held_bytes < self.window_bytes:
            self._room.set()
        else:
            self._room.clear()


def limit_buffers(sock: socket.socket) -> None:
    """Before a socket listens or connects: keep its buffers small."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection by RST."""
    with contextlib.suppress(OSError):  # It has been closed already.
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    writer.transport.abort()
