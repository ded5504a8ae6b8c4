"""Server-sent events: a job's rows as they come, with a heartbeat while nothing does.

Each message has the row's number as its id, so that a reader resumes with ``Last-Event-ID``. A last message
``end`` comes only when the job has ended and everything was sent; a stream that ends without it goes on at the
next connection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from cadenza_api.server.answers import event_answer, log_answer, to_json
from cadenza_api.server.followers import Followers, FollowingStopped, Topic
from cadenza_api.server.problems import Problem, invalid_request
from cadenza_api.user_errors import FieldProblem
from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.jobs.records import StoredEvent, StoredLog

HEARTBEAT_S = 15
"""A comment when so long nothing was sent: proxies commonly close what is silent for 60 s."""

SEND_TIMEOUT_S = 60
"""A client that takes nothing for so long is gone."""


class StreamSlots:
    """How many streams each client holds open, up to a cap."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._open: Counter[str] = Counter()

    def take(self, client: str) -> Callable[[], None]:
        """Take a slot; returns what gives it back. Raises Problem 429 where the client has none left."""
        if self._open[client] >= self._cap:
            raise Problem(
                429,
                "too_many_streams",
                f"{self._cap} event streams are open already, the limit of one client",
                remedy="close some, read without following, or raise CADENZA_STREAMS_PER_TOKEN",
                headers={"Retry-After": "5"},
            )
        self._open[client] += 1
        return lambda: self._open.subtract([client])


class FollowResponse(EventSourceResponse):
    """A stream that gives its slot back however it ends."""

    def __init__(self, content: AsyncIterator[ServerSentEvent], release: Callable[[], None]) -> None:
        super().__init__(content, ping=HEARTBEAT_S, send_timeout=SEND_TIMEOUT_S, sep="\n")
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()


def wants_stream(request: Request) -> bool:
    """Whether the client asked for server-sent events."""
    return "text/event-stream" in request.headers.get("accept", "")


def resume_after(request: Request, after: int) -> int:
    """The row to go on after: ``Last-Event-ID`` where the client sends it, else ``after``."""
    given = request.headers.get("last-event-id")
    if not given:
        return after
    if not (given.isdecimal() and len(given) <= 18):
        raise invalid_request(
            [FieldProblem("Last-Event-ID", "is not the id of a message", given, "send the last id received")]
        )
    return int(given)


async def messages(
    followers: Followers, job_id: str, topic: Topic, after: int
) -> AsyncIterator[ServerSentEvent]:
    """The stream's messages."""
    try:
        async for item in followers.follow(job_id, topic, after):
            yield _message(item)
    except FollowingStopped:
        return


def _message(item: StoredEvent | StoredLog | JobState) -> ServerSentEvent:
    match item:
        case JobState():
            return ServerSentEvent(to_json({"state": item}), event="end", sep="\n")
        case StoredEvent():
            return ServerSentEvent(to_json(event_answer(item)), event=item.kind, id=str(item.seq), sep="\n")
        case StoredLog():
            return ServerSentEvent(to_json(log_answer(item)), event="log", id=str(item.seq), sep="\n")
