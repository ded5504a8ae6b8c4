"""The job store: what users want, what became of it, and the guard over every job's lifecycle.

A move is one ``UPDATE … WHERE state IN (legal predecessors)`` with its event in the same transaction, so that
of two writers one wins and the other is told. All methods are synchronous and may be called from any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from sqlalchemy import Connection, Row, Select, func, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from cadenza.spec import JobSpec
from cadenza_service.jobs import journal, rows, tables
from cadenza_service.jobs.lifecycle import (
    TERMINAL,
    WAITING,
    WITHOUT_REASON,
    IllegalTransition,
    JobState,
    predecessors,
)
from cadenza_service.jobs.records import (
    Desired,
    IdempotencyConflict,
    Job,
    JobEnded,
    JobNotFound,
    Latest,
    Page,
    Reason,
    StaleEpoch,
    StoredEvent,
    StoredLog,
)
from cadenza_service.settings import Settings
from cadenza_service.snapshot import JobSnapshot, Severity

CONTROLLER = "controller"

_jobs = tables.jobs.c
_RUNNABLE = frozenset(JobState) - TERMINAL


class Store:
    """One open job store."""

    def __init__(
        self, url: str, *, log_lines_kept: int = 10_000, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the SQLite file that ``url`` names, creating it if needed. Raises SchemaTooNew."""
        self._reading, self._writing = tables.open_database(url)
        self._log_lines_kept = log_lines_kept
        self._clock = clock

    @classmethod
    def open(cls, settings: Settings) -> Store:
        """Open the store that the settings name."""
        return cls(settings.database_url, log_lines_kept=settings.log_lines_kept)

    def close(self) -> None:
        """Close every connection; the store is of no use afterwards."""
        self._reading.dispose()

    # Jobs: creating and reading

    def create(self, spec: JobSpec, *, idempotency_key: str | None = None) -> tuple[Job, bool]:
        """Store a new job in QUEUED; returns it, and whether it is new.

        The same key with the same spec returns the first job. Raises IdempotencyConflict for another spec.
        """
        now = self._clock()
        row = rows.new_job(spec, idempotency_key, now)
        with self._writing.begin() as connection:
            fresh = upsert(tables.jobs).values(row).on_conflict_do_nothing(index_elements=["idempotency_key"])
            created = connection.execute(fresh).rowcount == 1
            if created:
                journal.append_event(
                    connection,
                    row["id"],
                    time=now,
                    kind="state",
                    message="the job was accepted",
                    state=JobState.QUEUED,
                )
                return _read(connection, row["id"]), True
            first = rows.job_of(
                connection.execute(select(tables.jobs).where(_jobs.idempotency_key == idempotency_key)).one()
            )
        if first.spec != spec:
            raise IdempotencyConflict(str(idempotency_key), first.id)
        return first, False

    def job(self, job_id: str) -> Job:
        """The job. Raises JobNotFound."""
        with self._reading.begin() as connection:
            return _read(connection, job_id)

    def jobs(self, state: JobState | None = None, limit: int = 50, cursor: str | None = None) -> Page[Job]:
        """A page of jobs, newest first. Raises InvalidCursor."""
        query = select(tables.jobs).order_by(_jobs.number.desc()).limit(limit + 1)
        if state is not None:
            query = query.where(_jobs.state == state)
        if cursor is not None:
            query = query.where(_jobs.number < rows.decode_cursor(cursor))
        with self._reading.begin() as connection:
            found = connection.execute(query).all()
        more = len(found) > limit
        return Page(
            items=[rows.job_of(row) for row in found[:limit]],
            next_cursor=rows.encode_cursor(found[limit - 1].number) if more else None,
        )

    def counts(self) -> dict[JobState, int]:
        """How many jobs there are in each state; every state is in it."""
        query = select(_jobs.state, func.count()).group_by(_jobs.state)
        with self._reading.begin() as connection:
            found = {JobState(state): count for state, count in connection.execute(query)}
        return {state: found.get(state, 0) for state in JobState}

    def unfinished(self) -> list[Job]:
        """Every job that has not ended, oldest first."""
        return self._all(select(tables.jobs).where(_jobs.state.in_(_RUNNABLE)).order_by(_jobs.number))

    def active_since(self, moment: float) -> list[Job]:
        """Every job that has not ended, or ended at ``moment`` or later; oldest first."""
        recent = _jobs.state.in_(_RUNNABLE) | (_jobs.finished_at >= moment)
        return self._all(select(tables.jobs).where(recent).order_by(_jobs.number))

    def _all(self, query: Select[Any]) -> list[Job]:
        with self._reading.begin() as connection:
            return [rows.job_of(row) for row in connection.execute(query)]

    # Jobs: moving

    def move(
        self,
        job_id: str,
        to: JobState,
        reason: Reason | None = None,
        *,
        message: str,
        severity: Severity = "info",
        data: Mapping[str, Any] | None = None,
    ) -> Job:
        """Move the job to another state, with an event of kind ``state``.

        ``reason`` is needed for every state but RUNNING and SUCCEEDED, which have none.
        Raises IllegalTransition where the job is not in a legal predecessor, and JobNotFound.
        """
        if (reason is None) is not (to in WITHOUT_REASON):
            raise ValueError(
                f"reason: a move to {to} needs {'none' if to in WITHOUT_REASON else 'one'}, got {reason}"
            )
        with self._writing.begin() as connection:
            self._move(connection, job_id, to, reason, message=message, severity=severity, data=data)
            return _read(connection, job_id)

    def _move(
        self,
        connection: Connection,
        job_id: str,
        to: JobState,
        reason: Reason | None,
        *,
        message: str,
        severity: Severity = "info",
        data: Mapping[str, Any] | None = None,
    ) -> None:
        now = self._clock()
        changes: dict[Any, Any] = {
            _jobs.state: to,
            _jobs.reason: rows.reason_row(reason),
            _jobs.updated_at: now,
        }
        if to is JobState.RUNNING:
            changes[_jobs.started_at] = func.coalesce(_jobs.started_at, now)
        if to in TERMINAL:
            changes[_jobs.finished_at] = now
        guarded = (
            update(tables.jobs).where(_jobs.id == job_id, _jobs.state.in_(predecessors(to))).values(changes)
        )
        if connection.execute(guarded).rowcount == 0:
            raise IllegalTransition(job_id, _state(connection, job_id), to)
        journal.append_event(
            connection,
            job_id,
            time=now,
            kind="state",
            message=message,
            severity=severity,
            data=data,
            state=to,
        )

    def explain(self, job_id: str, reason: Reason) -> None:
        """Replace the reason of a job that stays in its state; an event only where code or message are new.

        Raises IllegalTransition for a job in a state without a reason or at its end, and JobNotFound.
        """
        now = self._clock()
        with self._writing.begin() as connection:
            job = _read(connection, job_id)
            if job.state in WITHOUT_REASON or job.state in TERMINAL:
                raise IllegalTransition(job_id, job.state, job.state)
            changes = {_jobs.reason: rows.reason_row(reason), _jobs.updated_at: now}
            connection.execute(update(tables.jobs).where(_jobs.id == job_id).values(changes))
            if job.reason is None or (job.reason.code, job.reason.message) != (reason.code, reason.message):
                told = {"code": reason.code, "remedy": reason.remedy, "details": dict(reason.details)}
                journal.append_event(
                    connection, job_id, time=now, kind="reason", message=reason.message, data=told
                )

    def cancel(self, job_id: str) -> Job:
        """Ask for the job's end; repeating it changes nothing.

        A job that holds no resources is CANCELLED at once, any other gets ``desired == "cancelled"`` for the
        controller to act on. Raises JobEnded for SUCCEEDED and FAILED, and JobNotFound.
        """
        with self._writing.begin() as connection:
            job = _read(connection, job_id)
            if job.state in TERMINAL - {JobState.CANCELLED}:
                raise JobEnded(job_id, job.state)
            if job.desired == "run":
                self._want_cancelled(connection, job_id)
            if job.state in WAITING:
                reason = Reason(code="cancelled_by_user", message="cancelled before it started")
                self._move(connection, job_id, JobState.CANCELLED, reason, message=reason.message)
            return _read(connection, job_id)

    def _want_cancelled(self, connection: Connection, job_id: str) -> None:
        now = self._clock()
        wanted: Desired = "cancelled"
        changes = {_jobs.desired: wanted, _jobs.updated_at: now}
        connection.execute(update(tables.jobs).where(_jobs.id == job_id).values(changes))
        journal.append_event(
            connection, job_id, time=now, kind="cancel_requested", message="a user asked for the job's end"
        )

    # Attempts: what runs tells what happens

    def begin_attempt(self, job_id: str) -> int:
        """Issue the next epoch, from 1; writers of all earlier ones are refused from now on. Raises JobNotFound."""
        raised = update(tables.jobs).where(_jobs.id == job_id).values({_jobs.epoch: _jobs.epoch + 1})
        with self._writing.begin() as connection:
            epoch: int | None = connection.scalar(raised.returning(_jobs.epoch))
        if epoch is None:
            raise JobNotFound(job_id)
        return epoch

    def record(self, job_id: str, epoch: int, snapshot: JobSnapshot) -> None:
        """Store what an attempt tells: progress, telemetry, and those events and log lines that are new.

        Sending it again changes nothing. A job that has ended takes it too, for its last lines.
        Raises StaleEpoch for an attempt that has been replaced, and JobNotFound.
        """
        changes = {
            _jobs.progress: snapshot.progress.model_dump(),
            _jobs.telemetry: snapshot.telemetry.model_dump(),
            _jobs.updated_at: self._clock(),
        }
        guarded = update(tables.jobs).where(_jobs.id == job_id, _jobs.epoch == epoch).values(changes)
        with self._writing.begin() as connection:
            if connection.execute(guarded).rowcount == 0:
                _refuse_epoch(connection, job_id, epoch)
            journal.append_events(connection, job_id, epoch, snapshot.events)
            journal.append_logs(connection, job_id, epoch, snapshot.logs, kept=self._log_lines_kept)

    def add_event(
        self,
        job_id: str,
        kind: str,
        message: str,
        severity: Severity = "info",
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Append an event that the control plane itself has to tell. Raises JobNotFound."""
        with self._writing.begin() as connection:
            _state(connection, job_id)
            journal.append_event(
                connection,
                job_id,
                time=self._clock(),
                kind=kind,
                message=message,
                severity=severity,
                data=data,
            )

    # Followers

    def events(self, job_id: str, after: int = 0, limit: int = 500) -> list[StoredEvent]:
        """The job's events with a higher ``seq`` than ``after``, in order. Raises JobNotFound."""
        return [rows.event_of(row) for row in self._after(tables.events, job_id, after, limit)]

    def logs(self, job_id: str, after: int = 0, limit: int = 500) -> list[StoredLog]:
        """The job's log lines with a higher ``seq`` than ``after``, in order. Raises JobNotFound."""
        return [rows.log_of(row) for row in self._after(tables.logs, job_id, after, limit)]

    def _after(self, table: Any, job_id: str, after: int, limit: int) -> list[Row[Any]]:
        query = (
            select(table)
            .where(table.c.job_id == job_id, table.c.seq > after)
            .order_by(table.c.seq)
            .limit(limit)
        )
        with self._reading.begin() as connection:
            _state(connection, job_id)
            return list(connection.execute(query))

    def latest(self, job_id: str) -> Latest:
        """Where the job's events and log lines end, and its state, read together. Raises JobNotFound."""
        found = self.latest_of([job_id])
        if job_id not in found:
            raise JobNotFound(job_id)
        return found[job_id]

    def latest_of(self, job_ids: Collection[str]) -> dict[str, Latest]:
        """The same for several jobs in one query, so that followers of many cost no more than one."""
        query = select(_jobs.id, _jobs.event_seq, _jobs.log_seq, _jobs.state).where(_jobs.id.in_(job_ids))
        with self._reading.begin() as connection:
            return {
                row.id: Latest(event_seq=row.event_seq, log_seq=row.log_seq, state=JobState(row.state))
                for row in connection.execute(query)
            }

    # The controller's sign of life

    def heartbeat(self) -> None:
        """Note that the controller is alive now."""
        row = {"name": CONTROLLER, "seen_at": self._clock()}
        beat = upsert(tables.heartbeats).values(row).on_conflict_do_update(index_elements=["name"], set_=row)
        with self._writing.begin() as connection:
            connection.execute(beat)

    def controller_seen_at(self) -> float | None:
        """When the controller last gave a sign of life; None: never."""
        query = select(tables.heartbeats.c.seen_at).where(tables.heartbeats.c.name == CONTROLLER)
        with self._reading.begin() as connection:
            seen: float | None = connection.scalar(query)
        return seen


def _read(connection: Connection, job_id: str) -> Job:
    row = connection.execute(select(tables.jobs).where(_jobs.id == job_id)).one_or_none()
    if row is None:
        raise JobNotFound(job_id)
    return rows.job_of(row)


def _state(connection: Connection, job_id: str) -> JobState:
    state = connection.scalar(select(_jobs.state).where(_jobs.id == job_id))
    if state is None:
        raise JobNotFound(job_id)
    return JobState(state)


def _refuse_epoch(connection: Connection, job_id: str, epoch: int) -> None:
    current = connection.scalar(select(_jobs.epoch).where(_jobs.id == job_id))
    if current is None:
        raise JobNotFound(job_id)
    if epoch > current:
        raise ValueError(
            f"epoch: {epoch} was never issued for job {job_id}, the latest is {current}; call begin_attempt"
        )
    raise StaleEpoch(job_id, epoch, current)
