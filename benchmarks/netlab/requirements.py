"""What the machine lacks for shaped networks."""

from __future__ import annotations

import functools
import os
import shutil

from benchmarks.netlab.naming import SWITCH
from benchmarks.netlab.ownership import claim, release
from benchmarks.netlab.shaping import bucket
from benchmarks.netlab.tools import ToolFailed, ip, tool


@functools.cache
def requirements() -> str | None:
    """What is missing for a `Network`, as a text; none where nothing is."""
    if os.geteuid() != 0:
        return "root: network namespaces need it"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"the command {command!r}: install the package iproute2"
    try:
        _probe()
    except ToolFailed as error:
        return f"namespaces with bridge, veth and tbf: {error}"
    return None


def _probe() -> None:
    """Make one of everything: a container may have the tools and the user, but not the right or the module."""
    name = claim()
    try:
        namespace = name.namespace(SWITCH)
        ip("-n", namespace, "link", "add", "br0", "type", "bridge")
        ip("-n", namespace, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        tool("tc", "-n", namespace, "qdisc", "add", "dev", "eth0", "root", *bucket("20mbit").arguments())
    finally:
        release(name)
