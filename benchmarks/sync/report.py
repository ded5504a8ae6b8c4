"""Fields, their bars, the table and the file of results."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cadenza.plane.congestion import Setting, choosable, choose

RESULTS = Path(__file__).parent.parent / "results" / "sync.json"

SYSTEM_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True)
class Bar:
    """What a field has to reach."""

    limit: float
    at_most: bool = True
    unit: str = "ratio"

    def met(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.limit:g}"


BARS: dict[str, Bar] = {
    "round_vs_limit_2w_100": Bar(1.05),
    "round_vs_limit_2w_20": Bar(1.06),
    "round_vs_limit_3w_100": Bar(1.05),
    "round_vs_limit_3w_20": Bar(1.12),
    "commit_cost": Bar(0.02),
    "step_vs_ddp_fp32_20": Bar(1.05),
    "step_vs_ddp_fp32_100": Bar(1.05),
    "step_vs_ddp_int8_20": Bar(0.32),
    "step_vs_ddp_int8_100": Bar(0.45),
    "incast_goodput": Bar(0.93, at_most=False),
    "incast_worst_round": Bar(1.10),
    "fan_in_vs_limit": Bar(1.15),
    "overlap_hidden_20": Bar(0.90, at_most=False),
    "overlap_hidden_100": Bar(0.65, at_most=False),
    "loopback_vs_socket": Bar(0.55, at_most=False),
    "cpu_s_per_gb": Bar(0.9, unit="s/GB"),
    "rss_growth_mb": Bar(16, unit="MB"),
}


@dataclass(frozen=True)
class Measured:
    """A field's value, and the samples that it is the median of, or the worst of."""

    value: float
    samples: Sequence[float]

    @classmethod
    def median(cls, samples: Sequence[float]) -> Measured:
        return cls(statistics.median(samples), samples)


@dataclass
class Findings:
    """What one section found."""

    fields: dict[str, Measured] = field(default_factory=dict)
    also: dict[str, Any] = field(default_factory=dict)
    """Plain data without a bar."""


@dataclass(frozen=True)
class Effort:
    """How thorough the measurement is."""

    quick: bool

    def pick(self, quick: int, full: int) -> int:
        """How many, or how often."""
        return quick if self.quick else full


def system_congestion_control() -> str:
    """What sockets use that do not choose."""
    return SYSTEM_CONGESTION_CONTROL.read_text().strip()


def own_congestion_control() -> str:
    """What our connections between hosts use by default."""
    return choose(Setting.AUTO, choosable()).value


def print_table(fields: dict[str, Measured]) -> None:
    """One line for each field."""
    print(f"{'field':24}{'value':>9}{'bar':>9}  ok")
    for name, measured in fields.items():
        bar = BARS[name]
        verdict = "yes" if bar.met(measured.value) else "NO"
        print(f"{name:24}{measured.value:9.3f}{bar!s:>9}  {verdict}", flush=True)


def missed(fields: Iterable[tuple[str, Measured]]) -> list[str]:
    """Fields that are not as good as their bars."""
    return [name for name, measured in fields if not BARS[name].met(measured.value)]


def merge(section: str, found: Findings, effort: Effort, path: Path = RESULTS) -> None:
    """Put a section's findings in the place of its earlier ones; the others stay."""
    document = json.loads(path.read_text()) if path.exists() else {}
    fields = document.get("fields", {})
    for name, measured in found.fields.items():
        bar = BARS[name]
        fields[name] = {
            "value": rounded(measured.value),
            "bar": str(bar),
            "ok": bar.met(measured.value),
            "unit": bar.unit,
            "quick": effort.quick,
            "samples": rounded(list(measured.samples)),
        }
    document = {
        "fields": {name: fields[name] for name in BARS if name in fields},
        "also": {**document.get("also", {}), section: rounded(found.also)},
        "machine": _machine(),
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(_as_text(document))


def rounded(data: Any) -> Any:
    """Plain data with numbers of four significant digits, as much as a measurement is worth."""
    match data:
        case float():
            return float(f"{data:.4g}")
        case dict():
            return {name: rounded(value) for name, value in data.items()}
        case list() | tuple():
            return [rounded(value) for value in data]
    return data


def _as_text(document: Any) -> str:
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    # A list of numbers on one line, so that a field's samples are not most of the file.
    return re.sub(r"\[[\s\d.,e+-]*\]", lambda found: " ".join(found[0].split()), text)


def _machine() -> dict[str, Any]:
    import torch  # Here, so that tables need no torch.

    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "congestion_control_of_the_system": system_congestion_control(),
        "congestion_control_of_ours": own_congestion_control(),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
