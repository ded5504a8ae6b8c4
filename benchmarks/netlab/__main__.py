"""Shaped networks by hand: ``python -m benchmarks.netlab up w1 w2 --rate 100mbit``; see docs/netlab.md."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import cast

from benchmarks.netlab.cluster import RayCluster
from benchmarks.netlab.conditions import Conditions
from benchmarks.netlab.network import Direction, Network
from benchmarks.netlab.ownership import sweep
from benchmarks.netlab.proxy import Proxy
from benchmarks.netlab.tools import ToolFailed

HELP = "rate NODE RATE [up|down] · cut NODE · heal NODE · counters NODE; Ctrl-C removes everything"


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and do what it says."""
    arguments = _parser().parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):
        arguments.action(arguments)


def up(arguments: argparse.Namespace) -> None:
    """Hold a network, and on request a Ray cluster on it, until Ctrl-C."""
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(Network(("head", *arguments.nodes), arguments.rate))
        except (RuntimeError, ValueError) as error:
            sys.exit(str(error))
        for node in network.nodes:
            print(f"{node} {network.address(node)}: ip netns exec {network.namespace(node)} bash")
        if arguments.ray:
            cluster = stack.enter_context(RayCluster(network))
            new = cluster.environment.items() - os.environ.items()
            print("drivers need: export", *(f"{name}={value}" for name, value in sorted(new)))
        print(HELP, flush=True)
        for line in sys.stdin:
            _obey(network, line.split())
        signal.pause()  # There is no terminal to tell more.


def proxy(arguments: argparse.Namespace) -> None:
    """Hold a proxy until Ctrl-C; both directions have the same conditions."""
    conditions = Conditions(
        delay_ms=arguments.delay_ms,
        rate=arguments.rate,
        loss=arguments.loss,
        retransmission_ms=arguments.retransmission_ms,
    )
    with Proxy(
        _host_and_port(arguments.target),
        forward=conditions,
        backward=conditions,
        listen=_host_and_port(arguments.listen),
        seed=arguments.seed,
    ) as running:
        print("listening on {}:{}".format(*running.address), flush=True)
        signal.pause()


def sweep_all(arguments: argparse.Namespace) -> None:
    """Remove what dead owners left."""
    removed = sweep()
    print("\n".join(removed) or "nothing was left")


def _obey(network: Network, words: Sequence[str]) -> None:
    """One line of what is typed while a network is up."""
    try:
        match words:
            case ["rate", node, rate]:
                network.set_rate(node, rate)
            case ["rate", node, rate, "up" | "down" as direction]:
                network.set_rate(node, rate, cast(Direction, direction))
            case ["cut", node]:
                network.cut(node)
            case ["heal", node]:
                network.heal(node)
            case ["counters", node]:
                print(network.counters(node), flush=True)
            case _:
                print(HELP, flush=True)
    except (ToolFailed, ValueError) as error:
        print(error, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.netlab", description=__doc__)
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("up", help="hold a network until Ctrl-C")
    command.add_argument("nodes", nargs="*", default=["w1", "w2"], help="beside head; w1 and w2 unless told")
    command.add_argument("--rate", default="100mbit")
    command.add_argument("--ray", action="store_true", help="start Ray on all nodes")
    command.set_defaults(action=up)

    command = commands.add_parser("proxy", help="hold a proxy with delay and loss until Ctrl-C")
    command.add_argument("target", help="HOST:PORT")
    command.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT; port 0 takes a free one")
    command.add_argument("--delay-ms", type=float, default=0.0, help="each way")
    command.add_argument("--rate", help="such as 20mbit")
    command.add_argument("--loss", type=float, default=0.0, help="chance of each segment")
    command.add_argument("--retransmission-ms", type=float, default=200.0, help="what a lost segment costs")
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(action=proxy)

    command = commands.add_parser("sweep", help="remove what killed processes left")
    command.set_defaults(action=sweep_all)
    return parser


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        sys.exit(f"address {text!r}: give HOST:PORT")
    return host, int(port)


if __name__ == "__main__":
    main()
