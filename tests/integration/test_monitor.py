"""Each signal of the link monitor on a real link on which only that cause exists."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from benchmarks.netlab import Network

from cadenza.plane import tcp_info
from cadenza.plane.causes import Cause, SyncSplit, cause, held_up, split
from cadenza.plane.congestion import plan_for, tune
from cadenza.plane.monitor import LinkFacts, LinkMonitor, LinkSample
from cadenza.plane.sockets import receive_exactly
from tests.integration.netlab import MakeNetwork, make_network

__all__ = ["make_network"]

SIZE = 600_000
RATE = "20mbit"
RATE_BYTES_PER_S = 2.39e6
"""What 20 Mbit/s carry of payload."""
PATIENCE_S = 20.0


@dataclass
class Shard:
    """The receiving end: answers a probe at once, and a transfer when all of it is there."""

    connection: socket.socket
    pause_s: float = 0.0
    """A slow shard rests this long after each 16 KB."""
    arrived_s: float = 0.0

    def serve(self) -> None:
        with contextlib.suppress(ConnectionError, OSError):
            while True:
                if receive_exactly(self.connection, 1) == b"t":
                    self._receive()
                self.connection.sendall(b"!")

    def _receive(self) -> None:
        left = SIZE
        while left:
            left -= len(receive_exactly(self.connection, min(left, 16_384)))
            if self.pause_s:
                time.sleep(self.pause_s)
        self.arrived_s = time.monotonic()


@dataclass
class Worker:
    """The sending end, with its monitor."""

    sock: socket.socket
    shard: Shard
    monitor: LinkMonitor = field(default_factory=LinkMonitor)
    moved: int = 0

    def sync(self, others_s: float = 0.0) -> SyncSplit:
        """One transfer after a probe; the shard answers when others are in too, after ``others_s``."""
        probe_s = self._probe()
        before = self._sample()
        started_s = time.monotonic()
        self._send(b"t" + bytes(SIZE))
        sent_s = time.monotonic()
        receive_exactly(self.sock, 1)
        ended_s = time.monotonic() + others_s
        self.monitor.observe(before, self._sample(probe_s), time.monotonic())
        return split(started_s, sent_s, ended_s, waited_s=others_s, served_s=0.0)

    def facts(self) -> LinkFacts:
        assert isinstance(self.monitor.latest, LinkFacts), self.monitor.latest
        return self.monitor.latest

    def _probe(self) -> float | None:
        retransmitted = tcp_info.read(self.sock).total_retrans
        taken_s = []
        for _ in range(3):
            begun_s = time.monotonic()
            self._send(b"p")
            receive_exactly(self.sock, 1)
            taken_s.append(time.monotonic() - begun_s)
        return min(taken_s) if tcp_info.read(self.sock).total_retrans == retransmitted else None

    def _sample(self, probe_s: float | None = None) -> LinkSample:
        return LinkSample(
            at_s=time.monotonic(), tcp=tcp_info.read(self.sock), moved_bytes=self.moved, probe_rtt_s=probe_s
        )

    def _send(self, data: bytes) -> None:
        self.sock.sendall(data)
        self.moved += len(data)


@pytest.fixture
def network(make_network: MakeNetwork) -> Network:
    return make_network(("head", "w1", "w2"), rate=RATE)


@contextlib.contextmanager
def connected(network: Network, node: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection from ``node`` to the head: (the node's end, the head's end)."""
    with network.entered("head"):
        server = socket.create_server((network.address("head"), 0))
    with server, network.entered(node):
        ours = socket.create_connection(server.getsockname(), PATIENCE_S)
        theirs, _ = server.accept()
    theirs.settimeout(PATIENCE_S)
    with ours, theirs:
        yield ours, theirs


@contextlib.contextmanager
def worker_on(network: Network, node: str) -> Iterator[Worker]:
    """A worker that has seen its link at its best."""
    with connected(network, node) as (ours, theirs):
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        for sock in (ours, theirs):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tune(ours, plan_for("cubic", ["cubic"], 2, RATE_BYTES_PER_S, 1e-4))
        worker = Worker(ours, Shard(theirs))
        thread = threading.Thread(target=worker.shard.serve, daemon=True)
        thread.start()
        for _ in range(2):
            parts = worker.sync()
        assert cause(worker.monitor.latest, None, parts).cause is Cause.NONE
        assert worker.facts().congestion < 0.3
        yield worker
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)


@contextlib.contextmanager
def flow(network: Network, node: str) -> Iterator[None]:
    """Somebody else's bulk transfer from ``node`` to the head, with a queue."""
    with connected(network, node) as (ours, theirs):
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        flowing = threading.Event()

        def send() -> None:
            with contextlib.suppress(OSError):
                while True:
                    ours.sendall(bytes(65_536))

        def receive() -> None:
            got = 0
            with contextlib.suppress(OSError):
                while count := len(theirs.recv(65_536)):
                    got += count
                    if got > 1_500_000:
                        flowing.set()

        threads = [threading.Thread(target=loop, daemon=True) for loop in (send, receive)]
        for thread in threads:
            thread.start()
        assert flowing.wait(PATIENCE_S)
        yield
        for sock in (ours, theirs):
            sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(PATIENCE_S)


def verdict(worker: Worker, parts: SyncSplit) -> Cause:
    return cause(worker.monitor.latest, None, parts).cause


def test_a_shard_that_reads_slowly_is_not_taken_for_the_network(network: Network) -> None:
    with worker_on(network, "w1") as worker:
        calm = worker.facts().congestion
        worker.shard.pause_s = 0.04
        parts = worker.sync()
        assert verdict(worker, parts) is Cause.SLOW_SHARD
        assert worker.monitor.congestion == calm


def test_a_slow_worker_is_named_and_the_links_are_not(network: Network) -> None:
    with worker_on(network, "w1") as fast, worker_on(network, "w2") as slow:
        fast.sync()
        time.sleep(1.0)  # This is what the slow worker is slow with.
        parts_of_slow = slow.sync()
        held = held_up({1: fast.shard.arrived_s, 2: slow.shard.arrived_s})
        assert held is not None
        assert held[0] == 2
        assert held[1] > 1.0
        parts_of_fast = fast.sync(others_s=held[1])
        assert (verdict(fast, parts_of_fast), verdict(slow, parts_of_slow)) == (Cause.SLOW_WORKER, Cause.NONE)
        assert fast.facts().congestion < 0.3


def test_somebody_elses_transfer_is_congestion(network: Network) -> None:
    with worker_on(network, "w1") as worker:
        calm = worker.facts()
        network.set_rate("w2", "100mbit")  # So that the queue is where both meet, in front of the head.
        with flow(network, "w2"):
            parts = worker.sync()
            found = verdict(worker, parts)
        assert found is Cause.NETWORK_CONGESTED
        assert worker.facts().score > 0.4
        assert worker.facts().congestion > calm.congestion
        assert (worker.facts().probe_delay_s or 0) > 0.005


def test_a_link_that_got_a_lower_rate_is_slower_and_nobody_else_is_blamed(network: Network) -> None:
    with worker_on(network, "w1") as worker:
        network.set_rate("w1", "5mbit")
        worker.sync()
        parts = worker.sync()
        assert verdict(worker, parts) is Cause.LOWER_RATE
        assert worker.facts().goodput_bytes_per_s == pytest.approx(RATE_BYTES_PER_S / 4, rel=0.15)
        assert worker.facts().score == pytest.approx(0.75, abs=0.1)


def test_a_link_that_was_slow_from_the_start_is_not_congested(make_network: MakeNetwork) -> None:
    with worker_on(make_network(("head", "w1"), rate="5mbit"), "w1") as worker:
        assert verdict(worker, worker.sync()) is Cause.NONE
        assert worker.facts().queueing_delay_s > 0.05, "our own queue, which is nobody's congestion"
        assert worker.facts().congestion < 0.3


LOSS = 0.1
"""Of what arrives, in pieces of several segments each."""
SO_ATTACH_FILTER = 26


def lose(receiver: socket.socket, share: float) -> None:
    """Have the kernel throw away ``share`` of what arrives for a socket: a real loss, which the sender must repair.

    A classic BPF program: a random number below the limit → keep nothing, else keep all.
    """
    keep, random = 0xFFFFFFFF, 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
    program = [(0x20, 0, 0, random), (0x35, 0, 1, int(share * 2**32)), (6, 0, 0, keep), (6, 0, 0, 0)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    receiver.setsockopt(
        socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code))
    )


def test_lost_segments_are_loss(network: Network) -> None:
    with worker_on(network, "w1") as worker:
        lose(worker.shard.connection, LOSS)
        parts = worker.sync()
        assert verdict(worker, parts) is Cause.LOSS
        assert worker.facts().retransmits > 0
