"""The client: what it asks, what it makes of the answers, and how it fails."""

from __future__ import annotations

import json
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cadenza.spec import JobSpec, Sync
from cadenza_api.client.client import Client
from cadenza_api.client.errors import ApiError, Unreachable
from cadenza_api.user_errors import ExitCode, UserError
from tests.unit.fake_service import FakeService, event, problem

SPEC = JobSpec(name="char", entrypoint="train:main", sync=Sync(mode="ssp"))


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def client(service: FakeService) -> Client:
    return Client("http://service.test", transport=service.transport)


def test_submit_sends_what_the_user_wrote_and_returns_the_job(service: FakeService, client: Client) -> None:
    job = client.submit(SPEC, idempotency_key="k1")
    assert (job.name, job.state, job.ended) == ("char", "QUEUED", False)
    [request] = service.asked("POST", "/v1/jobs")
    assert json.loads(request.content) == {
        "name": "char",
        "entrypoint": "train:main",
        "sync": {"mode": "ssp"},
    }
    assert request.headers["idempotency-key"] == "k1"


def test_the_token_is_sent_with_every_request(service: FakeService) -> None:
    Client("http://service.test", "s3cret", transport=service.transport).jobs()
    assert service.requests[0].headers["authorization"] == "Bearer s3cret"


def test_jobs_come_from_as_many_pages_as_needed(service: FakeService, client: Client) -> None:
    for number in range(5):
        service.add(f"job-{number}")
    assert [job.id for job in client.jobs(limit=3)] == ["job-4", "job-3", "job-2"]
    assert len(client.jobs(limit=50)) == 5
    assert client.jobs(state="FAILED") == []


def test_answers_of_a_newer_service_are_read_and_kept(service: FakeService, client: Client) -> None:
    service.add("a-1", "HIBERNATING", mood="fine", progress={"samples": 3, "dreams": 2, "workers": []})
    job = client.job("a-1")
    assert (job.state, job.progress.samples) == ("HIBERNATING", 3)
    document = job.model_dump(mode="json")
    assert (document["mood"], document["progress"]["dreams"]) == ("fine", 2)


def test_stored_events_come_from_as_many_pages_as_needed(service: FakeService, client: Client) -> None:
    service.events["a-1"] = [event(seq, f"e{seq}") for seq in range(1, 6)]
    assert [entry.message for entry in client.events("a-1", after=1)] == ["e2", "e3", "e4", "e5"]
    assert list(client.logs("a-1")) == []


def test_a_job_id_cannot_leave_its_place_in_the_path(service: FakeService, client: Client) -> None:
    with pytest.raises(ApiError):
        client.job("../../metrics?x=1")
    assert service.requests[0].url.raw_path == b"/v1/jobs/..%2F..%2Fmetrics%3Fx%3D1"


def test_a_problem_document_is_told_word_by_word(service: FakeService, client: Client) -> None:
    errors = [
        {
            "field": "sync.mode",
            "value": "fast",
            "reason": "is not a mode",
            "remedy": "take one of: sync, local",
        }
    ]
    service.faults.append(
        problem(422, "the job spec is wrong", code="invalid_spec", errors=errors, remedy="see /docs")
    )
    with pytest.raises(ApiError) as caught:
        client.submit(SPEC)
    assert str(caught.value) == (
        "the job spec is wrong\n  sync.mode: is not a mode (it is 'fast'); take one of: sync, local\nsee /docs"
    )
    assert (caught.value.status, caught.value.code, caught.value.exit_code) == (
        422,
        "invalid_spec",
        ExitCode.REFUSED,
    )


def test_an_error_page_of_something_else_is_told_as_such(service: FakeService, client: Client) -> None:
    service.faults.append(httpx.Response(502, html="<h1>Bad gateway</h1>"))
    with pytest.raises(ApiError, match=r"answered 502 Bad Gateway with text/html.*not how Cadenza"):
        client.jobs()


def test_a_page_of_something_else_is_not_a_service(service: FakeService, client: Client) -> None:
    service.faults.append(httpx.Response(200, html="<h1>Welcome</h1>"))
    with pytest.raises(Unreachable, match="something else than Cadenza's API"):
        client.job("a-1")


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("refused"), httpx.ReadTimeout("timed out"), httpx.ReadError("")]
)
def test_a_service_that_does_not_answer_is_one_line_with_a_remedy(
    service: FakeService, client: Client, error: Exception
) -> None:
    service.faults.append(error)
    with pytest.raises(Unreachable) as caught:
        client.job("a-1")
    text = str(caught.value)
    assert text.startswith("no Cadenza service at http://service.test: ")
    assert (str(error) or "ReadError") in text
    assert "`cadenza up`" in text
    assert "\n" not in text


def test_nothing_listens() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # Bound and not listening: nobody else can take the port meanwhile.
        with Client(f"http://127.0.0.1:{silent.getsockname()[1]}") as client:
            with pytest.raises(Unreachable, match="refused"):
                client.jobs()
            assert not client.ready()


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://[::1", "no address"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="is not an address"):
        Client(url)


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.9.9.9", True),
        ("http://[::1]:8000", True),
        ("http://localhost", True),
        ("http://10.0.0.1", False),
        ("https://localhost.example.org", False),
    ],
)
def test_proxies_of_the_environment_are_not_for_this_machine(
    url: str, loopback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ALL_PROXY", "http://proxy.test:3128")
    with Client(url) as client:
        assert client._http.trust_env is not loopback


def test_ready_follows_the_service(service: FakeService, client: Client) -> None:
    assert client.ready()
    service.faults.extend([httpx.Response(503), httpx.ConnectError("refused")])
    assert not client.ready()
    assert not client.ready()


def test_a_package_is_uploaded_once(service: FakeService, client: Client, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    package = client.upload_package(tmp_path)
    client.upload_package(tmp_path)
    path = f"/v1/packages/{package.sha256}"
    [request] = service.asked("PUT", path)
    assert len(service.asked("HEAD", path)) == 2
    assert (
        int(request.headers["content-length"]) == package.size_bytes == len(service.packages[package.sha256])
    )


def test_a_zip_is_uploaded_as_it_is(service: FakeService, client: Client, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("train.py", "print(1)")
    package = client.upload_package(tmp_path / "code.zip")
    assert service.packages[package.sha256] == (tmp_path / "code.zip").read_bytes()


def test_the_model_is_written_whole(service: FakeService, client: Client, tmp_path: Path) -> None:
    service.models["a-1"] = b"weights"
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    assert client.download_model("a-1", path) == 7
    assert path.read_bytes() == b"weights"
    assert list(tmp_path.iterdir()) == [path]


def test_a_download_that_breaks_off_leaves_the_old_file(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise httpx.ReadError("connection reset")

    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=broken()))
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"old")
    with (
        Client("http://service.test", transport=transport) as client,
        pytest.raises(Unreachable, match="reset"),
    ):
        client.download_model("a-1", path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_model_says_why_and_writes_nothing(
    service: FakeService, client: Client, tmp_path: Path
) -> None:
    with pytest.raises(ApiError, match="RUNNING and has no model yet"):
        client.download_model("a-1", tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told(service: FakeService, client: Client, tmp_path: Path) -> None:
    service.models["a-1"] = b"weights"
    with pytest.raises(UserError, match=r"cannot write .*No such file"):
        client.download_model("a-1", tmp_path / "nowhere" / "model.safetensors")
