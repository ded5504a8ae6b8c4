"""What a job's spec and model come to for its workers, its rounds and its users. Pure."""

from __future__ import annotations

import math

from cadenza.plane.codecs import AUTO
from cadenza.plane.layout import Layout
from cadenza.plane.messages import Joined
from cadenza.spec import JobSpec
from cadenza_service.coordination.ledger import Ledger
from cadenza_service.coordination.progress import TrainingProgress
from cadenza_service.coordination.recorder import Recorder
from cadenza_service.coordination.rounds import RoundRules
from cadenza_service.snapshot import Progress

HISTORY_BYTES = 256 << 20
"""sync: what the shards of a job keep together of mean gradients for a worker that is evaluating."""
MOST_HISTORY_ROUNDS = 64


def codec(spec: JobSpec) -> str:
    """The codec in force."""
    return AUTO if spec.sync.codec == "auto" else spec.sync.codec


def round_rules(
    spec: JobSpec, layout: Layout, *, epoch: int, shards: int, round_timeout_s: float
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
        history_rounds=max(1, min(MOST_HISTORY_ROUNDS, HISTORY_BYTES // max(round_bytes, 1))),
    )


def joined(
    spec: JobSpec,
    *,
    publish: bool,
    workers: int,
    shards: tuple[tuple[str, int], ...],
    round_timeout_s: float,
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
