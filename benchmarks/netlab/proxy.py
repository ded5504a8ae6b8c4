"""A TCP proxy that adds delay, loss and a rate to the connections that go through it; it needs no root.

Where a kernel lacks netem this is how to imitate a long path. It cannot be quite like one, because TCP ends at the
proxy on both sides: a sender's bytes are acknowledged when the proxy has them, so that its TCP_INFO shows the way to
the proxy alone, and they lie in the proxy's buffers (`Proxy.window_bytes` for each connection and direction, and about
1 MB in sockets). Connecting costs no round trip. Times are kept to about a millisecond, and one proxy moves a few
Gbit/s at most, on one core. `benchmarks.netlab.conditions` tells what a loss is here.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from benchmarks.netlab.conditions import Conditions, Order, Road
from benchmarks.netlab.relay import Pump, limit_buffers, reset

CALL_TIMEOUT_S = 10.0
CLEAR = Conditions()


class Proxy:
    """Listens on ``address`` and forwards every connection to ``target``; a context manager, on a thread of its own.

    ``forward`` are the conditions towards the target, ``backward`` those of its answers; both can be replaced at any
    time, and hold for what is read from then on. The same ``seed`` loses the same segments of the n-th connection.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        forward: Conditions = CLEAR,
        backward: Conditions = CLEAR,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        window_bytes: int = 1 << 20,
        seed: int = 0,
    ) -> None:
        self.target = target
        self.forward = forward
        self.backward = backward
        self.window_bytes = window_bytes
        """The most that is on its way at once, in each direction of a connection: no more than this passes per delay."""
        self.address = listen
        """Where it listens: (host, port), the port known once it has started."""
        self._seed = seed
        self._numbers = itertools.count()
        self._roads = (Road(), Road())
        self._relays: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="proxy", daemon=True)
        self._thread.start()
        started.result(CALL_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CALL_TIMEOUT_S)

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self._relays)

    def freeze(self) -> None:
        """Forward nothing until `thaw`, and tell nobody: as if a cable were out. Nothing is lost."""
        self._call(self._flowing.clear)

    def thaw(self) -> None:
        """Go on; what was due meanwhile goes out at once."""
        self._call(self._flowing.set)

    def cut(self) -> None:
        """Reset (RST) all connections; new ones are served."""
        self._call(self._cancel_relays)

    def _run(self, started: Future[None]) -> None:
        try:
            asyncio.run(self._serve(started))
        except OSError as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(self, started: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._flowing = asyncio.Event()
        self._flowing.set()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        limit_buffers(listener)
        with listener:
            listener.bind(self.address)
            self.address = listener.getsockname()
            server = await asyncio.start_server(self._accept, sock=listener)
            started.set_result(None)
            await self._stop.wait()
            server.close()
            self._cancel_relays()
            await asyncio.gather(*self._relays, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relay = self._loop.create_task(self._relay(reader, writer))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end: by FIN where both sides ended theirs so, else by RST."""
        writers = [writer]
        finished = False
        try:
            await self._flowing.wait()
            answers, onward = await self._connect()
            writers.append(onward)
            await self._forward_both(reader, writer, answers, onward)
            finished = True
        except* OSError:
            pass  # One side reset the connection or refused it; so does the proxy to the other.
        finally:
            for each in writers:
                each.close() if finished else reset(each)

    async def _forward_both(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        onward: asyncio.StreamWriter,
    ) -> None:
        number = next(self._numbers)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pump(reader, onward, lambda: self.forward, 0, number).run())
            tasks.create_task(self._pump(answers, writer, lambda: self.backward, 1, number).run())

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        onward = socket.socket()
        limit_buffers(onward)
        onward.setblocking(False)
        try:
            await self._loop.sock_connect(onward, self.target)
        except BaseException:
            onward.close()
            raise
        return await asyncio.open_connection(sock=onward)

    def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        conditions: Callable[[], Conditions],
        direction: int,
        number: int,
    ) -> Pump:
        order = Order(random.Random(f"{self._seed} {number} {direction}"))
        road = self._roads[direction]
        return Pump(reader, writer, conditions, road, order, self._flowing, self.window_bytes)

    def _cancel_relays(self) -> None:
        for relay in self._relays:
            relay.cancel()

    def _call(self, action: Callable[[], None]) -> None:
        """Do something on the proxy's thread, and wait until it is done."""

        async def act() -> None:
            action()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result(CALL_TIMEOUT_S)
