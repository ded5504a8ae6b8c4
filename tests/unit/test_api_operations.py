from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cadenza_api.server import metrics
from cadenza_api.server.metrics import METRICS, JobCollector
from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.snapshot import Histogram, JobSnapshot, LinkStatus, Progress, Telemetry, WorkerStatus
from tests.api_support import Api, problem, running_api


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path) as api:
        yield api


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(api: Api) -> Samples:
    answer = api.client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, /, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


LINK = LinkStatus(
    goodput_bytes_per_second=1.5e6,
    rtt_seconds=0.05,
    queueing_delay_seconds=0.04,
    congestion=0.3,
    retransmits=7,
    cause="lower_rate",
    reason="1.50 MB/s of 2.40 MB/s",
)


def full_snapshot() -> JobSnapshot:
    seconds = Histogram.empty([0.1, 1.0])
    for observed in (0.05, 0.5, 5.0):
        seconds.observe(observed)
    return JobSnapshot(
        phase="training",
        progress=Progress(
            samples=640,
            rounds=10,
            loss=0.25,
            workers=[
                WorkerStatus(
                    worker=0, incarnation=1, state="active", local_steps=8, compute_seconds=2.5, link=LINK
                ),
                WorkerStatus(worker=1, incarnation=1, state="active", local_steps=4),
                WorkerStatus(worker=2, incarnation=1, state="lost"),
            ],
        ),
        telemetry=Telemetry(
            sync_seconds={"send": seconds},
            sync_bytes={"push": 100, "pull": 200},
            sync_raw_bytes={"push": 400},
            staleness=seconds,
            dropped={"non_finite": 1},
            failures={"worker_lost": 2},
        ),
    )


class TestMetrics:
    def test_everything_of_a_job_is_shown(self, api: Api) -> None:
        job_id = api.create()
        api.store.record(job_id, api.store.begin_attempt(job_id), full_snapshot())
        got = scrape(api)
        job = {"job_id": job_id}
        assert value(got, "cadenza_jobs", state="QUEUED") == 1
        assert value(got, "cadenza_jobs", state="FAILED") == 0
        assert value(got, "cadenza_job_info", **job, name="digits", mode="local", state="QUEUED") == 1
        assert value(got, "cadenza_job_workers", **job, state="active") == 2
        assert value(got, "cadenza_job_loss", **job) == 0.25
        assert value(got, "cadenza_job_samples_total", **job) == 640
        assert value(got, "cadenza_sync_rounds_total", **job) == 10
        assert value(got, "cadenza_sync_seconds_bucket", **job, phase="send", le="1.0") == 2
        assert value(got, "cadenza_sync_seconds_bucket", **job, phase="send", le="+Inf") == 3
        assert value(got, "cadenza_sync_seconds_count", **job, phase="send") == 3
        assert value(got, "cadenza_sync_seconds_sum", **job, phase="send") == pytest.approx(5.55)
        assert value(got, "cadenza_sync_bytes_total", **job, direction="pull") == 200
        assert value(got, "cadenza_sync_raw_bytes_total", **job, direction="push") == 400
        assert value(got, "cadenza_worker_local_steps", **job, worker="1") == 4
        assert value(got, "cadenza_worker_staleness_count", **job) == 3
        assert value(got, "cadenza_worker_compute_seconds_total", **job, worker="0") == 2.5
        link = {**job, "worker": "0"}
        assert value(got, "cadenza_link_goodput_bytes_per_second", **link) == 1.5e6
        assert value(got, "cadenza_link_rtt_seconds", **link) == 0.05
        assert value(got, "cadenza_link_queueing_delay_seconds", **link) == 0.04
        assert value(got, "cadenza_link_congestion_ratio", **link) == 0.3
        assert value(got, "cadenza_link_retransmits_total", **link) == 7
        assert value(got, "cadenza_contributions_dropped_total", **job, reason="non_finite") == 1
        assert value(got, "cadenza_failures_total", **job, kind="worker_lost") == 2

    def test_each_declared_metric_is_filled_and_no_other(self, api: Api) -> None:
        job_id = api.create()
        api.store.record(job_id, api.store.begin_attempt(job_id), full_snapshot())
        filled = {family.name for family in JobCollector(api.store).collect() if family.samples}
        assert filled == set(METRICS)

    def test_declarations_keep_to_the_rules(self) -> None:
        for name, metric in METRICS.items():
            assert name.startswith("cadenza_")
            assert not name.endswith("_total")
            assert metric.help.endswith(".")
            assert not {"job", "instance"} & set(metric.labels)

    def test_an_ended_job_s_series_go(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        job_id = api.create()
        api.succeed(job_id)
        assert ("cadenza_job_samples_total", frozenset({("job_id", job_id)})) in scrape(api)
        monkeypatch.setattr(metrics, "SHOWN_AFTER_END_S", -60.0)
        got = scrape(api)
        assert not any(("job_id", job_id) in labels for _, labels in got)
        assert value(got, "cadenza_jobs", state="SUCCEEDED") == 1

    def test_a_loss_that_is_not_finite_is_shown_as_such(self, api: Api) -> None:
        job_id = api.create()
        snapshot = full_snapshot()
        snapshot.progress.loss = math.nan
        api.store.record(job_id, api.store.begin_attempt(job_id), snapshot)
        assert math.isnan(value(scrape(api), "cadenza_job_loss", job_id=job_id))


class TestProbes:
    def test_ready_when_the_controller_lives(self, api: Api) -> None:
        assert api.client.get("/healthz").json() == {"status": "ok"}
        assert "no sign of life" in problem(api.client.get("/readyz"), 503, "not_ready")["detail"]
        api.store.heartbeat()
        assert api.client.get("/readyz").json()["status"] == "ready"

    def test_not_ready_when_it_is_silent(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(api.store, "controller_seen_at", lambda: 0.0)
        assert "last seen" in problem(api.client.get("/readyz"), 503, "not_ready")["detail"]


class TestIndex:
    def test_its_links_lead_somewhere(self, api: Api) -> None:
        index = api.client.get("/").json()
        assert index["name"] == "cadenza"
        api.store.heartbeat()
        for name, path in index["links"].items():
            assert api.client.get(path).status_code == (503 if name == "cluster" else 200)

    def test_the_description_knows_the_spec(self, api: Api) -> None:
        document = api.client.get("/openapi.json").json()
        schemas = document["components"]["schemas"]
        assert schemas["JobSpec"]["properties"]["sync"]["$ref"] == "#/components/schemas/Sync"
        assert "mode" in schemas["Sync"]["properties"]
        assert api.client.get("/docs").status_code == 200

    def test_every_reference_in_the_description_resolves(self, api: Api) -> None:
        document = api.client.get("/openapi.json").json()

        def references(node: object) -> Iterator[str]:
            if isinstance(node, dict):
                for key, item in node.items():
                    if key == "$ref" and isinstance(item, str):
                        yield item
                    yield from references(item)
            elif isinstance(node, list):
                for item in node:
                    yield from references(item)

        found = set(references(document))
        assert found
        for reference in found:
            node = document
            for part in reference.removeprefix("#/").split("/"):
                node = node[part]


class TestCluster:
    def test_without_a_cluster(self, api: Api) -> None:
        problem(api.client.get("/v1/cluster"), 503, "cluster_unavailable")

    def test_with_one(self, tmp_path: Path) -> None:
        with running_api(tmp_path, cluster=lambda: {"nodes": [], "total": {"CPU": 2.0}}) as api:
            assert api.client.get("/v1/cluster").json()["total"] == {"CPU": 2.0}


def test_states_in_metrics_are_those_of_jobs(api: Api) -> None:
    names = {dict(labels)["state"] for name, labels in scrape(api) if name == "cadenza_jobs"}
    assert names == set(JobState)
