"""Wait, on a node of a cluster, until Ray's own table of nodes says what is expected; a program of its own.

``python -P alive.py <gcs address> <timeout, s> --alive <ip>... --dead <ip>...`` ends with 0 as soon as each of the
first is alive and none of the second; with 1 and what it saw on stderr where that takes too long. It asks the cluster's
control store (GCS) as Ray's own tools do, without a driver and without the dashboard.
"""

from __future__ import annotations

import argparse
import sys
import time

POLL_S = 0.1
"""The store tells nobody of changes but raylets and drivers; asking takes it less than a millisecond."""

ALIVE = 0
"""A dead node keeps its row, and one that has come back has several."""


def addresses(gcs_address: str) -> set[str]:
    """The addresses of the nodes that are alive."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    nodes = GcsClient(address=gcs_address).get_all_node_info().values()
    return {node.node_manager_address for node in nodes if node.state == ALIVE}


def main() -> None:
    """Read the command line and wait."""
    parser = argparse.ArgumentParser()
    parser.add_argument("gcs_address")
    parser.add_argument("timeout_s", type=float)
    parser.add_argument("--alive", nargs="*", default=[])
    parser.add_argument("--dead", nargs="*", default=[])
    wanted = parser.parse_args()
    deadline_s = time.monotonic() + wanted.timeout_s
    while True:
        seen = addresses(wanted.gcs_address)
        if seen.issuperset(wanted.alive) and seen.isdisjoint(wanted.dead):
            return
        if time.monotonic() > deadline_s:
            sys.exit(f"alive are {sorted(seen)}")
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
