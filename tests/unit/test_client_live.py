"""The client and the command line against the real API, over a real socket."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from cadenza.spec import JobSpec, RuntimeEnv
from cadenza_api.cli.main import main
from cadenza_api.client import watching
from cadenza_api.client.client import Client
from cadenza_api.client.errors import ApiError
from cadenza_api.server.app import create_app
from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.jobs.records import Reason
from cadenza_service.jobs.storage import Storage
from cadenza_service.jobs.store import Store
from cadenza_service.settings import Settings
from cadenza_service.snapshot import Event, JobSnapshot, LogLine, Progress, Telemetry

SPEC = JobSpec(name="tiny", entrypoint="tiny:train")
PROGRESS = Progress(samples=50, total_samples=100, rounds=3, loss=0.5, metrics={"accuracy": 0.9})


class Live:
    """The API in a thread, over a store that the test writes as a controller would."""

    def __init__(self, folder: Path, token: str | None = None) -> None:
        self.settings = Settings(home=folder, token=token)
        self.store = Store.open(self.settings)
        self.storage = Storage(self.settings.storage_path, package_limit_bytes=100_000)
        self._listener: socket.socket | None = None
        self.port = 0
        self.start()

    def start(self) -> None:
        app = create_app(self.store, self.storage, self.settings, tick_s=0.01)
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        assert self._listener is not None
        self._listener.close()

    def client(self, token: str | None = None) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", token)

    def run(self, job_id: str) -> None:
        """Bring a job to RUNNING with some progress, an event and two lines."""
        self.store.move(
            job_id, JobState.STARTING, Reason(code="starting", message="coming up"), message="starting"
        )
        self.store.move(job_id, JobState.RUNNING, message="running")
        epoch = self.store.begin_attempt(job_id)
        self.store.record(job_id, epoch, snapshot())

    def end(self, job_id: str) -> None:
        self.store.move(job_id, JobState.SUCCEEDED, message="done")


def snapshot() -> JobSnapshot:
    return JobSnapshot(
        phase="training",
        progress=PROGRESS,
        telemetry=Telemetry(),
        events=[Event(number=1, time=1e9, kind="evaluated", message="accuracy 0.9")],
        logs=[LogLine(number=n, time=1e9, worker=0, stream="stdout", text=f"line {n}") for n in (1, 2)],
    )


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    for name in [name for name in os.environ if name.startswith("CADENZA_")]:
        monkeypatch.delenv(name)
    live = Live(tmp_path / "home")
    yield live
    live.stop()
    live.store.close()


def test_from_the_folder_to_the_model(live: Live, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "tiny.py").write_text("def train(config): ...\n")
    with live.client() as client:
        package = client.upload_package(tmp_path / "code")
        assert not client.put_package(package)
        spec = SPEC.model_copy(update={"runtime_env": RuntimeEnv(working_dir=package.reference)})
        job = client.submit(spec, idempotency_key="k")
        assert client.submit(spec, idempotency_key="k").id == job.id
        assert job.state == "QUEUED"
        live.run(job.id)
        seen = client.job(job.id)
        assert (seen.state, seen.progress.samples, seen.progress.metrics) == (
            "RUNNING",
            50,
            {"accuracy": 0.9},
        )
        with pytest.raises(ApiError, match="RUNNING"):
            client.download_model(job.id, tmp_path / "model.safetensors")
        with live.storage.checkpoint_writer(job.id, 1, round=3, samples=50) as folder:
            (folder / "model.safetensors").write_bytes(b"weights")
        live.end(job.id)
        assert [found.number for found in client.checkpoints(job.id)] == [1]
        assert client.download_model(job.id, tmp_path / "model.safetensors") == 7


def test_a_stream_is_followed_through_a_restart_of_the_api(live: Live) -> None:
    with live.client() as client:
        job = client.submit(SPEC)
        events = client.events(job.id, follow=True)
        first = next(events)
        live.stop()
        live.start()
        live.run(job.id)
        live.end(job.id)
        messages = [first.message, *(event.message for event in events)]
        assert messages == [event.message for event in client.events(job.id)]
        assert [event.seq for event in client.events(job.id)] == list(range(1, len(messages) + 1))
        assert messages[-3:] == ["running", "accuracy 0.9", "done"]
        assert [line.text for line in client.logs(job.id, follow=True)] == ["line 1", "line 2"]


def test_jobs_are_paged(live: Live) -> None:
    with live.client() as client:
        ids = [client.submit(SPEC).id for _ in range(5)]
        assert [job.id for job in client.each_job(page_limit=2)] == ids[::-1]
        assert client.cancel(ids[0]).state == "CANCELLED"
        assert [job.id for job in client.jobs("CANCELLED")] == [ids[0]]


def test_readiness_needs_a_controller(live: Live) -> None:
    with live.client() as client:
        assert not client.ready()
        live.store.heartbeat()
        assert client.ready()


def test_the_service_and_the_client_name_a_wrong_field_alike(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {"name": "a", "entrypoint": "t:f", "sync": {"mode": "sync", "local_steps": 4}, "wokers": {}}
    (tmp_path / "spec.json").write_text(json.dumps(document))
    with pytest.raises(SystemExit):
        main(["submit", str(tmp_path / "spec.json")])
    local = capsys.readouterr().err.splitlines()[1:]
    with live.client() as client, pytest.raises(ApiError) as caught:
        client._request("POST", "/v1/jobs", json=document)
    assert str(caught.value).splitlines()[1:] == local
    assert len(local) == 2


def test_a_package_beyond_the_services_limit_is_refused_in_its_words(live: Live, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "noise.bin").write_bytes(os.urandom(300_000))
    with live.client() as client, pytest.raises(ApiError) as caught:
        client.upload_package(tmp_path / "code")
    assert (caught.value.status, caught.value.code) == (413, "package_too_large")


def test_without_its_token_the_service_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = Live(tmp_path / "guarded", token="s3cret")
    try:
        with live.client() as stranger, pytest.raises(ApiError, match="no valid token") as caught:
            stranger.jobs()
        assert caught.value.status == 401
        with live.client("s3cret") as client:
            assert client.jobs() == []
    finally:
        live.stop()
        live.store.close()


def test_the_command_line_watches_a_job_to_its_end(
    live: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "INTERVAL_S", 0.01)
    job, _ = live.store.create(SPEC)
    live.run(job.id)
    ending = threading.Timer(0.2, live.end, [job.id])
    ending.start()
    with pytest.raises(SystemExit) as caught:
        main(["--url", f"http://127.0.0.1:{live.port}", "watch", "tiny"])
    ending.join()
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "50/100 samples, loss 0.5" in shown
    assert f"{job.id} SUCCEEDED (accuracy 0.9)" in shown
