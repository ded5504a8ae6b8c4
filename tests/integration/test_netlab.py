"""Shaped networks are what they say, and nothing of them stays behind."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from benchmarks.netlab import Network, requirements
from benchmarks.netlab.cluster import RayCluster
from benchmarks.netlab.naming import NetworkName
from benchmarks.netlab.ownership import sweep
from benchmarks.netlab.shaping import transfer_s

from tests.integration.netlab import MakeNetwork

pytestmark = pytest.mark.skipif(requirements() is not None, reason=f"needs {requirements()}")

MEGABYTE = 1_000_000
TIMEOUT_S = 20.0
REPOSITORY = Path(__file__).parents[2]

IN_A_BLOCK = 'with Network(("a",)) as network:'
WITHOUT_LEAVING = 'network = Network(("a",)).__enter__()\nif True:'

OWNER = """
import os, sys, time
from benchmarks.netlab import Network
{opening}
    network.popen("a", ["sleep", "1000"])
    (network.folder / "file").touch()
    if os.fork() == 0:
        sys.exit()  # A fork that ends takes nothing of its parent's with it.
    os.wait()
    print(network.namespace("a"), flush=True)
    {then}
"""

LOOK_UP_NOBODY = """
import contextlib, socket, time
began_s = time.monotonic()
with contextlib.suppress(socket.gaierror):
    socket.getnameinfo(("10.9.9.9", 1), socket.NI_NAMEREQD)
print(time.monotonic() - began_s)
"""

DRIVER = """
import ray
ray.init(log_to_driver=False)

@ray.remote
def where():
    return ray.util.get_node_ip_address()

print(*ray.get([where.options(resources={f"node:{node}": 1}).remote() for node in ("head", "w1")]))
"""


@contextmanager
def connection(network: Network, sender: str, receiver: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection between two nodes."""
    with network.entered(receiver):
        listener = socket.create_server((network.address(receiver), 0))
    with network.entered(sender):
        near = socket.socket()
    # The system's default may be BBR, whose first second says little about a link.
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    with listener, closing(near):
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        far.settimeout(TIMEOUT_S)
        with closing(far):
            yield near, far


def receive(sock: socket.socket, size: int) -> None:
    while size:
        piece = sock.recv(min(size, 1 << 16))
        assert piece, "the connection ended"
        size -= len(piece)


def receive_until_silent(sock: socket.socket, silence_s: float = 0.3) -> int:
    """How many bytes came; the connection is still open."""
    sock.settimeout(silence_s)
    size = 0
    with contextlib.suppress(TimeoutError):
        while piece := sock.recv(1 << 16):
            size += len(piece)
        pytest.fail("the connection ended")
    return size


def seconds_to_send(network: Network, sender: str, receiver: str, size: int) -> float:
    with connection(network, sender, receiver) as (near, far), sending(near, size):
        began_s = time.monotonic()
        receive(far, size)
        return time.monotonic() - began_s


@contextmanager
def sending(sock: socket.socket, size: int) -> Iterator[None]:
    thread = threading.Thread(target=sock.sendall, args=(bytes(size),))
    thread.start()
    yield
    thread.join(TIMEOUT_S)


class TestLinks:
    def test_the_rate_is_what_was_set_in_each_direction(self, make_network: MakeNetwork) -> None:
        network = make_network(("head", "w1"), rate="20mbit")
        limit_s = transfer_s(MEGABYTE, "20mbit")
        assert seconds_to_send(network, "w1", "head", MEGABYTE) == pytest.approx(limit_s, rel=0.1)
        network.set_rate("w1", "100mbit", "up")
        network.set_rate("head", "100mbit")
        assert seconds_to_send(network, "head", "w1", MEGABYTE) == pytest.approx(limit_s, rel=0.1)
        up_s = seconds_to_send(network, "w1", "head", 4 * MEGABYTE)
        assert up_s == pytest.approx(transfer_s(4 * MEGABYTE, "100mbit"), rel=0.1)

    def test_a_rate_changes_under_a_running_transfer(self, make_network: MakeNetwork) -> None:
        network = make_network(("head", "w1"), rate="10mbit")
        with connection(network, "w1", "head") as (near, far), sending(near, 4 * MEGABYTE):
            receive(far, MEGABYTE // 2)
            for node in network.nodes:
                network.set_rate(node, "80mbit")
            receive(far, MEGABYTE // 2)  # What was queued, and the sender finding out.
            began_s = time.monotonic()
            receive(far, 3 * MEGABYTE)
            took_s = time.monotonic() - began_s
        assert took_s == pytest.approx(transfer_s(3 * MEGABYTE, "80mbit"), rel=0.1)

    def test_a_cut_tells_nobody_and_after_healing_nothing_is_missing(self, make_network: MakeNetwork) -> None:
        network = make_network(("head", "w1"), rate="50mbit")
        with connection(network, "w1", "head") as (near, far), sending(near, 2 * MEGABYTE):
            receive(far, MEGABYTE // 2)
            network.cut("w1")
            arrived = receive_until_silent(far)  # What had passed the switch still does.
            assert arrived < 2 * MEGABYTE - MEGABYTE // 2
            network.heal("w1")
            far.settimeout(TIMEOUT_S)
            receive(far, 2 * MEGABYTE - MEGABYTE // 2 - arrived)

    def test_counters_count_what_went_over_the_link(self, make_network: MakeNetwork) -> None:
        network = make_network(("head", "w1"), rate="1gbit")
        seconds_to_send(network, "w1", "head", MEGABYTE)
        sender, receiver = network.counters("w1"), network.counters("head")
        assert MEGABYTE < sender.sent_bytes < 1.1 * MEGABYTE
        assert MEGABYTE < receiver.received_bytes <= 1.1 * MEGABYTE
        assert sender.received_bytes < 0.1 * MEGABYTE
        assert (sender.up_backlog_bytes, receiver.down_backlog_bytes) == (0, 0)

    def test_a_slow_link_drops_what_its_queue_cannot_hold(self, make_network: MakeNetwork) -> None:
        network = make_network(("head", "w1"), rate="1gbit")
        network.set_rate("head", "20mbit", "down")
        with network.entered("w1"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for _ in range(400):
                sender.sendto(bytes(1400), (network.address("head"), 9))
        down, up = network.counters("head").down_dropped_packets, network.counters("w1").up_dropped_packets
        assert 200 < down < 400  # Its queue has room for about 100.
        assert up == 0

    def test_congestion_control_of_those_that_do_not_choose(self, make_network: MakeNetwork) -> None:
        network = make_network(("head", "w1"))
        network.set_congestion_control("w1", "reno")
        with network.entered("head"):
            listener = socket.create_server((network.address("head"), 0))
        with listener, network.entered("w1"), socket.create_connection(listener.getsockname()) as sock:
            chosen = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert chosen.rstrip(b"\0") == b"reno"


class TestNodes:
    def test_names_are_looked_up_without_a_name_server(self, make_network: MakeNetwork) -> None:
        network = make_network(("head", "w1"))
        code = "import socket; print(*map(socket.gethostbyname, ['head', 'w1', socket.gethostname()]))"
        head, own = network.address("head"), network.address("w1")
        assert network.run("w1", [sys.executable, "-c", code]).stdout.split() == [head, own, own]
        assert float(network.run("w1", [sys.executable, "-c", LOOK_UP_NOBODY]).stdout) < 1

    def test_an_error_shows_what_was_said(self, make_network: MakeNetwork) -> None:
        network = make_network(("a",))
        with pytest.raises(subprocess.CalledProcessError) as raised:
            network.run("a", ["ls", "/nowhere"])
        assert "on a, it said: ls: cannot access '/nowhere'" in raised.value.__notes__[0]

    def test_networks_side_by_side_do_not_meet(self, make_network: MakeNetwork) -> None:
        one, other = make_network(("a", "b")), make_network(("a", "b"))
        assert one.address("a") != other.address("a")
        with other.entered("a"), socket.create_server((other.address("a"), 0)) as listener:
            address = listener.getsockname()
        with one.entered("b"), socket.socket() as sock:
            sock.settimeout(0.2)
            with pytest.raises(OSError, match=r"timed out|No route"):
                sock.connect(address)

    def test_processes_of_a_node_are_seen_and_ended_stubborn_ones_too(
        self, make_network: MakeNetwork
    ) -> None:
        network = make_network(("a", "b"))
        stubborn = (
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
        )
        with network.popen("a", [sys.executable, "-c", stubborn], stdout=subprocess.PIPE) as process:
            first_line(process)
            bystander = network.popen("b", ["sleep", "1000"])
            assert network.pids("a") == [process.pid]
            network.end_processes("a", patience_s=0.1)
            assert process.wait(TIMEOUT_S) == -signal.SIGKILL
            assert network.pids("a") == []
            assert bystander.poll() is None
        network.close()
        assert bystander.wait(TIMEOUT_S) == -signal.SIGTERM


class TestNothingIsLeft:
    def test_after_the_block_and_after_an_exception_in_it(self) -> None:
        for error in (None, ZeroDivisionError):
            try:
                with Network(("a", "b")) as network:
                    name = network.name
                    process = network.popen("a", ["sleep", "1000"])
                    (network.folder / "file").touch()
                    assert len(traces(name)) == 6  # Three namespaces, two nodes' files, the folder.
                    if error:
                        raise error
            except ZeroDivisionError:
                pass
            assert traces(name) == []
            assert process.wait(TIMEOUT_S) == -signal.SIGTERM

    @pytest.mark.parametrize(
        ("number", "status"),
        [
            (signal.SIGTERM, 128 + signal.SIGTERM),
            (signal.SIGHUP, 128 + signal.SIGHUP),
            (signal.SIGINT, -signal.SIGINT),
        ],
    )
    def test_after_a_signal_to_the_owner(self, number: int, status: int) -> None:
        with owner("time.sleep(1000)") as (process, namespace):
            name, pids = seen(namespace)
            process.send_signal(number)
            assert process.wait(TIMEOUT_S) == status
        assert traces(name) == []
        assert not any(map(running, pids))

    def test_after_an_end_without_leaving_the_block(self) -> None:
        with owner("sys.stdin.read()", WITHOUT_LEAVING) as (process, namespace):
            name, pids = seen(namespace)
            process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0
        assert traces(name) == []
        assert not any(map(running, pids))

    def test_after_a_kill_a_sweep_does_it_and_spares_the_living(self) -> None:
        with owner("time.sleep(1000)") as (process, namespace), Network(("a",)) as living:
            name, pids = seen(namespace)
            process.kill()
            process.wait(TIMEOUT_S)
            assert traces(name)
            assert all(map(running, pids))
            assert str(name) in sweep()
            assert traces(name) == []
            assert not any(map(running, pids))
            assert living.run("a", ["true"]).returncode == 0
            assert sweep() == []


@pytest.mark.ray
def test_a_ray_cluster_runs_tasks_on_each_node(make_network: MakeNetwork) -> None:
    network = make_network(("head", "w1"), rate="100mbit")
    with RayCluster(network, quick_health_checks=True) as cluster:
        answer = cluster.run("head", [sys.executable, "-P", "-c", DRIVER]).stdout.split()
        assert answer == [network.address("head"), network.address("w1")]
        cluster.kill_node("w1")
        cluster.wait_dead("w1", timeout_s=15)
    assert [network.pids(node) for node in network.nodes] == [[], []]


@contextmanager
def owner(then: str, opening: str = IN_A_BLOCK) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process with a network that then does something, and the namespace of its only node."""
    code = OWNER.format(then=then, opening=opening)
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process, first_line(process)
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], TIMEOUT_S)[0], "it printed nothing in time"
    return process.stdout.readline().strip()


def seen(namespace: str) -> tuple[NetworkName, list[int]]:
    """The network and the processes in it; both are there."""
    name = NetworkName.of(namespace)
    assert name is not None
    assert traces(name)
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    pids = [int(pid) for pid in listed.stdout.split()]
    assert pids
    return name, pids


def traces(name: NetworkName) -> list[str]:
    """What there is of a network on the machine."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    files = [str(path) for folder in ("/etc/netns", "/tmp") for path in Path(folder).glob(f"{name}*")]
    return [line for line in listed.splitlines() if line.startswith(str(name))] + files


def running(pid: int) -> bool:
    """Whether a process is there; one whose exit status nobody has read is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
