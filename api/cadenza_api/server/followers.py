"""Followers of jobs: many streams, one poller.

Each tick asks the store in one query where all followed jobs stand, and reads each job's new rows once, however
many follow it. A follower that is behind (it has just come, or its client reads slowly) catches up from the
store by itself, and joins the others where their rows are still held.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Literal

from cadenza_service.jobs.lifecycle import TERMINAL, JobState
from cadenza_service.jobs.records import Latest, StoredEvent, StoredLog
from cadenza_service.jobs.store import Store

Topic = Literal["events", "logs"]
FollowedRow = StoredEvent | StoredLog

TICK_S = 0.5
"""How old news may be. One query each; the store itself gets news once a second."""

ROWS_HELD = 1_000
"""Per job and topic; a follower further behind reads from the store."""

ROWS_READ = 500

RECHECK_S = 30.0
"""How long a follower trusts that the poller will wake it, before it looks for itself."""

log = logging.getLogger(__name__)


class FollowingStopped(Exception):
    """The stream ends although the job has not: the service stops, or its store does not answer."""


class _Tail:
    """The latest rows of one job and topic; every row after ``base`` up to ``head`` is held."""

    def __init__(self, head: int) -> None:
        self.base = head
        self.head = head
        self._rows: deque[FollowedRow] = deque()

    def extend(self, rows: Sequence[FollowedRow]) -> None:
        for row in rows:
            self._rows.append(row)
            self.head = row.seq
        while len(self._rows) > ROWS_HELD:
            self.base = self._rows.popleft().seq

    def after(self, seq: int, limit: int) -> list[FollowedRow]:
        newer = (row for row in self._rows if row.seq > seq)
        return list(islice(newer, limit))


class _Followed:
    """A job that someone follows."""

    def __init__(self, latest: Latest) -> None:
        self.latest = latest
        self.followers = 0
        self.tails: dict[Topic, _Tail] = {}
        self.changed = asyncio.Event()

    def wake(self) -> None:
        """Wake all that wait now; those that come later wait for the next time."""
        self.changed.set()
        self.changed = asyncio.Event()


class Followers:
    """All streams of one API process. Use it from one event loop."""

    def __init__(self, store: Store, *, tick_s: float = TICK_S) -> None:
        self._store = store
        self._tick_s = tick_s
        self._jobs: dict[str, _Followed] = {}
        self._poller: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def close(self) -> None:
        """End all streams, and refuse new ones."""
        self._closing.set()
        for followed in self._jobs.values():
            followed.wake()
        if self._poller is not None:
            await self._poller

    async def follow(self, job_id: str, topic: Topic, after: int) -> AsyncIterator[FollowedRow | JobState]:
        """The rows after number ``after`` as they come; at last, when the job has ended, its state.

        Raises JobNotFound, and FollowingStopped where the stream ends before the job.
        """
        latest = await asyncio.to_thread(self._store.latest, job_id)
        with self._following(job_id, topic, latest) as followed:
            while True:
                self._check()
                # Taken before looking: a change between the look and the wait must not be missed.
                changed, latest = followed.changed, followed.latest
                if after < _end(latest, topic):
                    rows = await self._rows(job_id, topic, followed.tails[topic], after)
                    for row in rows:
                        after = row.seq
                        yield row
                    if not rows:  # All of them were deleted.
                        after = _end(latest, topic)
                    continue
                if latest.state in TERMINAL:
                    yield latest.state
                    return
                await _woken(changed)

    @contextmanager
    def _following(self, job_id: str, topic: Topic, latest: Latest) -> Iterator[_Followed]:
        followed = self._jobs.setdefault(job_id, _Followed(latest))
        followed.tails.setdefault(topic, _Tail(_end(followed.latest, topic)))
        followed.followers += 1
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            yield followed
        finally:
            followed.followers -= 1
            if followed.followers == 0 and self._jobs.get(job_id) is followed:
                del self._jobs[job_id]

    def _check(self) -> None:
        if self._closing.is_set():
            raise FollowingStopped("the service is stopping")
        if self._poller is None or self._poller.done():
            raise FollowingStopped("the job store does not answer")

    async def _rows(self, job_id: str, topic: Topic, tail: _Tail, after: int) -> Sequence[FollowedRow]:
        if tail.base <= after < tail.head:
            return tail.after(after, ROWS_READ)
        return await asyncio.to_thread(self._read, job_id, topic, after)

    def _read(self, job_id: str, topic: Topic, after: int) -> Sequence[FollowedRow]:
        if topic == "events":
            return self._store.events(job_id, after, ROWS_READ)
        return self._store.logs(job_id, after, ROWS_READ)

    async def _poll(self) -> None:
        """Bring news until nobody follows anything; a failure ends the poller and so all streams of now."""
        try:
            while self._jobs and not self._closing.is_set():
                await self._tick()
                await _set_within(self._closing, self._tick_s)
        except Exception:
            log.exception("following jobs failed; their streams end, and clients come back")
        finally:
            for followed in self._jobs.values():
                asyncio.get_running_loop().call_soon(followed.wake)

    async def _tick(self) -> None:
        found = await asyncio.to_thread(self._store.latest_of, list(self._jobs))
        for job_id, latest in found.items():
            followed = self._jobs.get(job_id)
            if followed is not None and followed.latest != latest:
                for topic, tail in list(followed.tails.items()):
                    await self._advance(job_id, topic, tail, _end(latest, topic))
                followed.latest = latest
                followed.wake()

    async def _advance(self, job_id: str, topic: Topic, tail: _Tail, end: int) -> None:
        while tail.head < end:
            rows = await asyncio.to_thread(self._read, job_id, topic, tail.head)
            if not rows:  # They were deleted meanwhile.
                return
            tail.extend(rows)


def _end(latest: Latest, topic: Topic) -> int:
    return latest.event_seq if topic == "events" else latest.log_seq


async def _woken(changed: asyncio.Event) -> None:
    await _set_within(changed, RECHECK_S)


async def _set_within(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set, or the time is over."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
