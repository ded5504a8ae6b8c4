"""Real multi-node networks on one machine: nodes are network namespaces whose links can be shaped and cut.

`Network` needs root and iproute2 (`requirements` tells what is missing); `Proxy` adds delay and loss to single TCP
connections and needs neither. How to use them: docs/netlab.md.
"""

from benchmarks.netlab.conditions import Conditions
from benchmarks.netlab.network import Counters, Direction, Network
from benchmarks.netlab.proxy import Proxy
from benchmarks.netlab.requirements import requirements

__all__ = ["Conditions", "Counters", "Direction", "Network", "Proxy", "requirements"]
