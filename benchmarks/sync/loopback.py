"""The exchange between two processes of one host, beside a bare socket loop with the same buffers."""

from __future__ import annotations

import socket
import statistics
import time
from typing import Any

import numpy as np
from benchmarks.sync.report import Effort, Findings, Measured
from benchmarks.sync.rig import Crew, Loopback, Process, Servers
from benchmarks.sync.rounds import durations

from cadenza.plane.layout import as_bytes

LENGTH = 4 << 20
"""float32 values: 16 MiB."""

ALTERNATIONS = 9
WARM_UP_ROUNDS = 3
SYNC = {"mode": "local", "local_steps": 1, "overlap": "off"}


class Echo:
    """The far end of the bare loop: takes all in, then gives as much back."""

    def __init__(self, length: int) -> None:
        self._taken = as_bytes(np.zeros(length, np.float32))
        self._given = as_bytes(np.ones(length, np.float32))
        self._server = socket.create_server(("127.0.0.1", 0))

    def port(self) -> dict[str, Any]:
        return {"port": self._server.getsockname()[1]}

    def accept(self) -> None:
        """Take the near end's connection; it must have been made."""
        self._connection, _ = self._server.accept()
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            receive(self._connection, self._taken)
            self._connection.sendall(self._given)


class Caller:
    """The near end of the bare loop."""

    def __init__(self, port: int, length: int) -> None:
        self._given = as_bytes(np.ones(length, np.float32))
        self._taken = as_bytes(np.zeros(length, np.float32))
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def rounds(self, count: int) -> dict[str, Any]:
        """Seconds of each round."""
        seconds = []
        for _ in range(count):
            begun_at = time.perf_counter()
            self._connection.sendall(self._given)
            receive(self._connection, self._taken)
            seconds.append(time.perf_counter() - begun_at)
        return {"seconds": seconds}


def receive(connection: socket.socket, into: memoryview) -> None:
    """Fill a buffer."""
    received = 0
    while received < len(into):
        count = connection.recv_into(into[received:], 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the other end of the bare loop is gone")
        received += count


class Bare:
    """The bare loop, in two processes."""

    def __init__(self, places: Loopback) -> None:
        self.far, self.near = Process(places, "far"), Process(places, "near")
        self.far.ask("open", name="loop", program=f"{__name__}:Echo", arguments={"length": LENGTH})
        port = self._act(self.far, "port")["port"]
        arguments = {"length": LENGTH, "port": port}
        self.near.ask("open", name="loop", program=f"{__name__}:Caller", arguments=arguments)
        self._act(self.far, "accept")

    def round_s(self, count: int) -> float:
        """The median of ``count`` rounds."""
        self.far.give("act", name="loop", method="rounds", arguments={"count": count})
        seconds: list[float] = self._act(self.near, "rounds", count=count)["seconds"]
        self.far.take()
        return statistics.median(seconds)

    def end(self) -> None:
        self.far.end()
        self.near.end()

    @staticmethod
    def _act(process: Process, method: str, **arguments: Any) -> dict[str, Any]:
        return process.ask("act", name="loop", method=method, arguments=arguments)


def run(effort: Effort) -> Findings:
    """Blocks of both in alternation; the exchange's CPU seconds are those of its two processes while it runs."""
    count = effort.pick(20, 40)
    places = Loopback()
    with (
        Servers(places, SYNC, workers=1, shards=["far"], coordinator="far", together=True) as servers,
        Crew(places, ["near"]) as crew,
    ):
        crew.open("pusher", "benchmarks.sync.programs:Pusher", servers, length=LENGTH)
        crew.act("pusher", "rounds", count=WARM_UP_ROUNDS)
        bare = Bare(places)
        bare.round_s(WARM_UP_ROUNDS)
        processes = [*servers.processes(), *crew.workers]
        ours, theirs, cpu = [], [], []
        for _ in range(ALTERNATIONS):
            theirs.append(bare.round_s(count))
            before = cpu_s(processes)
            ours.append(statistics.median(durations(crew.act("pusher", "rounds", count=count)[0])))
            cpu.append((cpu_s(processes) - before) / (count * 2 * 4 * LENGTH / 1e9))
        bare.end()
    ratios = [bare_s / own_s for bare_s, own_s in zip(theirs, ours, strict=True)]
    return Findings(
        {"loopback_vs_socket": Measured.median(ratios), "cpu_s_per_gb": Measured.median(cpu)},
        {"exchange_s": ours, "bare_s": theirs, "values": LENGTH, "rounds_per_block": count},
    )


def cpu_s(processes: list[Process]) -> float:
    """What the processes have used together."""
    return sum(float(process.ask("usage")["cpu_s"]) for process in processes)
