"""The job store's tables, and how an SQLite file is opened.

``jobs.event_seq`` and ``jobs.log_seq`` hand out the gapless numbers of a job's events and log lines: whoever
appends first raises the counter, which locks the job's row until the transaction ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    insert,
    make_url,
    select,
)

from cadenza_service.jobs.records import SchemaTooNew

SCHEMA_VERSION = 1

BUSY_TIMEOUT_MS = 30_000
"""How long one writer waits for another. Transactions here take milliseconds; a wait this long means a stuck disk."""

metadata = MetaData()

schema_version = Table("schema_version", metadata, Column("version", Integer, primary_key=True))

jobs = Table(
    "jobs",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("id", String(63), nullable=False, unique=True),
    Column("name", String(63), nullable=False),
    Column("spec", JSON, nullable=False),
    Column("idempotency_key", String(255), unique=True),
    Column("state", String(16), nullable=False),
    Column("reason", JSON(none_as_null=True)),
    Column("desired", String(16), nullable=False),
    Column("epoch", Integer, nullable=False, default=0),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    Column("progress", JSON, nullable=False),
    Column("telemetry", JSON, nullable=False),
    Column("event_seq", Integer, nullable=False, default=0),
    Column("log_seq", Integer, nullable=False, default=0),
    Index("jobs_by_state", "state", "number"),
    sqlite_autoincrement=True,
)

events = Table(
    "events",
    metadata,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("epoch", Integer),
    Column("number", Integer),
    Column("time", Float, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("message", Text, nullable=False),
    Column("severity", String(16), nullable=False),
    Column("data", JSON, nullable=False),
    Column("state", String(16)),
    UniqueConstraint("job_id", "epoch", "number"),
)

logs = Table(
    "logs",
    metadata,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    Column("time", Float, nullable=False),
    Column("worker", Integer, nullable=False),
    Column("stream", String(8), nullable=False),
    Column("text", Text, nullable=False),
    UniqueConstraint("job_id", "epoch", "number"),
)

heartbeats = Table(
    "heartbeats",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("seen_at", Float, nullable=False),
)


def open_database(url: str) -> tuple[Engine, Engine]:
    """Open the database, creating file and tables where they are missing.

    Returns two views of one engine: the first for reading, the second for writing.
    Raises SchemaTooNew where a later version wrote it.
    """
    file = make_url(url).database
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, pool_size=10)
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    writing = engine.execution_options(cadenza_write=True)
    try:
        with writing.begin() as connection:
            _migrate(connection)
    except BaseException:
        engine.dispose()
        raise
    return engine, writing


def _prepare(connection: Any, _record: object) -> None:
    # sqlite3 would begin transactions by itself, and late: _begin does it instead.
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin(connection: Connection) -> None:
    # A writer takes its lock at once: one that read first and then wants to write is refused without waiting
    # when another has written in between.
    writing = connection.get_execution_options().get("cadenza_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")


def _migrate(connection: Connection) -> None:
    schema_version.create(connection, checkfirst=True)
    found = connection.scalar(select(schema_version.c.version))
    if found is None:
        metadata.create_all(connection)
        connection.execute(insert(schema_version).values(version=SCHEMA_VERSION))
    elif found > SCHEMA_VERSION:
        raise SchemaTooNew(found, SCHEMA_VERSION)
