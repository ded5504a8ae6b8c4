"""What a job's spec and model come to for its workers, its rounds and its users. Pure."""

from __future__ import annotations

import math

from cadenza.plane.layout import UNIT_ELEMENTS, Cut, Layout
from cadenza.plane.messages import Assign, Joined
from cadenza.spec import JobSpec
from cadenza_service.coordination.ledger import Ledger
from cadenza_service.coordination.progress import TrainingProgress
from cadenza_service.coordination.recorder import Recorder
from cadenza_service.coordination.rounds import RoundRules
from cadenza_service.snapshot import Progress

DEDICATED_GROUPS = 16
"""A server's link then carries answers in one direction while updates still come in the other, but for the first
sixteenth."""

AUTO_CODEC = "fp32"
"""What ``codec: auto`` chooses."""

HISTORY_BYTES = 256 << 20
"""sync: what the shards of a job keep together of mean gradients for a worker that is evaluating."""
MOST_HISTORY_ROUNDS = 64

LOW_RANK_UNIT_ELEMENTS = 1 << 20
"""4 MiB of float32: some thousand rows, of which a few columns remain."""


def codec(spec: JobSpec) -> str:
    """The codec in force."""
    return AUTO_CODEC if spec.sync.codec == "auto" else spec.sync.codec


def cut(spec: JobSpec, shards: int) -> Cut:
    """How vectors are cut among the shards.

    Gradients become known from the last parameter to the first, so in sync mode each shard owns some of every part.
    Codecs of low rank need whole matrix rows, and more of them than a small unit holds.
    """
    low_rank = codec(spec).startswith("powersgd")
    return Cut(
        shards,
        unit=LOW_RANK_UNIT_ELEMENTS if low_rank else UNIT_ELEMENTS,
        striped=spec.sync.mode == "sync",
        rows=low_rank,
    )


def groups(spec: JobSpec, *, dedicated: bool) -> int:
    """In how many parts a round is answered: where shards have hosts of their own, in several."""
    if spec.sync.mode not in ("sync", "local"):
        return 1
    return spec.sync.groups or (DEDICATED_GROUPS if dedicated else 1)


def assign(
    spec: JobSpec, layout: Layout, *, shard: int, shards: int, groups: int, congestion_control: str
) -> Assign:
    """What a shard is told to hold."""
    return Assign(
        layout,
        shard,
        shards,
        spec.sync.mode,
        spec.sync.outer.model_dump(),
        cut=cut(spec, shards),
        codec=codec(spec),
        groups=groups,
        seed=spec.seed,
        congestion_control=congestion_control,
    )


def round_rules(
    spec: JobSpec, layout: Layout, *, epoch: int, shards: int, round_timeout_s: float, groups: int
) -> RoundRules:
    """The rules of the rounds."""
    round_bytes = sum(vector.length * vector.itemsize for vector in layout.named(layout.travelling()))
    return RoundRules(
        mode=spec.sync.mode,
        local_steps=spec.sync.interval,
        staleness=spec.sync.bound,
        epoch=epoch,
        shards=shards,
        round_timeout_s=round_timeout_s,
        groups=groups,
        history_rounds=max(1, min(MOST_HISTORY_ROUNDS, HISTORY_BYTES // max(round_bytes, 1))),
    )


def joined(
    spec: JobSpec,
    *,
    publish: bool,
    workers: int,
    shards: tuple[tuple[str, int], ...],
    round_timeout_s: float,
    congestion_control: str,
    fan_in: int,
) -> Joined:
    """What a worker is told when it may begin."""
    return Joined(
        publish=publish,
        mode=spec.sync.mode,
        local_steps=spec.sync.interval,
        epochs=spec.data.epochs,
        workers=workers,
        shards=shards,
        codec=codec(spec),
        round_timeout_s=round_timeout_s,
        cut=cut(spec, len(shards)),
        congestion_control=congestion_control,
        fan_in=fan_in,
        overlap=spec.sync.overlap,
        mix=spec.sync.overlap_mix,
        seed=spec.seed,
    )


def introduction(spec: JobSpec, *, workers: int, shards: int) -> str:
    """One sentence on how the job trains."""
    every = "at every step" if spec.sync.interval == 1 else f"every {spec.sync.interval} steps"
    return f"{workers} workers and {shards} parameter servers train in {spec.sync.mode} mode, {every}"


def decision_in_force(spec: JobSpec) -> dict[str, object]:
    """The choices that progress shows."""
    sync = spec.sync
    decision: dict[str, object] = {"mode": sync.mode, "local_steps": sync.interval, "codec": codec(spec)}
    return {**decision, "staleness": sync.bound} if sync.mode == "ssp" else decision


def public_progress(progress: TrainingProgress, ledger: Ledger, recorder: Recorder, now: float) -> Progress:
    """How far the job has come, for its users."""
    loss = progress.loss
    return Progress(
        samples=progress.samples,
        total_samples=progress.total_samples,
        epoch=ledger.epoch,
        rounds=progress.rounds,
        steps=progress.steps,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        metrics=dict(progress.metrics),
        wire_bytes=recorder.wire_bytes(),
        seconds=progress.seconds(now),
        samples_per_second=progress.rate(now),
        workers=[record.status() for _, record in sorted(recorder.workers.items())],
        decision=decision_in_force(progress.spec),
    )
