"""A network of nodes on one machine, whose links can be given a rate, changed and cut while programs run.

Each node is a network namespace with an interface ``eth0``; all are ports of one bridge in a namespace of its own, so
that the machine's own network never sees a device of ours. Each link is shaped both ways: what leaves the node at its
``eth0``, what goes to it at its port of the switch.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from benchmarks.netlab import namespaces, ownership
from benchmarks.netlab.naming import NODE, SWITCH, NetworkName
from benchmarks.netlab.requirements import requirements
from benchmarks.netlab.shaping import bucket
from benchmarks.netlab.tools import ip, tool

Direction = Literal["up", "down", "both"]
"""``up``: from the node to the switch."""

MOST_NODES = 200
RUN_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Counters:
    """What went over a node's link since it was made; bytes with Ethernet headers."""

    sent_bytes: int
    received_bytes: int
    up_dropped_packets: int
    """Dropped by the node's own queue: TCP sees them as lost."""
    down_dropped_packets: int
    """Dropped by the queue of its port of the switch."""
    up_backlog_bytes: int
    """In the queue now."""
    down_backlog_bytes: int


class Network:
    """Nodes joined by a switch; a context manager, there from ``__enter__`` to ``__exit__``.

        with Network(("head", "w1", "w2"), rate="100mbit") as network:
            server = network.popen("head", [sys.executable, "server.py", network.address("head")])
            network.set_rate("w1", "20mbit")

    ``rate`` is every link's at first, both ways: a number with kbit, mbit or gbit. Any number of networks can be there
    side by side, in any number of processes. Entering raises RuntimeError where `requirements` misses something.
    """

    def __init__(self, nodes: Sequence[str] = ("head", "w1", "w2"), rate: str = "100mbit") -> None:
        _check_nodes(nodes)
        bucket(rate)  # Refuses what it cannot read.
        self.nodes = tuple(nodes)
        self._first_rate = rate
        self._name: NetworkName | None = None

    def __enter__(self) -> Self:
        if missing := requirements():
            raise RuntimeError(f"a shaped network needs {missing}")
        self._name = ownership.claim()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes on the nodes and remove everything; again does nothing."""
        if self._name is not None:
            ownership.release(self._name)
            self._name = None

    @property
    def name(self) -> NetworkName:
        """What its namespaces and folder are called after."""
        if self._name is None:
            raise RuntimeError("the network is not there: use it inside its `with` block")
        return self._name

    @property
    def folder(self) -> Path:
        """A folder with a short path for the network's files, removed with it."""
        return ownership.scratch(self.name)

    def address(self, node: str) -> str:
        """The node's IPv4 address; nodes also know each other by name."""
        return f"{self.name.subnet}.{1 + self._index(node)}"

    def namespace(self, node: str) -> str:
        """The node's network namespace, for ``ip netns exec``."""
        self._index(node)
        return self.name.namespace(node)

    def set_rate(self, node: str, rate: str, direction: Direction = "both") -> None:
        """Change a link's rate; connections and what is queued stay."""
        self._shape(node, rate, direction, "change")

    def cut(self, node: str) -> None:
        """Unplug the node at the switch: packets vanish, and no connection is told (no FIN, no RST)."""
        self._set_port(node, "down")

    def heal(self, node: str) -> None:
        """Plug a node in again that was cut off; connections go on when TCP next retransmits."""
        self._set_port(node, "up")

    def set_congestion_control(self, node: str, algorithm: str) -> None:
        """Give the node's new connections that do not choose themselves ``reno``, ``cubic`` or ``bbr``."""
        ip(*f"-n {self.namespace(node)} route change {self._subnet} dev eth0 congctl {algorithm}".split())

    def counters(self, node: str) -> Counters:
        """What went over the node's link so far."""
        link = json.loads(ip("-n", self.namespace(node), "-j", "-s", "link", "show", "eth0"))[0]["stats64"]
        up, down = (_queue(*place) for place in self._ends(node, "both"))
        return Counters(
            sent_bytes=link["tx"]["bytes"],
            received_bytes=link["rx"]["bytes"],
            up_dropped_packets=up["drops"],
            down_dropped_packets=down["drops"],
            up_backlog_bytes=up["backlog"],
            down_backlog_bytes=down["backlog"],
        )

    def popen(self, node: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a node; options as for `subprocess.Popen`. It ends with the network at the latest.

        By default it does not get the terminal's Ctrl-C (``start_new_session``).
        """
        options = {"start_new_session": True} | options
        return subprocess.Popen(namespaces.argv_in(self.namespace(node), argv), **options)

    def run(self, node: str, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a process on a node to its end; options as for `subprocess.run`.

        By default its output is returned as text, it may take `RUN_TIMEOUT_S`, and an exit status other than 0 is an
        error that shows what it said.
        """
        options = {"capture_output": True, "text": True, "timeout": RUN_TIMEOUT_S, "check": True} | options
        try:
            return subprocess.run(namespaces.argv_in(self.namespace(node), argv), **options)
        except subprocess.CalledProcessError as error:
            error.add_note(f"on {node}, it said: {error.stderr or error.stdout}")
            raise

    def entered(self, node: str) -> contextlib.AbstractContextManager[None]:
        """The calling thread is on the node during the block: sockets that it makes are the node's, for good.

        Names are still looked up as on the machine; threads and processes made inside start on the node too.
        """
        return namespaces.entered(self.namespace(node))

    def pids(self, node: str) -> list[int]:
        """The processes that run on the node."""
        return namespaces.pids(self.namespace(node))

    def end_processes(self, node: str, patience_s: float = namespaces.PATIENCE_S) -> None:
        """End all processes on the node, after ``patience_s`` by SIGKILL, with 0 at once: as if it lost power."""
        namespaces.end(self.namespace(node), patience_s)

    @property
    def _switch(self) -> str:
        return self.name.namespace(SWITCH)

    @property
    def _subnet(self) -> str:
        return f"{self.name.subnet}.0/24"

    def _index(self, node: str) -> int:
        try:
            return self.nodes.index(node)
        except ValueError:
            raise ValueError(f"node {node!r}: the network has {', '.join(self.nodes)}") from None

    def _build(self) -> None:
        ip("-n", self._switch, "link", "add", "br0", "up", "type", "bridge")
        for node in self.nodes:
            self._add(node)

    def _add(self, node: str) -> None:
        namespace, port = self.namespace(node), _port(node)
        namespaces.write_files(namespace, self._files(node))
        namespaces.create(namespace)
        ip(*f"-n {namespace} link add eth0 type veth peer name {port} netns {self._switch}".split())
        ip("-n", namespace, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        self._shape(node, self._first_rate, "both", "add")
        ip("-n", namespace, "link", "set", "eth0", "up")
        # Ray and torch ask which address a packet to the Internet would leave from: that needs a route, even a dead one.
        ip(*f"-n {namespace} route add default via {self.name.subnet}.254 dev eth0".split())
        ip("-n", self._switch, "link", "set", port, "master", "br0", "up")

    def _files(self, node: str) -> dict[str, str]:
        """Names without a name server, which could not be reached: each look-up of an address would wait 3 s for it."""
        lines = [f"{self.address(other)} {other}" for other in self.nodes]
        lines[self._index(node)] += f" {socket.gethostname()}"
        return {"hosts": "\n".join(["127.0.0.1 localhost", *lines, ""]), "resolv.conf": ""}

    def _ends(self, node: str, direction: Direction) -> list[tuple[str, str]]:
        """Where a link is shaped: (namespace, interface)."""
        ends = {"up": (self.namespace(node), "eth0"), "down": (self._switch, _port(node))}
        return list(ends.values()) if direction == "both" else [ends[direction]]

    def _shape(self, node: str, rate: str, direction: Direction, verb: str) -> None:
        arguments = bucket(rate).arguments()
        for namespace, interface in self._ends(node, direction):
            tool("tc", "-n", namespace, "qdisc", verb, "dev", interface, "root", *arguments)

    def _set_port(self, node: str, state: str) -> None:
        self._index(node)
        ip("-n", self._switch, "link", "set", _port(node), state)


def _check_nodes(nodes: Sequence[str]) -> None:
    wrong = [node for node in nodes if not NODE.fullmatch(node) or node == SWITCH]
    if wrong:
        raise ValueError(
            f"nodes {wrong}: a node's name has at most 12 small letters, digits and hyphens, and is not {SWITCH!r}"
        )
    if not 1 <= len(nodes) <= MOST_NODES or len(set(nodes)) != len(nodes):
        raise ValueError(f"nodes {list(nodes)}: give 1 to {MOST_NODES} different names")


def _port(node: str) -> str:
    return f"p-{node}"


def _queue(namespace: str, interface: str) -> dict[str, Any]:
    shown: list[dict[str, Any]] = json.loads(
        tool("tc", "-n", namespace, "-j", "-s", "qdisc", "show", "dev", interface)
    )
    return shown[0]
