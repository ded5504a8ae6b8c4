from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from cadenza.spec import JobSpec
from cadenza_api.server import followers as following
from cadenza_api.server.followers import FollowedRow, Followers, FollowingStopped, Topic
from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.jobs.records import JobNotFound, Reason
from cadenza_service.jobs.store import Store
from cadenza_service.snapshot import JobSnapshot, LogLine, Progress, Telemetry
from tests.api_support import SPEC, Api, problem, running_api

STREAM = {"Accept": "text/event-stream"}
DEADLINE_S = 20.0


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api(tmp_path, streams_per_token=2) as api:
        yield api


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path}/jobs.db", log_lines_kept=50)
    yield store
    store.close()


def new_job(store: Store) -> str:
    return store.create(JobSpec.model_validate(SPEC))[0].id


def end(store: Store, job_id: str) -> None:
    store.move(job_id, JobState.FAILED, Reason(code="t", message="testing"), message="failed")


def print_lines(store: Store, job_id: str, epoch: int, first: int, last: int) -> None:
    lines = [
        LogLine(number=n, time=n, worker=0, stream="stdout", text=f"line {n}") for n in range(first, last + 1)
    ]
    store.record(
        job_id, epoch, JobSnapshot(phase="training", progress=Progress(), telemetry=Telemetry(), logs=lines)
    )


def messages(body: str) -> list[dict[str, Any]]:
    found = []
    for block in body.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if fields:
            found.append(fields | {"data": json.loads(fields["data"])})
    return found


class TestJson:
    def test_rows_come_in_pages(self, api: Api) -> None:
        job_id = api.create()
        for number in range(3):
            api.store.add_event(job_id, "note", str(number), data={"n": number})
        path = f"/v1/jobs/{job_id}/events"
        first = api.client.get(path, params={"limit": 2}).json()
        assert [item["seq"] for item in first["items"]] == [1, 2]
        last = api.client.get(path, params={"after": first["next_after"]}).json()
        assert [(item["kind"], item["data"]) for item in last["items"]] == [
            ("note", {"n": 1}),
            ("note", {"n": 2}),
        ]
        assert api.client.get(path, params={"after": last["next_after"]}).json() == {
            "items": [],
            "next_after": 4,
        }

    def test_log_lines(self, api: Api) -> None:
        job_id = api.create()
        print_lines(api.store, job_id, api.store.begin_attempt(job_id), 1, 2)
        (_, line) = api.client.get(f"/v1/jobs/{job_id}/logs").json()["items"]
        assert (line["seq"], line["worker"], line["stream"], line["text"]) == (2, 0, "stdout", "line 2")
        assert line["time"] == "1970-01-01T00:00:02.000+00:00"

    @pytest.mark.parametrize("query", ["after=-1", "limit=0", "limit=1001", "after=99999999999999999999"])
    def test_bad_parameters(self, api: Api, query: str) -> None:
        document = problem(api.client.get(f"/v1/jobs/{api.create()}/events?{query}"), 422, "invalid_request")
        assert document["field"] == query.split("=")[0]


class TestStream:
    """Of ended jobs: their streams end by themselves."""

    def test_all_events_then_the_end(self, api: Api) -> None:
        job_id = api.create()
        api.succeed(job_id)
        answer = api.client.get(f"/v1/jobs/{job_id}/events", headers=STREAM)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, last = messages(answer.text)
        assert [event["id"] for event in events] == ["1", "2", "3", "4"]
        assert [event["data"]["state"] for event in events] == ["QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]
        assert {event["event"] for event in events} == {"state"}
        assert (last["event"], last["data"]) == ("end", {"state": "SUCCEEDED"})

    def test_it_goes_on_where_the_reader_was(self, api: Api) -> None:
        job_id = api.create()
        api.succeed(job_id)
        path = f"/v1/jobs/{job_id}/events"
        resumed = api.client.get(path, headers=STREAM | {"Last-Event-ID": "3"}, params={"after": 1})
        assert [message["event"] for message in messages(resumed.text)] == ["state", "end"]
        assert len(messages(api.client.get(path, headers=STREAM, params={"after": 1}).text)) == 4
        assert len(messages(api.client.get(path, headers=STREAM | {"Last-Event-ID": "99"}).text)) == 1

    def test_logs(self, api: Api) -> None:
        job_id = api.create()
        print_lines(api.store, job_id, api.store.begin_attempt(job_id), 1, 700)
        api.succeed(job_id)
        *lines, last = messages(api.client.get(f"/v1/jobs/{job_id}/logs", headers=STREAM).text)
        assert [line["data"]["text"] for line in lines] == [f"line {n}" for n in range(1, 701)]
        assert {line["event"] for line in lines} == {"log"}
        assert last["event"] == "end"

    @pytest.mark.parametrize("given", ["x", "-1", "1.5", "²", "9" * 30])
    def test_a_strange_id_is_refused(self, api: Api, given: str) -> None:
        headers = {name.encode(): text.encode() for name, text in (STREAM | {"Last-Event-ID": given}).items()}
        answer = api.client.get(f"/v1/jobs/{api.create()}/events", headers=headers)
        assert problem(answer, 422, "invalid_request")["field"] == "Last-Event-ID"

    def test_an_unknown_job_is_a_problem(self, api: Api) -> None:
        problem(api.client.get("/v1/jobs/nothing/events", headers=STREAM), 404, "job_not_found")

    def test_streams_are_capped_and_slots_come_back(self, api: Api) -> None:
        job_id = api.create()
        path = f"/v1/jobs/{job_id}/events"
        with api.client.stream("GET", path, headers=STREAM), api.client.stream("GET", path, headers=STREAM):
            refused = api.client.get(path, headers=STREAM)
            assert problem(refused, 429, "too_many_streams")["remedy"]
            assert refused.headers["retry-after"]
            assert api.client.get(path).status_code == 200
        api.move(job_id, JobState.FAILED)
        for _ in range(3):
            assert messages(api.client.get(path, headers=STREAM).text)[-1]["event"] == "end"


async def collect(followers: Followers, job_id: str, topic: Topic = "events", after: int = 0) -> list[Any]:
    return [item async for item in followers.follow(job_id, topic, after)]


async def take(rows: AsyncIterator[FollowedRow | JobState], count: int) -> list[Any]:
    return [await anext(rows) for _ in range(count)]


class TestFollowers:
    def test_rows_come_as_they_are_written(self, store: Store) -> None:
        async def scenario() -> None:
            followers, job_id = Followers(store, tick_s=0.01), new_job(store)
            rows = followers.follow(job_id, "events", 0)
            assert [row.seq for row in await take(rows, 1)] == [1]
            for number in range(2, 5):
                store.add_event(job_id, "note", str(number))
                assert [row.message for row in await take(rows, 1)] == [str(number)]
            end(store, job_id)
            assert [getattr(row, "seq", row) for row in [row async for row in rows]] == [5, JobState.FAILED]
            await followers.close()

        asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))

    def test_many_followers_cost_one_query_a_tick(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[list[str]] = []
        read: list[int] = []
        latest_of, events = store.latest_of, store.events

        def count_latest(ids: list[str]) -> Any:
            asked.append(list(ids))
            return latest_of(ids)

        def count_events(job_id: str, after: int, limit: int) -> Any:
            read.append(after)
            return events(job_id, after, limit)

        async def scenario() -> None:
            followers, job_id = Followers(store, tick_s=0.01), new_job(store)
            new_job(store)  # Nobody follows this one.
            streams = [followers.follow(job_id, "events", 1) for _ in range(50)]
            tasks = [asyncio.ensure_future(take(stream, 1)) for stream in streams]
            while followers._jobs.get(job_id) is None or followers._jobs[job_id].followers < 50:
                await asyncio.sleep(0)
            monkeypatch.setattr(store, "latest_of", count_latest)
            monkeypatch.setattr(store, "events", count_events)
            store.add_event(job_id, "note", "for all")
            assert [row.message for (row,) in await asyncio.gather(*tasks)] == ["for all"] * 50
            assert read == [1]  # The new row was read once, for all of them.
            assert asked
            assert all(ids == [job_id] for ids in asked)
            for stream in streams:
                await stream.aclose()  # type: ignore[attr-defined]
            await followers.close()

        asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))

    def test_the_poller_stops_with_the_last_follower(self, store: Store) -> None:
        async def scenario() -> None:
            followers, job_id = Followers(store, tick_s=0.01), new_job(store)
            for _ in range(2):
                rows = followers.follow(job_id, "events", 0)
                await take(rows, 1)
                await rows.aclose()  # type: ignore[attr-defined]
                assert followers._poller is not None
                await followers._poller
            assert followers._jobs == {}

        asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))

    def test_a_slow_reader_misses_nothing(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(following, "ROWS_HELD", 3)
        monkeypatch.setattr(following, "ROWS_READ", 4)

        async def scenario() -> None:
            followers, job_id = Followers(store, tick_s=0.01), new_job(store)
            slow, fast = (followers.follow(job_id, "events", 0) for _ in range(2))
            await take(slow, 1)
            await take(fast, 1)
            for number in range(2, 21):
                store.add_event(job_id, "note", str(number))
            assert [row.seq for row in await take(fast, 19)] == list(range(2, 21))
            assert [row.seq for row in await take(slow, 19)] == list(range(2, 21))
            end(store, job_id)
            assert (await collect(followers, job_id, after=20))[-1] is JobState.FAILED
            for rows in (slow, fast):
                await rows.aclose()  # type: ignore[attr-defined]
            await followers.close()

        asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))

    def test_deleted_lines_are_skipped(self, store: Store) -> None:
        async def scenario() -> None:
            followers, job_id = Followers(store, tick_s=0.01), new_job(store)
            epoch = store.begin_attempt(job_id)
            rows = followers.follow(job_id, "logs", 0)
            first = asyncio.ensure_future(anext(rows))
            await asyncio.sleep(0)
            print_lines(store, job_id, epoch, 1, 200)  # 150 of them are gone at once
            assert (await first).seq == 151  # type: ignore[union-attr]
            end(store, job_id)
            rest = [row async for row in rows]
            assert [row.seq for row in rest[:-1]] == list(range(152, 201))  # type: ignore[union-attr]
            await followers.close()

        asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))

    def test_rows_that_are_gone_hold_nobody_up(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        async def scenario() -> None:
            followers, job_id = Followers(store, tick_s=0.01), new_job(store)
            epoch = store.begin_attempt(job_id)
            print_lines(store, job_id, epoch, 1, 2)
            monkeypatch.setattr(store, "logs", lambda *_: [])
            before, after = (asyncio.ensure_future(collect(followers, job_id, "logs", n)) for n in (0, 2))
            while job_id not in followers._jobs or followers._jobs[job_id].followers < 2:
                await asyncio.sleep(0)
            print_lines(store, job_id, epoch, 3, 4)
            end(store, job_id)
            assert await before == await after == [JobState.FAILED]
            await followers.close()

        asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))

    def test_events_and_logs_of_one_job_at_once(self, store: Store) -> None:
        async def scenario() -> None:
            followers, job_id = Followers(store, tick_s=0.01), new_job(store)
            epoch = store.begin_attempt(job_id)
            both = asyncio.gather(collect(followers, job_id, "events"), collect(followers, job_id, "logs"))
            for number in range(1, 6):
                print_lines(store, job_id, epoch, number, number)
                store.add_event(job_id, "note", str(number))
                await asyncio.sleep(0.01)
            end(store, job_id)
            events, logs = await both
            assert [row.seq for row in events[:-1]] == list(range(1, 8))
            assert [row.seq for row in logs[:-1]] == list(range(1, 6))
            await followers.close()

        asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))

    def test_closing_ends_streams_without_an_end(self, store: Store) -> None:
        async def scenario() -> None:
            followers, job_id = Followers(store, tick_s=60), new_job(store)
            rows = followers.follow(job_id, "events", 1)
            waiting = asyncio.ensure_future(anext(rows))
            while job_id not in followers._jobs:
                await asyncio.sleep(0)
            await followers.close()
            with pytest.raises(FollowingStopped, match="stopping"):
                await waiting
            with pytest.raises(FollowingStopped):
                await collect(followers, job_id)

        asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))

    def test_a_store_that_fails_ends_streams_and_the_next_begins_again(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_: object) -> None:
            raise OSError("disk")

        async def scenario() -> None:
            followers, job_id = Followers(store, tick_s=0.01), new_job(store)
            rows = followers.follow(job_id, "events", 0)
            await take(rows, 1)
            with monkeypatch.context() as patch:
                patch.setattr(store, "latest_of", fail)
                with pytest.raises(FollowingStopped, match="does not answer"):
                    await anext(rows)
            end(store, job_id)
            assert (await collect(followers, job_id))[-1] is JobState.FAILED
            await followers.close()

        asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))

    def test_an_unknown_job(self, store: Store) -> None:
        with pytest.raises(JobNotFound):
            asyncio.run(collect(Followers(store), "nothing"))


def test_shutdown_ends_open_streams(tmp_path: Path) -> None:
    with running_api(tmp_path) as api:
        job_id = api.create()

        async def scenario() -> str:
            transport = httpx.ASGITransport(app=api.app)
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(
                    httpx.AsyncClient(transport=transport, base_url=str(api.client.base_url))
                )
                reading = asyncio.ensure_future(client.get(f"/v1/jobs/{job_id}/events", headers=STREAM))
                followers: Followers = api.app.state.services.followers
                while job_id not in followers._jobs:
                    await asyncio.sleep(0.001)
                await followers.close()
                return (await reading).text

        body = asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    assert [message["event"] for message in messages(body)] in ([], ["state"])
