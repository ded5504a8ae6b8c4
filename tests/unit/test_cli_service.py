"""up and demo: the child process is started, waited for, told about and always stopped."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cadenza_api.cli import demo, service_process
from cadenza_api.cli import service as cli_service
from cadenza_api.cli.main import main
from cadenza_api.cli.service_process import ServiceFailed, running
from cadenza_api.client import watching
from cadenza_service.settings import Settings
from tests.unit.fake_service import FakeService

READY = """
print("some other line")
print(json.dumps({"url": "http://127.0.0.1:1"}), flush=True)
"""
BEGIN = "import json, os, signal, sys; sys.stderr.write('a dark and stormy start\\n')\n"
RECORDING = f"""{BEGIN}
home = os.environ["CADENZA_HOME"]
with open(home + "/seen", "w") as file:
    json.dump({{"cwd": os.listdir(), "env": dict(os.environ), "group": os.getpgrp()}}, file)
def stop(*_):
    open(home + "/stopped", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
{READY}
sys.stdin.read()
"""
DYING = f"{BEGIN}{READY}sys.exit(3)"
STUBBORN = f"{BEGIN}signal.signal(signal.SIGTERM, signal.SIG_IGN){READY}signal.pause()"


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in [name for name in os.environ if name.startswith("CADENZA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CADENZA_HOME", str(tmp_path / "home"))
    return Settings(port=0)


def test_the_child_is_ready_then_stopped_in_order(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/caller")
    monkeypatch.setenv("OTHER", "kept")
    with running(settings, command(RECORDING)) as service:
        assert service.url == "http://127.0.0.1:1"
        assert service.process.poll() is None
    assert service.process.returncode == 0
    assert (settings.home / "stopped").exists()
    seen = json.loads((settings.home / "seen").read_text())
    assert seen["cwd"] == []
    assert "PYTHONPATH" not in seen["env"]
    assert (seen["env"]["OTHER"], seen["env"]["CADENZA_PORT"]) == ("kept", "0")
    assert seen["group"] != os.getpgrp()


def test_an_error_in_the_caller_stops_the_child(settings: Settings) -> None:
    with pytest.raises(ZeroDivisionError), running(settings, command(RECORDING)) as service:
        raise ZeroDivisionError
    assert service.process.returncode == 0


def test_a_child_that_does_not_start_shows_the_end_of_its_log(settings: Settings) -> None:
    code = "import sys; print('no ray here', file=sys.stderr); sys.exit(7)"
    with (
        pytest.raises(ServiceFailed, match=r"did not start \(code 7\)[\s\S]*no ray here"),
        running(settings, command(code)),
    ):
        pass


def test_a_child_that_is_never_ready_is_given_up(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_process, "START_TIMEOUT_S", 0.2)
    code = "import sys; sys.stdin.read()"
    with pytest.raises(ServiceFailed, match="not ready within"), running(settings, command(code)):
        pass


def test_a_child_that_ends_by_itself_is_told(settings: Settings) -> None:
    told = pytest.raises(ServiceFailed, match=r"ended by itself with code 3[\s\S]*stormy")
    with told, running(settings, command(DYING)) as service:
        service.wait()


def test_a_child_that_will_not_stop_is_killed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_process, "STOP_TIMEOUT_S", 0.3)
    with pytest.raises(ServiceFailed, match="was killed"), running(settings, command(STUBBORN)) as service:
        pass
    assert service.process.returncode == -signal.SIGKILL


def test_one_home_has_one_service(settings: Settings) -> None:
    with (
        running(settings, command(RECORDING)),
        pytest.raises(ServiceFailed, match=r"already uses .*home, at http://127\.0\.0\.1:1; use that one"),
        running(settings, command(RECORDING)),
    ):
        pass
    with running(settings, command(RECORDING)):
        assert (settings.home / "up.lock").read_text() == "http://127.0.0.1:1\n"


def test_a_killed_parent_takes_its_child_along(settings: Settings) -> None:
    code = (
        "import sys, time\n"
        "from cadenza_service.settings import Settings\n"
        "from cadenza_api.cli.service_process import running\n"
        f"with running(Settings(port=0), {command(RECORDING)!r}):\n"
        "    print('up', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
    with (settings.home / "up.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Free only once the child, which holds it too, is gone.


def test_a_taken_port_is_one_line(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ServiceFailed) as caught, running(settings.model_copy(update={"port": port})):
            pass
    text = str(caught.value)
    assert f"port {port} of 127.0.0.1: Address already in use" in text
    assert "--port" in text
    assert "\n" not in text


class Terminal:
    """The command line in a process of its own, so that it can be interrupted as a shell does it."""

    def __init__(self, *arguments: str) -> None:
        code = (
            "import signal\n"
            # As a script's background has them; what runs these tests may differ.
            "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
            "from cadenza_api.cli import service_process\n"
            "from cadenza_api.cli.main import main\n"
            f"service_process.COMMAND = {command(RECORDING)!r}\n"
            "from tests.unit.fake_service import FakeService\n"
            "fake = FakeService(); fake.add('char-1'); fake.add('char-2', 'FAILED')\n"
            f"main({list(arguments)!r}, transport=fake.transport)\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def read_until(self, part: str) -> str:
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if part in line:
                return seen
        pytest.fail(f"{part!r} did not come in {seen!r}")

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_runs_until_it_is_told_to_stop(settings: Settings, number: int) -> None:
    terminal = Terminal("up", "--port", "0")
    shown = terminal.read_until("Ctrl-C")
    assert "Cadenza is ready at http://127.0.0.1:1; 1 unfinished job goes on." in shown
    assert "export CADENZA_API_URL=http://127.0.0.1:1" in shown
    assert "cadenza submit SPEC --watch" in shown
    code, errors = terminal.end(number)
    assert code == 0
    assert "1 unfinished job goes on at the next `cadenza up`" in errors
    assert "Traceback" not in errors
    assert (settings.home / "stopped").exists()


def test_up_json(settings: Settings) -> None:
    terminal = Terminal("up", "--port", "0", "--json")
    assert json.loads(terminal.read_until("url")) == {"url": "http://127.0.0.1:1"}
    assert terminal.end(signal.SIGINT)[0] == 0


def test_up_refuses_an_open_address_without_a_token(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["up", "--host", "0.0.0.0"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "CADENZA_HOST is '0.0.0.0'" in error
    assert "CADENZA_TOKEN" in error


METRICS = {"accuracy": 0.98, "test_loss": 0.07}
DONE = {"samples": 100, "rounds": 5, "wire_bytes": 4096, "seconds": 2.5, "loss": 0.1, "metrics": METRICS}


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / "demo.yaml").write_text("name: tiny\nentrypoint: tiny:train\nruntime_env: {working_dir: .}\n")
    (folder / "larger.yaml").write_text("name: larger\nentrypoint: tiny:train\n")
    (folder / "tiny.py").write_text("def train(config): ...\n")
    monkeypatch.setattr(demo, "examples_folder", lambda: folder)
    monkeypatch.setattr(watching, "INTERVAL_S", 0)
    return folder


@pytest.fixture
def service(examples: Path) -> FakeService:
    service = FakeService()
    service.models["tiny-00000000"] = b"weights"
    service.script.append(lambda job: job.update(state="SUCCEEDED", progress=DONE))
    return service


def run_demo(service: FakeService, *arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["demo", *arguments], transport=service.transport)
    return int(caught.value.code or 0)


def test_demo_on_a_running_service(
    service: FakeService, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(service) == 0
    shown = capsys.readouterr().out
    model = settings.home / "downloads" / "tiny-00000000.safetensors"
    for part in (
        "accuracy 0.98, test_loss 0.07",
        "5, 100 samples",
        "4.0 KiB",
        str(model),
        "larger.yaml --watch",
    ):
        assert part in shown
    assert model.read_bytes() == b"weights"
    assert len(service.packages) == 1


def test_demo_json_is_one_object(
    service: FakeService, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(service, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    expected = {
        "job_id": "tiny-00000000",
        "state": "SUCCEEDED",
        "accuracy": 0.98,
        "rounds": 5,
        "wire_bytes": 4096,
    }
    assert expected.items() <= result.items()
    assert result["seconds"] >= 0
    assert Path(result["model"]).exists()


def test_demo_runs_a_service_of_its_own_and_stops_it(
    service: FakeService,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli_service, "_answers", lambda connection: False)
    use(monkeypatch, RECORDING)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert run_demo(service) == 0
    shown = capsys.readouterr().out
    assert "  cadenza up" in shown
    assert f"{settings.api_url}/docs" in shown
    assert (settings.home / "stopped").exists()
    assert {request.url.port for request in service.requests} == {1}


def use(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(service_process, "running", lambda settings: running(settings, command(code)))


def test_a_failed_demo_says_why(
    service: FakeService, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = {"code": "user_error", "message": "it broke"}
    service.script[0] = lambda job: job.update(state="FAILED", reason=reason)
    assert run_demo(service, "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["state"], result["reason"], result["model"]) == ("FAILED", "it broke", None)


def interrupt(job: dict[str, Any]) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_demo_cancels_its_job_and_stops_its_service(
    service: FakeService, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_service, "_answers", lambda connection: False)
    use(monkeypatch, RECORDING)
    service.script.clear()
    service.script.append(interrupt)
    assert run_demo(service) == 130
    assert service.jobs["tiny-00000000"]["state"] == "CANCELLED"
    assert (settings.home / "stopped").exists()


def test_a_demo_that_takes_for_ever_is_given_up(
    service: FakeService,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "TIMEOUT_S", -1)
    service.script.clear()
    assert run_demo(service) == 2
    assert "tiny-00000000 is QUEUED after" in capsys.readouterr().err
    assert service.jobs["tiny-00000000"]["state"] == "CANCELLED"


def test_the_examples_are_found_beside_the_sources() -> None:
    assert (demo.examples_folder() / "demo.yaml").is_file()


def test_the_next_steps_call_the_program_as_the_user_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    for called, shown in (
        (tmp_path / ".venv/bin/cadenza", ".venv/bin/cadenza"),
        (Path("/opt/bin/cadenza"), "/opt/bin/cadenza"),
    ):
        monkeypatch.setattr("sys.argv", [str(called), "demo"])
        assert demo.own_name() == shown
