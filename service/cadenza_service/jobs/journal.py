"""Appending to a job's events and log lines, inside the caller's transaction.

Numbers come from the job's row, so that they have no gaps whatever is sent twice: an entry that an attempt
has already delivered is recognised by its own number within that attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, delete, func, insert, select, update

from cadenza_service.jobs import tables
from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.snapshot import Event, LogLine, Severity

Entry = TypeVar("Entry", Event, LogLine)


def storable(text: str) -> str:
    """The text with what UTF-8 cannot hold (undecodable bytes of a worker's output) replaced by '?'."""
    return text.encode("utf-8", "replace").decode("utf-8")


def append_event(
    connection: Connection,
    job_id: str,
    *,
    time: float,
    kind: str,
    message: str,
    severity: Severity = "info",
    data: Mapping[str, Any] | None = None,
    state: JobState | None = None,
) -> None:
    """Append an event of the control plane's own; the job must exist."""
    row = {
        "job_id": job_id,
        "seq": _reserve(connection, job_id, tables.events, 1) + 1,
        "time": time,
        "kind": kind,
        "message": storable(message),
        "severity": severity,
        "data": dict(data or {}),
        "state": state,
    }
    connection.execute(insert(tables.events), row)


def append_events(connection: Connection, job_id: str, epoch: int, entries: Sequence[Event]) -> None:
    """Append those events of an attempt that are not stored yet."""
    fresh = _unseen(connection, tables.events, job_id, epoch, entries)
    first = _reserve(connection, job_id, tables.events, len(fresh)) + 1
    rows = [
        {
            "job_id": job_id,
            "seq": seq,
            "epoch": epoch,
            **entry.model_dump(),
            "message": storable(entry.message),
        }
        for seq, entry in enumerate(fresh, first)
    ]
    if rows:
        connection.execute(insert(tables.events), rows)


def append_logs(
    connection: Connection, job_id: str, epoch: int, entries: Sequence[LogLine], *, kept: int
) -> None:
    """Append those lines of an attempt that are not stored yet, and delete all but the latest ``kept``."""
    fresh = _unseen(connection, tables.logs, job_id, epoch, entries)
    first = _reserve(connection, job_id, tables.logs, len(fresh)) + 1
    rows = [
        {"job_id": job_id, "seq": seq, "epoch": epoch, **entry.model_dump(), "text": storable(entry.text)}
        for seq, entry in enumerate(fresh, first)
    ]
    if rows:
        connection.execute(insert(tables.logs), rows)
        last = first + len(rows) - 1
        connection.execute(
            delete(tables.logs).where(tables.logs.c.job_id == job_id, tables.logs.c.seq <= last - kept)
        )


def _reserve(connection: Connection, job_id: str, table: Table, count: int) -> int:
    """Take ``count`` sequence numbers; returns the last one before them."""
    counter = tables.jobs.c.event_seq if table is tables.events else tables.jobs.c.log_seq
    raised = update(tables.jobs).where(tables.jobs.c.id == job_id).values({counter: counter + count})
    last: int = connection.execute(raised.returning(counter)).scalar_one()
    return last - count


def _unseen(
    connection: Connection, table: Table, job_id: str, epoch: int, entries: Sequence[Entry]
) -> list[Entry]:
    """The entries without those stored, or stored and since deleted; in the order of their numbers, each once."""
    if not entries:
        return []
    sent = {entry.number: entry for entry in entries}
    mine = (table.c.job_id == job_id) & (table.c.epoch == epoch)
    stored = set(
        connection.scalars(select(table.c.number).where(mine, table.c.number.between(min(sent), max(sent))))
    )
    floor = _deleted_below(connection, table, job_id, epoch)
    return [sent[number] for number in sorted(sent.keys() - stored) if number >= floor]


def _deleted_below(connection: Connection, table: Table, job_id: str, epoch: int) -> int:
    """Numbers below this were stored and deleted again: only a job's oldest lines are, and only if its first is."""
    if connection.scalar(select(func.min(table.c.seq)).where(table.c.job_id == job_id)) in (None, 1):
        return 0
    kept = select(func.min(table.c.number)).where(table.c.job_id == job_id, table.c.epoch == epoch)
    return connection.scalar(kept) or 0
