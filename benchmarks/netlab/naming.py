"""Names that tell whose they are: ``cdz<pid>t<start>x<number>`` before everything that a network leaves on the machine.

A process is known by its id and the time at which it began, so that a leftover is recognised even where its owner's
id has been given to another process. Nothing else about a network is written down.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

SUBNETS = 192 * 256
"""10.64.0.0/24 up to 10.255.255.0/24."""

SWITCH = "switch"
"""The namespace with the bridge; no node may have this name."""

NODE = re.compile(r"[a-z][a-z0-9-]{0,11}")
"""With two characters more it names the node's port of the switch, and an interface's name has at most 15."""


@dataclass(frozen=True)
class NetworkName:
    """Names one network: its owner's process id and start (clock ticks since boot), and the network's number there."""

    pid: int
    start: int
    number: int

    def __str__(self) -> str:
        return f"cdz{self.pid}t{self.start}x{self.number}"

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Read it back from the name of a namespace or folder; none where it is not one of ours."""
        match = re.match(r"cdz(\d+)t(\d+)x(\d+)(?:-|$)", name)
        return cls(*map(int, match.groups())) if match else None

    def namespace(self, node: str) -> str:
        """The network namespace of a node."""
        return f"{self}-{node}"

    @property
    def subnet(self) -> str:
        """The first three numbers of the addresses, such as ``10.77.3``.

        Namespaces would allow the same addresses everywhere. But a Ray head looks through all processes of the
        machine for a cluster on its address, and logs are easier to read.
        """
        index = (self.pid * 97 + self.number) % SUBNETS
        return f"10.{64 + index // 256}.{index % 256}"

    @property
    def owner_lives(self) -> bool:
        """Whether the process that made the network still exists."""
        return start_of(self.pid) == self.start


def start_of(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; none where there is none, or only its unread exit status."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
