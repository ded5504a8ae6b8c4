from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza_api.server import deploy
from cadenza_api.server.secret_file import write_secret
from cadenza_service.settings import Settings

RAY_VARIABLES = (
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RAY_VARIABLES, "RAY_USAGE_STATS_ENABLED", "CADENZA_TOKEN"):
        monkeypatch.setenv(name, "")  # So that what the test changes is put back.
        monkeypatch.delenv(name)


def test_a_secret_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old, and readable by all")
    assert write_secret(path, "new") == path
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600


def test_ray_gets_a_token_of_its_own_and_users_code_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CADENZA_TOKEN", "s3cret")
    deploy._prepare_environment(Settings(home=tmp_path))
    assert os.environ["RAY_AUTH_MODE"] == "token"
    first = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert first.parent == tmp_path
    assert len(first.read_text()) == 64
    assert "CADENZA_TOKEN" not in os.environ


def test_what_the_environment_says_of_ray_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/elsewhere")
    deploy._prepare_environment(Settings(home=tmp_path))
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == "/elsewhere"


def test_wrong_settings_are_told_without_their_values(tmp_path: Path) -> None:
    env = os.environ | {"CADENZA_DATABASE_URL": "postgresql://me:hunter2@db/x", "CADENZA_PORT": "many"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cadenza_api.server.deploy"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    first, second = done.stderr.splitlines()
    assert "database_url: " in first
    assert "CADENZA_DATABASE_URL starts with 'postgresql'" in first
    assert second.startswith("port: ")
    assert "hunter2" not in done.stderr
