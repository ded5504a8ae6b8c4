"""What the session costs per local step: the optimizer's step in a plain loop against ``session.step``.

``python -m benchmarks.session`` prints a table and writes ``benchmarks/results/session.json``. Both loops do the
same forward and backward; what follows is timed: ``optimizer.step`` and ``zero_grad``, or ``session.step``, which
does both. Blocks of the two loops alternate on one thread, each pair in the other order, so that a drift of the
machine's speed falls on both; the overhead is the median over pairs of the difference per step. The session runs
alone, and its interval is longer than the run: no sync falls into a block. ``QUICK=1`` measures a tenth of the
pairs and writes nothing.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cadenza

RESULTS = Path(__file__).parent / "results" / "session.json"

BAR_US = 50.0
"""The most that a local step without a sync may cost beyond the optimizer's, in microseconds."""

PAIRS = 1000
STEPS_PER_BLOCK = 10
"""Short, so that other processes interrupt few of the blocks, and the median leaves those out."""

WARM_UP_STEPS = 200
BATCH = 8
WIDTH = 32

Step = Callable[[Tensor], None]


@dataclass(frozen=True)
class Sample:
    """One pair of blocks, in microseconds per step."""

    plain_us: float
    session_us: float


@dataclass(frozen=True)
class Result:
    """A model's medians over all pairs, in microseconds per step."""

    model: str
    tensors: int
    parameters: int
    plain_us: float
    session_us: float
    overhead_us: float
    """Median of the pairs' differences: the session's own cost."""
    overhead_quartiles_us: tuple[float, float]


def tiny_model() -> nn.Module:
    """One layer, two parameter tensors: the step itself costs next to nothing."""
    return nn.Linear(WIDTH, WIDTH)


def deep_model() -> nn.Module:
    """Thirty layers, sixty parameter tensors: what is paid per tensor shows."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(30)))


def measure(name: str, build: Callable[[], nn.Module], pairs: int) -> Result:
    """Run both loops on models of their own that start the same."""
    torch.manual_seed(0)
    plain, joined = build(), build()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    joined_optimizer = torch.optim.SGD(joined.parameters(), lr=1e-3)

    def plain_step(loss: Tensor) -> None:
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    with cadenza.join(joined, joined_optimizer) as session:

        def session_step(loss: Tensor) -> None:
            session.step(loss, samples=BATCH)

        samples = alternate((plain, plain_step), (joined, session_step), pairs)
    return summarise(name, plain, samples)


def alternate(plain: tuple[nn.Module, Step], joined: tuple[nn.Module, Step], pairs: int) -> list[Sample]:
    """Warm both loops up, then time ``pairs`` pairs of blocks, whose order alternates."""
    for model, step in (plain, joined):
        seconds_per_step(model, step, WARM_UP_STEPS)
    samples = []
    for pair in range(pairs):
        first, second = (plain, joined) if pair % 2 == 0 else (joined, plain)
        one, other = (seconds_per_step(*loop, STEPS_PER_BLOCK) * 1e6 for loop in (first, second))
        samples.append(Sample(one, other) if pair % 2 == 0 else Sample(other, one))
    return samples


def seconds_per_step(model: nn.Module, step: Step, steps: int) -> float:
    """Mean duration of what follows the backward pass."""
    inputs, targets = torch.ones(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
    seconds = 0.0
    for _ in range(steps):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        start = time.perf_counter()
        step(loss)
        seconds += time.perf_counter() - start
    return seconds / steps


def summarise(name: str, model: nn.Module, samples: list[Sample]) -> Result:
    """The medians, which a block that something else interrupted does not move."""
    differences = [sample.session_us - sample.plain_us for sample in samples]
    lower, median, upper = statistics.quantiles(differences, n=4)
    parameters = list(model.parameters())
    return Result(
        model=name,
        tensors=len(parameters),
        parameters=sum(parameter.numel() for parameter in parameters),
        plain_us=round(statistics.median(sample.plain_us for sample in samples), 1),
        session_us=round(statistics.median(sample.session_us for sample in samples), 1),
        overhead_us=round(median, 1),
        overhead_quartiles_us=(round(lower, 1), round(upper, 1)),
    )


def report(results: list[Result], overhead_us: float) -> None:
    """Print the table."""
    print(
        f"{'model':8}{'tensors':>8}{'plain µs':>10}{'session µs':>12}{'overhead µs':>13}{'quartiles µs':>16}"
    )
    for result in results:
        quartiles = "{:.1f} to {:.1f}".format(*result.overhead_quartiles_us)
        print(
            f"{result.model:8}{result.tensors:8}{result.plain_us:10.1f}{result.session_us:12.1f}"
            f"{result.overhead_us:13.1f}{quartiles:>16}"
        )
    verdict = "under" if overhead_us < BAR_US else "NOT under"
    print(f"session_overhead_us {overhead_us:.1f}, {verdict} the bar of {BAR_US:.0f}")


def write(results: list[Result], overhead_us: float, pairs: int) -> None:
    """Keep the measurement with what it was measured on."""
    document = {
        "session_overhead_us": overhead_us,
        "bar_us": BAR_US,
        "pairs": pairs,
        "steps_per_block": STEPS_PER_BLOCK,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "models": [asdict(result) for result in results],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=2) + "\n")
    print(f"written to {os.path.relpath(RESULTS)}")


def main() -> int:
    """Exit code 0 if the worse of the two models stays under the bar."""
    torch.set_num_threads(1)
    quick = os.environ.get("QUICK") == "1"
    pairs = PAIRS // 10 if quick else PAIRS
    results = [measure("tiny", tiny_model, pairs), measure("deep", deep_model, pairs)]
    overhead_us = max(result.overhead_us for result in results)
    report(results, overhead_us)
    if not quick:
        write(results, overhead_us, pairs)
    return 0 if overhead_us < BAR_US else 1


if __name__ == "__main__":
    sys.exit(main())
