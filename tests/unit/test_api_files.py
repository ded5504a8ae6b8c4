from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza_service.jobs.lifecycle import JobState
from tests.api_support import SPEC, Api, code_zip, problem, running_api

CODE = code_zip()
DIGEST = hashlib.sha256(CODE).hexdigest()
LIMIT_BYTES = 2_000_000


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path, package_limit_bytes=LIMIT_BYTES) as api:
        yield api


class TestPackages:
    def test_upload_once_and_use(self, api: Api) -> None:
        path = f"/v1/packages/{DIGEST}"
        assert api.client.head(path).status_code == 404
        first, again = api.client.put(path, content=CODE), api.client.put(path, content=CODE)
        assert (first.status_code, again.status_code) == (201, 200)
        assert api.client.head(path).status_code == 200
        spec = SPEC | {"runtime_env": {"working_dir": first.json()["working_dir"]}}
        assert api.client.post("/v1/jobs", json=spec).status_code == 201

    def test_a_package_may_be_larger_than_other_bodies(self, api: Api) -> None:
        body = code_zip(b"#" * 1_500_000)
        assert (
            api.client.put(f"/v1/packages/{hashlib.sha256(body).hexdigest()}", content=body).status_code
            == 201
        )

    @pytest.mark.parametrize("announced", [True, False])
    def test_a_large_one_is_refused_naming_the_limit(self, api: Api, announced: bool, tmp_path: Path) -> None:
        parts = [b"\0" * 100_000] * 21
        content = b"".join(parts) if announced else iter(parts)
        document = problem(
            api.client.put(f"/v1/packages/{DIGEST}", content=content), 413, "package_too_large"
        )
        assert str(LIMIT_BYTES) in document["detail"]
        assert list((tmp_path / "storage" / "packages").iterdir()) == []

    def test_other_bytes_are_refused(self, api: Api) -> None:
        problem(api.client.put(f"/v1/packages/{'0' * 64}", content=CODE), 422, "bad_package")
        body = b"no zip"
        answer = api.client.put(f"/v1/packages/{hashlib.sha256(body).hexdigest()}", content=body)
        assert "not a zip" in problem(answer, 422, "bad_package")["detail"]

    def test_a_digest_is_checked(self, api: Api) -> None:
        document = problem(api.client.put("/v1/packages/abc", content=CODE), 422, "invalid_request")
        assert document["field"] == "sha256"


class TestModels:
    def test_download(self, api: Api) -> None:
        job_id = api.create()
        api.checkpoint(job_id, 1, b"old")
        api.checkpoint(job_id, 2, b"new")
        listed = api.client.get(f"/v1/jobs/{job_id}/checkpoints").json()["items"]
        assert [(item["number"], item["round"], item["size_bytes"]) for item in listed] == [
            (1, 3, 3),
            (2, 3, 3),
        ]
        assert api.client.get(listed[0]["links"]["model"]).content == b"old"
        latest = api.client.get(f"/v1/jobs/{job_id}/checkpoints/latest/model.safetensors")
        assert latest.content == b"new"
        assert latest.headers["content-length"] == "3"
        assert f"{job_id}-2.safetensors" in latest.headers["content-disposition"]
        assert latest.headers["etag"] == f'"{hashlib.sha256(b"new").hexdigest()}"'

    def test_a_part_can_be_asked_for(self, api: Api) -> None:
        job_id = api.create()
        api.checkpoint(job_id, 1)
        answer = api.client.get(
            f"/v1/jobs/{job_id}/checkpoints/1/model.safetensors", headers={"Range": "bytes=2-"}
        )
        assert (answer.status_code, answer.content) == (206, b"ights")

    def test_without_one_the_job_s_state_is_told(self, api: Api) -> None:
        job_id = api.create()
        path = f"/v1/jobs/{job_id}/checkpoints/latest/model.safetensors"
        document = problem(api.client.get(path), 404, "checkpoint_not_found")
        assert "it is QUEUED: waiting for" in document["detail"]
        api.move(job_id, JobState.FAILED)
        assert "it is FAILED: testing" in problem(api.client.get(path), 404, "checkpoint_not_found")["detail"]

    def test_another_number_names_those_there_are(self, api: Api) -> None:
        job_id = api.create()
        api.checkpoint(job_id, 4)
        document = problem(
            api.client.get(f"/v1/jobs/{job_id}/checkpoints/3/model.safetensors"), 404, "checkpoint_not_found"
        )
        assert "no checkpoint 3" in document["detail"]
        assert "one of 4" in document["remedy"]

    @pytest.mark.parametrize("number", ["-1", "first", "..", "1e3"])
    def test_a_number_is_a_number(self, api: Api, number: str) -> None:
        answer = api.client.get(f"/v1/jobs/{api.create()}/checkpoints/{number}/model.safetensors")
        assert answer.status_code in (404, 422)
        assert answer.headers["content-type"] == "application/problem+json"
