"""The metrics: declared once as data, filled at each scrape from the job store.

Nothing is counted in an API process: a scrape reaches any of them, and must find the same everywhere. A
counter starts again from 0 with a job's next attempt, as Prometheus expects of counters. A job's series go
when it has been over for a while.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from cadenza_service.jobs.records import Job
from cadenza_service.jobs.store import Store
from cadenza_service.snapshot import Histogram, WorkerStatus

SHOWN_AFTER_END_S = 15 * 60.0
"""How long an ended job's series stay: long enough for any scrape interval to see the last values."""

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Value = float | Histogram
Sample = tuple[str, tuple[str, ...], Value]


@dataclass(frozen=True)
class Metric:
    """A metric's declaration; counters are named without the ``_total`` that they are shown with."""

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ("job_id",)


METRICS: dict[str, Metric] = {
    "cadenza_jobs": Metric("gauge", "Jobs in each state.", ("state",)),
    "cadenza_job_info": Metric(
        "gauge", "1 for each job, with what describes it.", ("job_id", "name", "mode", "state")
    ),
    "cadenza_job_workers": Metric("gauge", "Workers of a job in each state.", ("job_id", "state")),
    "cadenza_job_loss": Metric("gauge", "Mean training loss of the latest committed round."),
    "cadenza_job_samples": Metric("counter", "Samples in committed rounds."),
    "cadenza_sync_rounds": Metric("counter", "Committed synchronisation rounds."),
    "cadenza_sync_seconds": Metric(
        "histogram",
        "Seconds of a synchronisation, by phase: send, wait, receive, apply.",
        ("job_id", "phase"),
    ),
    "cadenza_sync_bytes": Metric(
        "counter", "Bytes of synchronisation on the wire, as the worker sees them.", ("job_id", "direction")
    ),
    "cadenza_sync_raw_bytes": Metric(
        "counter", "Bytes of synchronisation before the codec.", ("job_id", "direction")
    ),
    "cadenza_worker_local_steps": Metric(
        "gauge", "Optimizer steps in a worker's latest contribution.", ("job_id", "worker")
    ),
    "cadenza_worker_staleness": Metric(
        "histogram", "Versions between what a contribution was computed from and where it was applied."
    ),
    "cadenza_worker_compute_seconds": Metric(
        "counter", "Seconds that a worker trained outside synchronisation.", ("job_id", "worker")
    ),
    "cadenza_link_goodput_bytes_per_second": Metric(
        "gauge", "Acknowledged bytes of a worker's updates over the time they took.", ("job_id", "worker")
    ),
    "cadenza_link_rtt_seconds": Metric(
        "gauge", "Round-trip time of a worker's link under load.", ("job_id", "worker")
    ),
    "cadenza_link_queueing_delay_seconds": Metric(
        "gauge", "How much longer the round trip is than the link's own.", ("job_id", "worker")
    ),
    "cadenza_link_retransmits": Metric("counter", "Segments that a worker sent again.", ("job_id", "worker")),
    "cadenza_link_congestion_ratio": Metric(
        "gauge", "Congestion of a worker's link, from 0 to 1.", ("job_id", "worker")
    ),
    "cadenza_contributions_dropped": Metric(
        "counter", "Contributions left out, by reason.", ("job_id", "reason")
    ),
    "cadenza_failures": Metric("counter", "Failures of a job's parts, by kind.", ("job_id", "kind")),
}

FAMILIES: dict[str, type[Family]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class JobCollector(Collector):
    """Reads the store when it is scraped."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> Iterable[Family]:
        """Empty families: registering must not read the store."""
        return _families().values()

    def collect(self) -> Iterable[Family]:
        """All families with the samples of now."""
        families = _families()
        for name, labels, value in self._samples():
            _add(families[name], labels, value)
        return families.values()

    def _samples(self) -> Iterator[Sample]:
        for state, count in self._store.counts().items():
            yield "cadenza_jobs", (state,), count
        for job in self._store.active_since(time.time() - SHOWN_AFTER_END_S):
            yield from job_samples(job)


def job_samples(job: Job) -> Iterator[Sample]:
    """Everything that is shown of one job."""
    progress, telemetry = job.progress, job.telemetry
    yield "cadenza_job_info", (job.id, job.name, job.spec.sync.mode, job.state), 1
    for state, count in Counter(worker.state for worker in progress.workers).items():
        yield "cadenza_job_workers", (job.id, state), count
    if progress.loss is not None:
        yield "cadenza_job_loss", (job.id,), progress.loss
    yield "cadenza_job_samples", (job.id,), progress.samples
    yield "cadenza_sync_rounds", (job.id,), progress.rounds
    for worker in progress.workers:
        yield "cadenza_worker_local_steps", (job.id, str(worker.worker)), worker.local_steps
        yield "cadenza_worker_compute_seconds", (job.id, str(worker.worker)), worker.compute_seconds
        yield from _link_samples(job.id, worker)
    if telemetry.staleness is not None:
        yield "cadenza_worker_staleness", (job.id,), telemetry.staleness
    divided: dict[str, dict[str, float] | dict[str, int] | dict[str, Histogram]] = {
        "cadenza_sync_seconds": telemetry.sync_seconds,
        "cadenza_sync_bytes": telemetry.sync_bytes,
        "cadenza_sync_raw_bytes": telemetry.sync_raw_bytes,
        "cadenza_contributions_dropped": telemetry.dropped,
        "cadenza_failures": telemetry.failures,
    }
    for name, values in divided.items():
        for label, value in values.items():
            yield name, (job.id, label), value


def _link_samples(job_id: str, worker: WorkerStatus) -> Iterator[Sample]:
    link = worker.link
    if link is None:
        return
    labels = (job_id, str(worker.worker))
    yield "cadenza_link_goodput_bytes_per_second", labels, link.goodput_bytes_per_second
    yield "cadenza_link_rtt_seconds", labels, link.rtt_seconds
    yield "cadenza_link_queueing_delay_seconds", labels, link.queueing_delay_seconds
    yield "cadenza_link_retransmits", labels, link.retransmits
    yield "cadenza_link_congestion_ratio", labels, link.congestion


def _families() -> dict[str, Family]:
    return {
        name: FAMILIES[metric.kind](name, metric.help, labels=metric.labels)
        for name, metric in METRICS.items()
    }


def _add(family: Family, labels: tuple[str, ...], value: Value) -> None:
    match family, value:
        case HistogramMetricFamily(), Histogram():
            bounds = [*map(str, map(float, value.bounds)), "+Inf"]
            buckets = list(zip(bounds, map(float, value.counts), strict=True))
            family.add_metric(labels, buckets=buckets, sum_value=value.sum)
        case ((CounterMetricFamily() | GaugeMetricFamily()), int() | float()):
            family.add_metric(labels, value)
        case _:
            raise TypeError(f"metric {family.name} is a {family.type}, which {value!r} does not fit")


def exposition(store: Store) -> bytes:
    """The metrics in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(store))
    return generate_latest(registry)
