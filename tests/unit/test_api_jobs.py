from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.snapshot import JobSnapshot, Progress, Telemetry, WorkerStatus
from tests.api_support import SPEC, Api, problem, running_api


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path) as api:
        yield api


def post(api: Api, **more: object) -> Any:
    return api.client.post("/v1/jobs", json=SPEC | more)


class TestCreate:
    def test_a_job_is_made_and_found(self, api: Api) -> None:
        made = post(api, config={"lr": 0.3, "text": "größer"})
        assert made.status_code == 201
        job = made.json()
        assert made.headers["location"] == job["links"]["self"] == f"/v1/jobs/{job['id']}"
        assert (job["state"], job["reason"]["code"], job["attempts"]) == ("QUEUED", "accepted", 0)
        assert job["spec"]["config"] == {"lr": 0.3, "text": "größer"}
        assert job["progress"]["samples"] == 0
        assert datetime.fromisoformat(job["created_at"]).utcoffset() == timedelta(0)
        assert job["started_at"] is None
        assert api.client.get(made.headers["location"]).json() == job

    def test_every_link_leads_somewhere(self, api: Api) -> None:
        links = post(api).json()["links"]
        for name, path in links.items():
            answer = api.client.request("POST" if name == "cancel" else "GET", path)
            assert answer.status_code == (404 if name == "model" else 200), name

    def test_a_repeated_key_returns_the_first_job(self, api: Api) -> None:
        headers = {"Idempotency-Key": "k1"}
        first = api.client.post("/v1/jobs", json=SPEC, headers=headers)
        again = api.client.post("/v1/jobs", json=SPEC, headers=headers)
        assert (first.status_code, again.status_code) == (201, 200)
        assert again.json()["id"] == first.json()["id"]
        other = problem(
            api.client.post("/v1/jobs", json=SPEC | {"seed": 1}, headers=headers), 409, "idempotency_conflict"
        )
        assert first.json()["id"] in other["detail"]
        assert len(api.client.get("/v1/jobs").json()["items"]) == 1

    def test_an_empty_key_is_refused(self, api: Api) -> None:
        answer = api.client.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": ""})
        assert problem(answer, 422, "invalid_request")["field"].lower() == "idempotency-key"


class TestBadSpec:
    @pytest.mark.parametrize(
        ("more", "field", "hint"),
        [
            ({"sync": {"mode": "slow"}}, "sync.mode", "'local'"),
            ({"sync": {"mod": "local"}}, "sync.mod", "'mode'"),
            ({"worker": {}}, "worker", "'workers'"),
            ({"sync": {"outer": {"name": "sgd", "momentu": 1}}}, "sync.outer.momentu", "'momentum'"),
            ({"sync": {"mode": "sync", "local_steps": 4}}, "sync.local_steps", "mode: local"),
            ({"workers": {"min": 3, "max": 2}}, "workers.max", "lower min"),
            ({"workers": {"min": 0}}, "workers.min", "greater than or equal to 1"),
            ({"stop": {"target": {"metric": "loss"}}}, "stop.target", "exactly one"),
            ({"runtime_env": {"working_dir": "/home/me"}}, "runtime_env.working_dir", "PUT /v1/packages"),
            ({"entrypoint": "no colon"}, "entrypoint", "module:function"),
        ],
    )
    def test_the_field_and_a_way_out_are_named(
        self, api: Api, more: dict[str, Any], field: str, hint: str
    ) -> None:
        document = problem(post(api, **more), 422, "invalid_spec")
        assert document["field"] == field
        assert field in document["detail"]
        assert hint in str(document["errors"])
        assert api.store.counts()[JobState.QUEUED] == 0

    def test_every_wrong_field_is_listed(self, api: Api) -> None:
        answer = api.client.post("/v1/jobs", json={"name": "x y", "sync": {"mode": "slow"}, "seed": -1})
        document = problem(answer, 422, "invalid_spec")
        assert [error["field"] for error in document["errors"]] == ["name", "entrypoint", "sync.mode", "seed"]
        assert document["errors"][3]["value"] == -1
        assert "field" not in document

    def test_a_variable_s_value_is_not_repeated(self, api: Api) -> None:
        answer = post(api, env={"PASSWORD": ["hunter2"]})
        assert problem(answer, 422, "invalid_spec")["field"].startswith("env")
        assert "hunter2" not in answer.text

    def test_a_long_value_is_cut(self, api: Api) -> None:
        assert len(problem(post(api, name="x" * 5_000), 422, "invalid_spec")["value"]) < 300

    @pytest.mark.parametrize("body", ["[]", "null", '"text"', "1"])
    def test_a_spec_is_a_mapping(self, api: Api, body: str) -> None:
        answer = api.client.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
        problem(answer, 422, "invalid_spec")

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"\xff\xfe",
            b'{"a": NaN}',
            b'{"a": -Infinity}',
            b'{"a": 1e999}',
            b'{"a": "\\ud800"}',
            b"[" * 100_000,
            b'{"a": ' + b"9" * 5_000 + b"}",
        ],
        ids=["empty", "cut", "bytes", "nan", "infinity", "huge", "surrogate", "deep", "digits"],
    )
    def test_what_is_not_json_is_refused(self, api: Api, body: bytes) -> None:
        answer = api.client.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
        problem(answer, 400, "invalid_json")

    def test_another_content_type_is_refused(self, api: Api) -> None:
        # A web page may send text/plain to this machine without being asked for leave.
        answer = api.client.post("/v1/jobs", content="{}", headers={"Content-Type": "text/plain"})
        problem(answer, 415, "unsupported_media_type")

    @pytest.mark.parametrize("announced", [True, False])
    def test_a_large_body_is_refused(self, api: Api, announced: bool) -> None:
        parts = [b'{"name": "', *[b"x" * 65_536] * 17, b'"}']
        body: Any = b"".join(parts) if announced else iter(parts)
        answer = api.client.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
        assert "1048576" in problem(answer, 413, "body_too_large")["detail"]

    def test_a_package_must_be_there(self, api: Api) -> None:
        document = problem(
            post(api, runtime_env={"working_dir": "sha256:" + "0" * 64}), 409, "package_missing"
        )
        assert document["field"] == "runtime_env.working_dir"
        assert "PUT" in document["remedy"]


class TestRead:
    def test_pages(self, api: Api) -> None:
        made = [api.create() for _ in range(3)]
        first = api.client.get("/v1/jobs", params={"limit": 2}).json()
        last = api.client.get("/v1/jobs", params={"limit": 2, "cursor": first["next_cursor"]}).json()
        assert [job["id"] for job in first["items"] + last["items"]] == made[::-1]
        assert last["next_cursor"] is None

    def test_by_state(self, api: Api) -> None:
        running, _ = api.create(), api.create()
        api.move(running, JobState.STARTING, JobState.RUNNING)
        (job,) = api.client.get("/v1/jobs", params={"state": "RUNNING"}).json()["items"]
        assert (job["id"], job["reason"]) == (running, None)

    @pytest.mark.parametrize(
        ("query", "field"),
        [("state=ASLEEP", "state"), ("limit=0", "limit"), ("limit=x", "limit"), ("cursor=x", "cursor")],
    )
    def test_a_bad_query_names_the_parameter(self, api: Api, query: str, field: str) -> None:
        assert problem(api.client.get(f"/v1/jobs?{query}"), 422, "invalid_request")["field"] == field

    def test_an_unknown_job(self, api: Api) -> None:
        for path in ("", "/events", "/logs", "/checkpoints", "/checkpoints/latest/model.safetensors"):
            document = problem(api.client.get(f"/v1/jobs/nothing{path}"), 404, "job_not_found")
            assert "'nothing'" in document["detail"]
        problem(api.client.post("/v1/jobs/nothing/cancel"), 404, "job_not_found")

    def test_numbers_that_are_not_finite_do_no_harm(self, api: Api) -> None:
        job_id = api.create()
        progress = Progress(
            loss=math.nan,
            metrics={"accuracy": math.inf, "f1": 0.5},
            workers=[WorkerStatus(worker=0, incarnation=1, state="active", compute_seconds=math.nan)],
        )
        snapshot = JobSnapshot(phase="training", progress=progress, telemetry=Telemetry())
        api.store.record(job_id, api.store.begin_attempt(job_id), snapshot)
        shown = api.client.get(f"/v1/jobs/{job_id}").json()["progress"]
        assert shown["loss"] is None
        assert shown["metrics"] == {"accuracy": None, "f1": 0.5}
        assert shown["workers"][0]["compute_seconds"] is None
        assert api.client.get("/metrics").status_code == 200


class TestCancel:
    def test_a_waiting_job_is_cancelled_at_once(self, api: Api) -> None:
        job_id = api.create()
        for _ in range(2):
            answer = api.client.post(f"/v1/jobs/{job_id}/cancel")
            assert (answer.status_code, answer.json()["state"]) == (200, "CANCELLED")

    def test_a_running_one_is_asked_to_stop(self, api: Api) -> None:
        job_id = api.create()
        api.move(job_id, JobState.STARTING, JobState.RUNNING)
        answer = api.client.post(f"/v1/jobs/{job_id}/cancel")
        assert (answer.status_code, answer.json()["state"], answer.json()["desired"]) == (
            202,
            "RUNNING",
            "cancelled",
        )

    def test_an_ended_one_cannot(self, api: Api) -> None:
        job_id = api.create()
        api.succeed(job_id)
        assert (
            "SUCCEEDED" in problem(api.client.post(f"/v1/jobs/{job_id}/cancel"), 409, "job_ended")["detail"]
        )


class TestErrors:
    def test_unknown_paths_and_methods(self, api: Api) -> None:
        assert "/v2" in problem(api.client.get("/v2"), 404, "not_found")["detail"]
        answer = api.client.delete("/v1/jobs")
        problem(answer, 405, "method_not_allowed")
        assert "GET" in answer.headers["allow"] or "POST" in answer.headers["allow"]

    def test_an_unforeseen_error_tells_nothing(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("secret inside")

        monkeypatch.setattr(api.store, "counts", fail)
        answer = api.client.get("/metrics")
        problem(answer, 500, "internal_error")
        assert "secret" not in answer.text

    def test_a_database_that_fails(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise OperationalError("SELECT secret", {}, Exception("locked"))

        monkeypatch.setattr(api.store, "controller_seen_at", fail)
        monkeypatch.setattr(api.store, "job", fail)
        for path in ("/readyz", "/v1/jobs/x"):
            answer = api.client.get(path)
            problem(answer, 503, "store_unavailable")
            assert "secret" not in answer.text
