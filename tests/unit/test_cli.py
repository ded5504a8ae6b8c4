"""The commands: what they print, what they send, and what they return."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cadenza_api.cli.main import main
from cadenza_api.client import patience, watching
from tests.unit.fake_service import FakeService, event, problem

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: too deep'
RUNNING = {
    "samples": 500,
    "total_samples": 1000,
    "rounds": 12,
    "loss": 0.25,
    "metrics": {"accuracy": 0.9812},
    "wire_bytes": 3 * 2**20,
    "seconds": 4.0,
    "samples_per_second": 100.0,
    "workers": [{"worker": 0, "state": "active", "device": "cpu", "node": "n1", "steps": 40, "samples": 250}],
    "decision": {"mode": "local", "local_steps": 8},
}


@dataclass
class Result:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def run(
    service: FakeService,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Run:
    monkeypatch.setattr(watching, "INTERVAL_S", 0)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CADENZA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CADENZA_HOME", str(tmp_path / "home"))

    def run(*arguments: str) -> Result:
        with pytest.raises(SystemExit) as caught:
            main(arguments, transport=service.transport)
        captured = capsys.readouterr()
        code = caught.value.code
        return Result(int(code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def spec(tmp_path: Path) -> str:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("def main(config): ...\n")
    text = "name: char\nentrypoint: train:main\nruntime_env: {working_dir: .}\n"
    (folder / "spec.yaml").write_text(text)
    return str(folder / "spec.yaml")


def becomes(state: str, **members: Any) -> Callable[[dict[str, Any]], None]:
    return lambda job: job.update({"state": state, **members})


def test_submit_uploads_the_code_and_creates_the_job(service: FakeService, run: Run, spec: str) -> None:
    result = run("submit", spec, "--set", "sync.mode=ssp", "--name", "other", "--idempotency-key", "k1")
    assert result.code == 0
    [digest] = service.packages
    [request] = service.asked("POST", "/v1/jobs")
    body = json.loads(request.content)
    assert (body["name"], body["sync"]) == ("other", {"mode": "ssp"})
    assert body["runtime_env"] == {"working_dir": f"sha256:{digest}"}
    assert request.headers["idempotency-key"] == "k1"
    assert "submitted other-00000000" in result.out
    assert "uploaded 2 files" in result.err


def test_submit_json_is_the_job_and_nothing_else(service: FakeService, run: Run, spec: str) -> None:
    assert run("submit", spec, "--json").json()["id"] == "char-00000000"
    assert "uploaded" not in run("submit", spec, "--json").err


def test_a_wrong_spec_is_refused_before_anything_is_sent(service: FakeService, run: Run, spec: str) -> None:
    result = run("submit", spec, "--set", "sync.mod=ssp")
    assert (result.code, result.out) == (2, "")
    assert "sync.mod: is not a known key; did you mean 'mode'?" in result.err
    assert service.requests == []


def test_submit_without_code_says_so(service: FakeService, run: Run, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text('{"name": "a", "entrypoint": "train:main"}')
    result = run("submit", "spec.json")
    assert result.code == 0
    assert "no code is uploaded" in result.err


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELLED", 3)])
def test_watch_ends_with_the_job_and_returns_how(
    service: FakeService, run: Run, state: str, code: int
) -> None:
    service.add("char-1", "QUEUED")
    service.events["char-1"] = [event(1, "QUEUED"), event(2, f"now {state}")]
    service.script.extend([becomes("RUNNING"), becomes("RUNNING", progress=RUNNING), becomes(state)])
    result = run("watch", "char-1")
    assert result.code == code
    assert result.out.count("500/1,000 samples, loss 0.25, 100 samples/s, 5.0s left") == 1
    assert result.out.count(f"now {state}") == 1
    assert f"char-1 {state}" in result.out
    assert ("cadenza logs char-1" in result.err) == (state == "FAILED")


def test_submit_watch_json_prints_one_object(service: FakeService, run: Run, spec: str) -> None:
    service.script.extend([becomes("RUNNING", progress=RUNNING), becomes("SUCCEEDED")])
    result = run("submit", spec, "--watch", "--json")
    assert result.code == 0
    assert result.json()["state"] == "SUCCEEDED"
    assert "500/1,000 samples" in result.err


def test_watch_bears_a_restart_of_the_service(
    service: FakeService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "FIRST_DELAY_S", 0)
    service.add("char-1", "SUCCEEDED")
    service.faults.extend([None, problem(503, "starting")])
    result = run("watch", "char-1")
    assert result.code == 0
    assert "trying again" in result.out


def test_ctrl_c_leaves_a_watched_job_running_and_says_so(service: FakeService, run: Run) -> None:
    def interrupt(job: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    service.add("char-1", "RUNNING")
    service.script.extend([becomes("RUNNING"), becomes("RUNNING"), interrupt])
    result = run("watch", "char-1")
    assert result.code == 130
    assert "char-1 goes on" in result.err
    assert "cadenza cancel char-1" in result.err
    assert service.asked("POST", "/v1/jobs/char-1/cancel") == []


def test_jobs_is_a_table(service: FakeService, run: Run) -> None:
    service.add("old-1", "FAILED")
    service.add("char-22", "RUNNING", progress=RUNNING)
    lines = run("jobs").out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ID", "STATE"],
        ["char-22", "RUNNING"],
        ["old-1", "FAILED"],
    ]
    assert "500/1,000 samples  0.25" in lines[1]
    assert len(run("jobs", "--limit", "1").out.splitlines()) == 2
    assert [job["id"] for job in run("jobs", "--json").json()] == ["char-22", "old-1"]
    assert [job["id"] for job in run("jobs", "--state", "failed", "--json").json()] == ["old-1"]


def test_jobs_without_any(run: Run) -> None:
    assert "cadenza submit" in run("jobs").out
    assert run("jobs", "--json").json() == []


def test_show_tells_everything(service: FakeService, run: Run) -> None:
    service.add("char-1", "RUNNING", progress=RUNNING)
    service.models["char-1"] = b"x" * 2048
    text = run("show", "char-1").out
    for part in (
        "char-1  RUNNING",
        "500/1,000 samples, loss 0.25",
        "accuracy 0.9812",
        "3.0 MiB in 12 rounds",
        "mode local, local_steps 8",
        "0 active, cpu on n1, 40 steps, 250 samples",
        "checkpoint 1, 2.0 KiB; fetch it with: cadenza download char-1",
    ):
        assert part in text
    assert run("show", "char-1", "--json").json()["progress"]["rounds"] == 12


def test_show_tells_why_and_where_the_users_code_failed(service: FakeService, run: Run) -> None:
    details = {"traceback": TRACEBACK, "worker": 1, "step": 50}
    reason = {
        "code": "user_error",
        "message": "ValueError: too deep [1, 2]",
        "remedy": "fix it",
        "details": details,
    }
    service.add("char-1", "FAILED", reason=reason)
    text = run("show", "char-1").out
    assert "ValueError: too deep [1, 2] [user_error]" in text
    assert "remedy    fix it" in text
    assert "traceback (worker 1, step 50):" in text
    assert '    Traceback (most recent call last):\n      File "train.py", line 3\n' in text


def test_a_job_is_named_by_the_beginning_of_its_id_or_as_the_latest(service: FakeService, run: Run) -> None:
    for job_id in ("char-aa11", "char-bb22", "other-cc33"):
        service.add(job_id)
    assert run("show", "char-b", "--json").json()["id"] == "char-bb22"
    assert run("show", "latest", "--json").json()["id"] == "other-cc33"
    ambiguous = run("show", "char")
    assert ambiguous.code == 2
    assert "2 jobs begin with 'char': char-bb22, char-aa11" in ambiguous.err


def test_an_unknown_job_is_the_services_word(service: FakeService, run: Run) -> None:
    result = run("show", "nobody")
    assert (result.code, result.out, result.err) == (5, "", "cadenza: there is no job 'nobody'\n")
    assert run("show", "latest").code == 2


def test_logs(service: FakeService, run: Run) -> None:
    service.add("char-1")
    service.logs["char-1"] = [
        {
            "seq": seq,
            "time": 1_767_323_045.5,
            "worker": seq % 2,
            "stream": "stdout",
            "text": f"line {seq} [x]",
        }
        for seq in range(1, 4)
    ]
    assert (
        run("logs", "char-1").out == "worker 1 | line 1 [x]\nworker 0 | line 2 [x]\nworker 1 | line 3 [x]\n"
    )
    assert [line["text"] for line in run("logs", "char-1", "--json").json()] == [
        "line 1 [x]",
        "line 2 [x]",
        "line 3 [x]",
    ]


def test_logs_are_followed_line_by_line(service: FakeService, run: Run) -> None:
    service.add("char-1")
    row = '{"seq": 1, "time": 1767323045, "worker": 0, "stream": "stderr", "text": "hi"}'
    service.streams.append([f"id: 1\nevent: log\ndata: {row}\n\n", "event: end\ndata: {}\n\n"])
    assert json.loads(run("logs", "char-1", "--follow", "--json").out) == {
        **json.loads(row),
        "time": "2026-01-02T03:04:05Z",
    }


def test_cancel(service: FakeService, run: Run) -> None:
    service.add("char-1", "QUEUED")
    result = run("cancel", "char-1")
    assert (result.code, result.out) == (0, "char-1 CANCELLED: cancelled on request\n")


def test_download(service: FakeService, run: Run, tmp_path: Path) -> None:
    service.add("char-1", "SUCCEEDED")
    service.models["char-1"] = b"weights"
    assert run("download", "char").out == "char-1.safetensors (7 B)\n"
    assert (tmp_path / "char-1.safetensors").read_bytes() == b"weights"
    result = run("download", "char", "-o", "m.st", "--json").json()
    assert result == {"job_id": "char-1", "path": "m.st", "size_bytes": 7}
    assert (tmp_path / "m.st").exists()


@pytest.mark.parametrize(
    "command", [["jobs"], ["show", "a"], ["watch", "latest"], ["logs", "a"], ["cancel", "a"]]
)
def test_an_unreachable_service_is_one_line(service: FakeService, run: Run, command: list[str]) -> None:
    service.faults.append(httpx.ConnectError("[Errno 111] Connection refused"))
    result = run(*command)
    assert (result.code, result.out) == (4, "")
    assert result.err.count("\n") == 1
    assert "no Cadenza service at http://127.0.0.1:8000: [Errno 111] Connection refused" in result.err


def test_the_address_and_the_token_come_from_options_or_the_environment(
    service: FakeService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CADENZA_API_URL", "http://one.test/")
    monkeypatch.setenv("CADENZA_TOKEN", "t1")
    run("jobs")
    run("--url", "http://two.test", "--token", "t2", "jobs")
    seen = [(request.url.host, request.headers["authorization"]) for request in service.requests]
    assert seen == [("one.test", "Bearer t1"), ("two.test", "Bearer t2")]


def test_the_token_is_never_printed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_TOKEN", "s3cret")
    result = run("--help")
    assert "s3cret" not in result.out + result.err


@pytest.mark.parametrize(
    "arguments", [["fly"], ["jobs", "--limit", "0"], ["jobs", "--state", "asleep"], ["show"], []]
)
def test_wrong_usage_returns_two(run: Run, arguments: list[str]) -> None:
    assert run(*arguments).code == 2


def test_help_tells_the_exit_codes(run: Run) -> None:
    result = run("--help")
    assert result.code == 0
    for line in (
        "0  done",
        "1  the job failed",
        "3  the job was cancelled",
        "4  the service does not answer",
    ):
        assert line in result.out


def test_client_commands_load_neither_ray_nor_torch_nor_the_database() -> None:
    code = (
        "import sys, httpx, cadenza_api.cli.main as cli\n"
        "answer = httpx.MockTransport(lambda request: httpx.Response(200, json={'items': []}))\n"
        "try: cli.main(['jobs'], transport=answer)\n"
        "except SystemExit as end: assert not end.code\n"
        "print([name for name in ('ray', 'torch', 'sqlalchemy', 'fastapi', 'pydantic_settings') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
