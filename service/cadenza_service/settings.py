"""The service's settings: read from ``CADENZA_*`` environment variables here and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from cadenza.plane.congestion import Setting as CongestionControl
from cadenza_service.loopback import is_loopback

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class Settings(BaseSettings):
    """What can be set. An empty variable counts as unset."""

    model_config = SettingsConfigDict(env_prefix="CADENZA_", env_ignore_empty=True, frozen=True)

    home: Path = Field(default=Path("~/.cadenza"), validate_default=True)
    """The folder for everything that the service keeps on this machine."""

    database_url: str = Field("sqlite:///{home}/cadenza.db", validate_default=True)
    """The job store: ``sqlite:///<file>``; ``{home}`` stands for the setting above, here and in ``storage``."""

    storage: str = Field("{home}/storage", validate_default=True)
    """Where packages and checkpoints are kept: a local folder (a path or a ``file://`` URL)."""

    token: Annotated[SecretStr, Field(min_length=1)] | None = None
    """What clients send as ``Authorization: Bearer <token>``. None: no check, and only loopback is listened on."""

    host: str = "127.0.0.1"
    """The address that the API listens on."""

    port: int = Field(8000, ge=0, le=65_535)
    """The API's port; 0 takes a free one."""

    api_url: str = "http://127.0.0.1:8000"
    """Where the command line and the client look for the API."""

    package_limit_bytes: int = Field(100 * 2**20, ge=1)
    """The largest package of user code that is taken."""

    round_timeout_s: float = Field(600, gt=0)
    """How long a round waits for a worker before the job fails, naming it."""

    congestion_control: CongestionControl = CongestionControl.AUTO
    """How connections between hosts share slow links: auto is cubic, else reno, else bbr with pacing, whichever the
    processes may choose first; or one of these by name."""

    join_timeout_s: float = Field(120, gt=0)
    """How long the first worker that joins a job waits for the last."""

    start_timeout_s: float = Field(300, gt=0)
    """How long a job's processes may take to start, its packages' installation included."""

    log_lines_kept: int = Field(10_000, ge=1)
    """Log lines kept for each job; older ones are deleted."""

    streams_per_token: int = Field(64, ge=1)
    """Event and log streams that one client token may hold open on each API replica."""

    log_level: LogLevel = "INFO"
    """How much the service itself logs."""

    @field_validator("home")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("database_url", "storage")
    @classmethod
    def _in_home(cls, value: str, info: ValidationInfo) -> str:
        return value.replace("{home}", str(info.data.get("home", "")))

    @field_validator("database_url")
    @classmethod
    def _sqlite_file(cls, value: str) -> str:
        if not value.startswith("sqlite:///") or value in ("sqlite:///", "sqlite:///:memory:"):
            scheme = value.partition(":")[0]  # never the rest: it may hold a password
            raise ValueError(
                f"CADENZA_DATABASE_URL starts with {scheme!r}, but the job store is an SQLite file; "
                "give sqlite:////absolute/path/cadenza.db"
            )
        return value

    @field_validator("storage")
    @classmethod
    def _local_folder(cls, value: str) -> str:
        scheme = urlsplit(value).scheme if "://" in value else ""
        if scheme not in ("", "file"):
            raise ValueError(
                f"CADENZA_STORAGE has the scheme {scheme!r}, but only a local folder is supported; give a path"
            )
        path = unquote(urlsplit(value).path) if scheme else value
        return str(Path(path).expanduser().absolute())

    @model_validator(mode="after")
    def _guarded(self) -> Settings:
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"CADENZA_HOST is {self.host!r}, which other machines can reach, but CADENZA_TOKEN is not set; "
                "set a token or listen on 127.0.0.1"
            )
        return self

    @property
    def storage_path(self) -> Path:
        """The folder that ``storage`` names."""
        return Path(self.storage)
