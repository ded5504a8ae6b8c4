from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from cadenza_service.loopback import is_loopback
from cadenza_service.settings import Settings


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("CADENZA_"):
            monkeypatch.delenv(name)


def refusal(**given: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Settings(**given)  # type: ignore[arg-type]
    return str(caught.value)


def test_database_and_storage_lie_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_HOME", str(tmp_path))
    settings = Settings()
    assert settings.database_url == f"sqlite:///{tmp_path}/cadenza.db"
    assert settings.storage_path == tmp_path / "storage"


def test_the_home_is_the_users_own_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Settings().home == tmp_path / ".cadenza"


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_TOKEN", "")
    assert Settings().token is None


def test_an_empty_token_is_refused() -> None:
    assert "token" in refusal(token="")


def test_the_token_is_not_shown() -> None:
    assert "s3cret" not in repr(Settings(token="s3cret"))


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1  # type: ignore[misc]


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "example.org"])
def test_a_reachable_host_needs_a_token(host: str) -> None:
    message = refusal(host=host)
    assert "CADENZA_HOST" in message
    assert "CADENZA_TOKEN" in message
    assert Settings(host=host, token="t").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert is_loopback(host)
    assert Settings(host=host).token is None


@pytest.mark.parametrize("storage", ["s3://bucket/x", "gs://bucket"])
def test_other_storage_than_a_folder_is_refused(storage: str) -> None:
    assert "only a local folder" in refusal(storage=storage)


def test_storage_may_be_a_file_url() -> None:
    assert Settings(storage="file:///data/my%20models").storage_path == Path("/data/my models")


@pytest.mark.parametrize("url", ["postgresql://u:hunter2@db/x", "sqlite://", "sqlite:///:memory:"])
def test_another_database_is_refused_and_its_password_kept(url: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(database_url=url)
    (error,) = caught.value.errors()
    assert "CADENZA_DATABASE_URL" in error["msg"]
    assert "hunter2" not in error["msg"]


@pytest.mark.parametrize("field", ["round_timeout_s", "join_timeout_s", "start_timeout_s", "log_lines_kept"])
def test_limits_are_positive(field: str) -> None:
    assert field in refusal(**{field: 0})
