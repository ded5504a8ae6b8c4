from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.types import Message

from cadenza_api.server.guard import bounded
from cadenza_api.server.problems import Problem
from tests.api_support import SPEC, URL, Api, problem, running_api

TOKEN = "s3cret-ü"
PATHS = ["/", "/v1/jobs", "/metrics", "/docs", "/openapi.json", "/v1/cluster", "/nothing"]


def bearer(token: str) -> dict[bytes, bytes]:
    return {b"Authorization": b"Bearer " + token.encode()}


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path) as api:
        yield api


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path, token=TOKEN, host="0.0.0.0") as api:
        yield api


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_seen_without_the_token(guarded: Api, path: str) -> None:
    for headers in (
        {},
        bearer("wrong"),
        bearer(""),
        {b"Authorization": TOKEN.encode()},
        {b"Authorization": b"Basic " + TOKEN.encode()},
    ):
        answer = guarded.client.get(path, headers=headers)
        problem(answer, 401, "unauthorized")
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert "s3cret" not in answer.text


def test_the_token_opens(guarded: Api) -> None:
    assert guarded.client.get("/v1/jobs", headers=bearer(TOKEN)).status_code == 200
    assert (
        guarded.client.get("/v1/jobs", headers={b"Authorization": b"bearer " + TOKEN.encode()}).status_code
        == 200
    )
    # With a token any name will do: the service may stand behind a proxy.
    assert guarded.client.get("http://cadenza.example/v1/jobs", headers=bearer(TOKEN)).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_need_no_token(guarded: Api, path: str) -> None:
    guarded.store.heartbeat()
    assert guarded.client.get(f"http://10.0.0.7{path}").status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:9000", "[::1]:8000", "localhost"])
def test_this_machine_is_served(local: Api, host: str) -> None:
    assert local.client.get("/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "10.0.0.7", "127.0.0.1.evil.example", "", "[::1"]
)
def test_a_name_that_only_leads_here_is_refused(local: Api, host: str) -> None:
    problem(local.client.get("/v1/jobs", headers={"Host": host}), 403, "foreign_host")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999"])
def test_another_origin_s_page_is_refused(local: Api, origin: str) -> None:
    job_id = local.create()
    for method, path in (("POST", f"/v1/jobs/{job_id}/cancel"), ("GET", "/v1/jobs")):
        problem(local.client.request(method, path, headers={"Origin": origin}), 403, "foreign_origin")
    assert local.store.job(job_id).state == "QUEUED"


def test_the_service_s_own_page_is_served(local: Api) -> None:
    assert local.client.post("/v1/jobs", json=SPEC, headers={"Origin": URL}).status_code == 201


def test_a_body_announced_as_too_large_is_not_read() -> None:
    async def receive() -> Message:
        raise AssertionError("it was read")

    scope = {"type": "http", "headers": [(b"content-length", b"11")]}
    with pytest.raises(Problem, match="10 bytes"):
        bounded(scope, receive, 10)
