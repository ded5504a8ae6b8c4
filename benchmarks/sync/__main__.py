"""``python -m benchmarks.sync [section ...]``: measure, print a table, and write ``benchmarks/results/sync.json``.

Sections that are not measured keep what was found earlier. ``QUICK=1`` measures less often. Exit code 1 if a bar is
missed. docs/benchmarks.md tells what each field is.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time

from benchmarks.netlab.requirements import requirements
from benchmarks.sync.report import RESULTS, Effort, Findings, Measured, merge, missed, print_table

SECTIONS = ("rounds", "ddp", "incast", "overlap", "loopback", "memory")
WITHOUT_NETWORK = ("loopback", "memory")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="section", help=", ".join(SECTIONS))
    chosen = parser.parse_args().sections or SECTIONS
    if unknown := [name for name in chosen if name not in SECTIONS]:
        parser.error(f"section {unknown[0]!r}: choose among {', '.join(SECTIONS)}")
    if any(name not in WITHOUT_NETWORK for name in chosen) and (lacking := requirements()):
        parser.error(
            f"a shaped network needs {lacking}; without one, only {', '.join(WITHOUT_NETWORK)} can run"
        )
    effort = Effort(quick=os.environ.get("QUICK") == "1")
    fields: dict[str, Measured] = {}
    for name in chosen:
        begun_at = time.monotonic()
        print(f"{name} …", file=sys.stderr, flush=True)
        found: Findings = importlib.import_module(f"benchmarks.sync.{name}").run(effort)
        merge(name, found, effort)
        fields |= found.fields
        print(f"{name}: {time.monotonic() - begun_at:.0f} s", file=sys.stderr, flush=True)
    print_table(fields)
    print(f"written to {os.path.relpath(RESULTS)}")
    if bad := missed(fields.items()):
        print(f"bars missed: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
