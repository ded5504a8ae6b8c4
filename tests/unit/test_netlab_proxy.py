"""The proxy's arithmetic, and that real connections through it feel what it imitates."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise

import pytest
from benchmarks.netlab.conditions import SEGMENT_BYTES, Conditions, Order, Road
from benchmarks.netlab.proxy import Proxy

TIMEOUT_S = 10.0


@contextmanager
def server() -> Iterator[socket.socket]:
    """A listening socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        yield listener


@contextmanager
def path(**options: object) -> Iterator[tuple[Proxy, socket.socket, socket.socket]]:
    """A proxy, and both ends of a connection through it."""
    with server() as listener, Proxy(listener.getsockname(), **options) as proxy:  # type: ignore[arg-type]
        near, far = connected(proxy, listener)
        with closing(near), closing(far):
            yield proxy, near, far


def connected(proxy: Proxy, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(proxy.address, TIMEOUT_S)
    far, _ = listener.accept()
    far.settimeout(TIMEOUT_S)
    return near, far


def received(sock: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where the other side ends before."""
    data = bytearray()
    while len(data) < size and (piece := sock.recv(min(size - len(data), 1 << 20))):
        data += piece
    return bytes(data)


def seconds_to_send(near: socket.socket, far: socket.socket, size: int) -> float:
    """How long bytes take. Other processes of the machine can only make it more: take the least of a few."""
    began = time.monotonic()
    sender = threading.Thread(target=near.sendall, args=(bytes(size),))
    sender.start()
    assert len(received(far, size)) == size
    took_s = time.monotonic() - began
    sender.join()
    return took_s


class TestRoad:
    def test_delay_is_the_same_for_all(self) -> None:
        road = Road()
        conditions = Conditions(delay_ms=30)
        assert [road.send(10**6, now_s, conditions) for now_s in (1.0, 1.0, 2.5)] == pytest.approx(
            [1.03, 1.03, 2.53]
        )

    def test_rate_is_shared_and_an_idle_road_saves_nothing_up(self) -> None:
        road = Road()
        conditions = Conditions(rate="8mbit")  # A byte per microsecond.
        arrivals = [road.send(1000, now_s, conditions) for now_s in (0.0, 0.0, 0.0, 10.0)]
        assert arrivals == pytest.approx([0.001, 0.002, 0.003, 10.001])


class TestOrder:
    def test_nothing_overtakes_when_the_delay_falls(self) -> None:
        order = Order(random.Random(0))
        calm = Conditions()
        assert [order.deliver(1, arrives_s, calm) for arrives_s in (5.0, 3.0, 6.0)] == [5.0, 5.0, 6.0]

    def test_each_lost_segment_holds_up_what_is_behind_it(self) -> None:
        lossy = Conditions(loss=0.25, retransmission_ms=200)
        order = Order(random.Random("seed"))
        delivered = [0.0, *(order.deliver(SEGMENT_BYTES, 0.0, lossy) for _ in range(4000))]
        holds = [later - earlier for earlier, later in pairwise(delivered)]
        assert all(hold == pytest.approx(0) or hold == pytest.approx(0.2) for hold in holds)
        assert sum(hold > 0.1 for hold in holds) / 4000 == pytest.approx(
            0.25, abs=0.03
        )  # 4 standard deviations.

    @pytest.mark.parametrize("piece", [1, 100, SEGMENT_BYTES, 7000])
    def test_how_bytes_are_cut_up_changes_nothing(self, piece: int) -> None:
        lossy = Conditions(loss=0.3)
        size = 140_000
        whole = Order(random.Random(7)).deliver(size, 0.0, lossy)
        parts = Order(random.Random(7))
        delivered = [parts.deliver(min(piece, size - at), 0.0, lossy) for at in range(0, size, piece)]
        assert whole > 1
        assert delivered[-1] == pytest.approx(whole)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"delay_ms": -1.0}, "delay_ms -1"),
        ({"delay_ms": float("nan")}, "delay_ms nan"),
        ({"retransmission_ms": -0.1}, "retransmission_ms"),
        ({"loss": 1.0}, "loss 1"),
        ({"rate": "20 Mbit/s"}, "rate '20 Mbit/s'"),
        ({"rate": "0mbit"}, "rate '0mbit'"),
    ],
)
def test_impossible_conditions_are_refused_by_name(wrong: dict[str, float | str], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        Conditions(**wrong)  # type: ignore[arg-type]


class TestProxy:
    def test_bytes_pass_unchanged_both_ways_and_ends_are_passed_on(self) -> None:
        data = random.Random(1).randbytes(3_000_000)

        def send(sock: socket.socket) -> None:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)

        with path() as (_, near, far):
            sender = threading.Thread(target=send, args=(near,))
            sender.start()
            assert received(far, len(data) + 1) == data
            far.sendall(b"answer")  # Half closed: this direction is still open.
            far.close()
            assert received(near, 100) == b"answer"
            sender.join()

    def test_each_direction_has_its_own_delay(self) -> None:
        with path(forward=Conditions(delay_ms=60), backward=Conditions(delay_ms=20)) as (_, near, far):
            there_s = [seconds_to_send(near, far, 1) for _ in range(3)]
            back_s = [seconds_to_send(far, near, 1) for _ in range(3)]
        assert 0.060 <= min(there_s) < 0.090
        assert 0.020 <= min(back_s) < 0.050

    def test_a_delay_does_not_limit_what_is_on_its_way(self) -> None:
        with path(forward=Conditions(delay_ms=100)) as (_, near, far):
            assert 0.1 <= min(seconds_to_send(near, far, 500_000) for _ in range(3)) < 0.19  # In one flight.

    def test_the_window_does(self) -> None:
        with path(forward=Conditions(delay_ms=50), window_bytes=1 << 17) as (_, near, far):
            assert seconds_to_send(near, far, 6 << 17) >= 0.25

    def test_rate_holds_and_can_be_changed(self) -> None:
        with path(forward=Conditions(rate="20mbit")) as (proxy, near, far):
            assert 0.08 <= min(seconds_to_send(near, far, 200_000) for _ in range(3)) < 0.09
            proxy.forward = Conditions(rate="80mbit")
            assert 0.04 <= min(seconds_to_send(near, far, 400_000) for _ in range(3)) < 0.05

    def test_losses_are_the_same_for_the_same_seed(self) -> None:
        lossy = Conditions(loss=0.05, retransmission_ms=20)
        took_s = []
        for _ in range(2):
            with path(forward=lossy, seed=3) as (_, near, far):
                took_s.append(seconds_to_send(near, far, 100 * SEGMENT_BYTES))
        draws = random.Random("3 0 0")
        expected_s = 0.02 * sum(draws.random() < 0.05 for _ in range(100))
        assert expected_s > 0.05
        assert all(expected_s <= each_s < expected_s + 0.25 for each_s in took_s)

    def test_frozen_nothing_arrives_and_nobody_is_told_thawed_nothing_is_missing(self) -> None:
        with path() as (proxy, near, far):
            proxy.freeze()
            near.sendall(b"hello")
            far.settimeout(0.1)
            with pytest.raises(TimeoutError):
                far.recv(1)
            proxy.thaw()
            far.settimeout(TIMEOUT_S)
            assert received(far, 5) == b"hello"

    def test_cut_resets_both_ends_and_new_connections_are_served(self) -> None:
        with server() as listener, Proxy(listener.getsockname()) as proxy:
            near, far = connected(proxy, listener)
            near.sendall(b"x")
            received(far, 1)
            proxy.cut()
            for end in (near, far):
                with pytest.raises(ConnectionResetError), end:
                    end.recv(1)
            near, far = connected(proxy, listener)
            with near, far:
                near.sendall(b"again")
                assert received(far, 5) == b"again"
                assert proxy.connections == 1

    def test_a_reset_is_passed_on(self) -> None:
        with path() as (_, near, far):
            near.sendall(b"x")
            received(far, 1)
            near.sendall(b"never read")
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            far.close()
            with pytest.raises(ConnectionResetError):
                near.recv(1)

    def test_a_target_that_refuses_is_a_reset(self) -> None:
        with server() as listener:
            nobody = listener.getsockname()
        with (
            Proxy(nobody) as proxy,
            pytest.raises(ConnectionResetError),  # While it connects, even, where the proxy is quick.
            socket.create_connection(proxy.address, TIMEOUT_S) as near,
        ):
            near.recv(1)

    def test_a_taken_port_is_an_error_and_leaving_ends_everything(self) -> None:
        with server() as listener:
            with path(listen=("127.0.0.1", 0)) as (proxy, _, _), pytest.raises(OSError, match="in use"):
                Proxy(listener.getsockname(), listen=proxy.address).__enter__()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(proxy.address, 1)
