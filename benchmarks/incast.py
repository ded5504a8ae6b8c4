"""Incast: worker processes that all send 1 MB to one host at the same moment, again and again.

``one way``: the host says when it has everything. ``full duplex``: it answers run by run, each as soon as all workers'
are there, so that both directions of its link are busy. Sockets are tuned as the data plane tunes them: a first
transfer of one worker alone shows the rate, then `cadenza.plane.pacing` follows it from round to round.

    python -m benchmarks.incast 20mbit --congestion-control bbr --full-duplex
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from benchmarks.netlab import Network
from benchmarks.netlab.shaping import GOODPUT_SHARE, transfer_s

from cadenza.plane import tcp_info
from cadenza.plane.congestion import choosable, plan_for, tune
from cadenza.plane.monitor import LinkMonitor, LinkSample
from cadenza.plane.pacing import PacedRound, PaceState, first_pace, next_pace
from cadenza.plane.sockets import receive_exactly, receive_into

SIZE_BYTES = 1 << 20
GO = struct.Struct("=dIII")
"""Rate to plan with (0: unknown), connections that share it, bytes of a run, and whether answers come."""
DONE = struct.Struct("=dd")
"""The worker's queueing delay and retransmitted share."""
PORT = 5000
PATIENCE_S = 120.0
BASE_RTT_S = 1e-4


@dataclass(frozen=True)
class Incast:
    """What the rounds took, as shares of what the physics allows."""

    goodput: float
    """All bytes over all rounds' time, over the rate."""
    round_vs_limit: float
    """The median round over bytes ÷ rate ÷ 0.956, one way."""
    worst_round_vs_limit: float


class Host:
    """The end that everybody sends to."""

    def __init__(self, server: socket.socket, workers: int, setting: str, duplex: bool) -> None:
        self.connections = [server.accept()[0] for _ in range(workers)]
        self.setting = setting
        self.duplex = duplex
        self.pool = ThreadPoolExecutor(2 * workers)
        for connection in self.connections:
            connection.settimeout(PATIENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def first_rate(self) -> PaceState:
        """What one worker alone delivers."""
        seen = self._round(self.connections[:1], 0.0, duplex=False)[1]
        return first_pace(seen.delivered_bytes_per_s)

    def round(self, pace: PaceState) -> tuple[float, PaceState]:
        """Seconds that a round took, and the next one's pace."""
        taken_s, seen = self._round(self.connections, pace.rate_bytes_per_s, self.duplex)
        return taken_s, next_pace(pace, seen)

    def _round(self, connections: list[socket.socket], rate: float, duplex: bool) -> tuple[float, PacedRound]:
        plan = plan_for(self.setting, choosable(), len(connections), rate or None, BASE_RTT_S)
        for connection in connections:
            tune(connection, plan)
        runs = Runs(len(connections), SIZE_BYTES // plan.run_bytes)
        begun_s = time.perf_counter()
        for connection in connections:
            connection.sendall(GO.pack(rate, len(connections), plan.run_bytes, duplex))
        ends = [self.pool.submit(self._receive, each, runs, plan.run_bytes) for each in connections]
        if duplex:
            answers = [self.pool.submit(self._answer, each, runs, plan.run_bytes) for each in connections]
            for answer in answers:
                answer.result()
        else:
            runs.wait(runs.count - 1)
            for connection in connections:
                connection.sendall(b"!")
        arrived_s = runs.ended_s - begun_s
        told = [end.result() for end in ends]
        seen = PacedRound(
            delivered_bytes_per_s=len(connections) * SIZE_BYTES / arrived_s,
            queueing_delay_s=max(delay_s for delay_s, _ in told),
            retransmitted_share=statistics.fmean(share for _, share in told),
        )
        return time.perf_counter() - begun_s, seen

    def _receive(self, connection: socket.socket, runs: Runs, run_bytes: int) -> tuple[float, float]:
        view = memoryview(bytearray(run_bytes))
        for run in range(runs.count):
            receive_into(connection, view)
            runs.arrived(run)
        delay_s, share = DONE.unpack(receive_exactly(connection, DONE.size))
        return delay_s, share

    def _answer(self, connection: socket.socket, runs: Runs, run_bytes: int) -> None:
        data = bytes(run_bytes)
        for run in range(runs.count):
            runs.wait(run)
            connection.sendall(data)


class Runs:
    """Which runs of a round are there from everybody."""

    def __init__(self, workers: int, count: int) -> None:
        self.count = count
        self.ended_s = 0.0
        self._missing = [workers] * count
        self._changed = threading.Condition()

    def arrived(self, run: int) -> None:
        with self._changed:
            self._missing[run] -= 1
            if not self._missing[run]:
                self.ended_s = time.perf_counter()
                self._changed.notify_all()

    def wait(self, run: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._missing[run], PATIENCE_S):
                raise TimeoutError(f"run {run} did not come from {self._missing[run]} workers")


def work(address: str, setting: str) -> None:
    """A worker: send when told to, until the host is gone."""
    sock = socket.create_connection((address, PORT), PATIENCE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    monitor, moved, data = LinkMonitor(), 0, memoryview(bytes(SIZE_BYTES))
    while first := sock.recv(1):
        go = first + receive_exactly(sock, GO.size - 1)
        rate, fan_in, run_bytes, duplex = GO.unpack(go)
        tune(sock, plan_for(setting, choosable(), fan_in, rate or None, BASE_RTT_S))
        before = LinkSample(at_s=time.monotonic(), tcp=tcp_info.read(sock), moved_bytes=moved)
        sender = threading.Thread(target=_send_runs, args=(sock, data, run_bytes))
        sender.start()
        receive_exactly(sock, SIZE_BYTES // run_bytes * run_bytes if duplex else 1)
        sender.join()
        moved += SIZE_BYTES
        after = LinkSample(at_s=time.monotonic(), tcp=tcp_info.read(sock), moved_bytes=moved)
        facts = monitor.observe(before, after, time.monotonic())
        sock.sendall(
            DONE.pack(facts.queueing_delay_s, facts.retransmitted_share) if facts else DONE.pack(0, 0)
        )


def _send_runs(sock: socket.socket, data: memoryview, run_bytes: int) -> None:
    for begin in range(0, len(data), run_bytes):
        sock.sendall(data[begin : begin + run_bytes])


def measure(rate: str, setting: str, *, duplex: bool, workers: int = 8, rounds: int = 8) -> Incast:
    """Rounds on links of ``rate`` under a congestion control, or ``auto``."""
    nodes = [f"w{number}" for number in range(1, workers + 1)]
    with Network(("head", *nodes), rate=rate) as network:
        with network.entered("head"):
            server = socket.create_server((network.address("head"), PORT), backlog=workers)
        argv = [sys.executable, "-m", "benchmarks.incast", rate, "--congestion-control", setting]
        crew: list[subprocess.Popen[bytes]] = [
            network.popen(node, [*argv, "--work-for", network.address("head")]) for node in nodes
        ]
        with server:
            host = Host(server, workers, setting, duplex)
        pace, taken_s = host.first_rate(), []
        for _ in range(rounds):
            round_s, pace = host.round(pace)
            taken_s.append(round_s)
        for connection in host.connections:
            connection.close()
        for worker in crew:
            worker.wait(PATIENCE_S)
    limit_s = transfer_s(workers * SIZE_BYTES, rate)
    return Incast(
        goodput=round(GOODPUT_SHARE * limit_s * rounds / sum(taken_s), 3),
        round_vs_limit=round(statistics.median(taken_s) / limit_s, 3),
        worst_round_vs_limit=round(max(taken_s) / limit_s, 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rate")
    parser.add_argument("--congestion-control", default="auto")
    parser.add_argument("--full-duplex", action="store_true")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--work-for", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work_for:
        work(given.work_for, given.congestion_control)
        return
    found = measure(
        given.rate,
        given.congestion_control,
        duplex=given.full_duplex,
        workers=given.workers,
        rounds=given.rounds,
    )
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
