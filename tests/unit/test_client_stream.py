"""Following a job: server-sent events, reconnecting, and when to give up."""

from __future__ import annotations

import httpx
import pytest

from cadenza_api.client.client import Client
from cadenza_api.client.errors import ApiError, Unreachable
from cadenza_api.client.event_stream import Message, messages
from tests.unit.fake_service import FakeService, event, problem, sse

PATH = "/v1/jobs/a-1/events"
END = "event: end\ndata: {}\n\n"
HEARTBEAT = ": still here\n\n"


@pytest.fixture
def service() -> FakeService:
    service = FakeService()
    service.add("a-1")
    return service


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def client(service: FakeService, waits: list[float]) -> Client:
    return Client("http://service.test", transport=service.transport, reconnect_s=10, sleep=waits.append)


def followed(client: Client, after: int = 0) -> list[str]:
    return [entry.message for entry in client.events("a-1", after, follow=True)]


def numbered(*numbers: int) -> list[str]:
    return [sse("state", event(number, f"e{number}")) for number in numbers]


def test_events_are_followed_until_the_end(service: FakeService, client: Client, waits: list[float]) -> None:
    service.streams.append([*numbered(1, 2), HEARTBEAT, *numbered(3), END])
    assert followed(client) == ["e1", "e2", "e3"]
    [request] = service.asked("GET", PATH)
    assert (request.headers["accept"], request.headers["last-event-id"]) == ("text/event-stream", "0")
    assert waits == []


def test_a_stream_that_breaks_is_taken_up_after_the_last_event_seen(
    service: FakeService, client: Client, waits: list[float]
) -> None:
    service.streams.append([*numbered(5, 6), httpx.ReadError("reset")])
    service.streams.append([])
    service.streams.append([*numbered(7), "id: 8\ndata: cut off"])
    service.streams.append([*numbered(8), END])
    assert followed(client, after=4) == ["e5", "e6", "e7", "e8"]
    assert [request.headers["last-event-id"] for request in service.asked("GET", PATH)] == [
        "4",
        "6",
        "6",
        "7",
    ]
    assert waits == [0.5, 1.0, 0.5]


def test_an_outage_is_borne_for_a_bounded_time(
    service: FakeService, client: Client, waits: list[float]
) -> None:
    service.faults.extend([None, *[httpx.ConnectError("refused")] * 10])
    with pytest.raises(Unreachable, match="refused"):
        followed(client)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_a_restarting_or_busy_service_is_waited_for(
    service: FakeService, client: Client, waits: list[float]
) -> None:
    service.faults.extend([None, problem(503, "starting"), problem(429, "too many streams")])
    service.streams.append([*numbered(1), END])
    assert followed(client) == ["e1"]
    assert len(waits) == 2


def test_a_refusal_ends_the_following_at_once(
    service: FakeService, client: Client, waits: list[float]
) -> None:
    service.faults.extend([None, problem(401, "the token is wrong")])
    with pytest.raises(ApiError, match="the token is wrong"):
        followed(client)
    assert waits == []


def test_a_job_that_is_not_there_is_told_at_once(
    service: FakeService, client: Client, waits: list[float]
) -> None:
    with pytest.raises(ApiError, match="there is no job 'b-1'"):
        client.logs("b-1", follow=True)
    assert waits == []


def test_a_service_that_was_never_there_is_told_at_once(
    service: FakeService, client: Client, waits: list[float]
) -> None:
    service.faults.append(httpx.ConnectError("refused"))
    with pytest.raises(Unreachable):
        followed(client)
    assert waits == []


def test_messages_as_the_standard_has_them() -> None:
    text = "event: log\nid: 7\ndata: one\ndata:two\n\n: comment\n\ndata\n\nid: 9\n\nretry: 10\ndata: x: y\n\ndata: cut"
    assert list(messages(text.split("\n"))) == [
        Message("log", "one\ntwo", "7"),
        Message(),
        Message("message", "", None),
        Message("message", "", "9"),
        Message("message", "x: y", None),
    ]
    assert [message.is_heartbeat for message in messages([": hi", "", "event: end", ""])] == [True, False]
