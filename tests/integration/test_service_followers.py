"""The service as its users run it: a process of its own, with the API on Serve."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

TOKEN = "a-token-for-clients"
FOLLOWERS = 50
START_S = 180.0
STOP_S = 60.0
ANSWER_S = 30.0

IMPOSSIBLE = {"name": "wide", "entrypoint": "train:main", "workers": {"min": 1, "cpus": 10_000}}
"""A job that waits for ever: no cluster here is large enough."""


@dataclass
class Running:
    """The service's process."""

    process: subprocess.Popen[str]

    @cached_property
    def url(self) -> str:
        """Where it answers; waits until it is ready."""
        return str(json.loads(first_line(self.process))["url"])

    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=ANSWER_S, trust_env=False
        )


@contextmanager
def service(home: Path, folder: Path, **variables: str) -> Iterator[Running]:
    """Run the service, and at the latest at the end of the block stop it."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {
        "CADENZA_HOME": str(home),
        "CADENZA_PORT": "0",
        "CADENZA_TOKEN": TOKEN,
        "RAY_AUTH_MODE": "token",
        **variables,
    }
    with (home.with_suffix(".log")).open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cadenza_api.server.deploy"],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield Running(process)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(STOP_S)


@contextmanager
def ending(running: Running) -> Iterator[None]:
    """What the block does ends the service, in order and with all its processes."""
    family = descendants(running.process.pid)
    yield
    assert running.process.wait(STOP_S) == 0
    assert_gone(family)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_S)
    assert ready, "the service printed nothing in time"
    line = process.stdout.readline()
    assert line, "the service ended before it was ready"
    return line


def descendants(pid: int) -> dict[int, str]:
    """The processes below ``pid``, with the time at which each began: a number may be given to another later."""
    parents = {
        int(entry.name): stat_fields(int(entry.name))
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal()
    }
    found: dict[int, str] = {}
    level = {pid}
    while level:
        level = {child for child, fields in parents.items() if fields and int(fields[1]) in level}
        found |= {child: parents[child][19] for child in level}
    return found


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat after the name: state, parent, …; none where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def assert_gone(family: dict[int, str], within_s: float = 20.0) -> None:
    assert len(family) > 3, "Ray's processes were not seen"
    deadline = time.monotonic() + within_s
    left = family
    while left and time.monotonic() < deadline:
        left = {pid: began for pid, began in left.items() if lives(pid, began)}
        time.sleep(0.05)
    names = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in left}
    assert not left, f"processes remain: {names}"


def lives(pid: int, began: str) -> bool:
    fields = stat_fields(pid)
    return bool(fields) and fields[19] == began and fields[0] != "Z"


def create(client: httpx.Client, **more: Any) -> str:
    answer = client.post("/v1/jobs", json=IMPOSSIBLE | more)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def follow(client: httpx.AsyncClient, job_id: str, seen: asyncio.Queue[str]) -> str:
    """Read a stream to its end, noting each message; returns the last one's name."""
    last = ""
    async with client.stream(
        "GET", f"/v1/jobs/{job_id}/events", headers={"Accept": "text/event-stream"}
    ) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                last = line.removeprefix("event: ")
                seen.put_nowait(last)
    return last


async def hold_followers(running: Running, job_id: str) -> None:
    """With many streams open, everything else is answered; then the job's end reaches all of them."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=running.url, headers=headers, limits=limits, timeout=ANSWER_S, trust_env=False
    ) as client:
        queues: list[asyncio.Queue[str]] = [asyncio.Queue() for _ in range(FOLLOWERS)]
        streams = [asyncio.ensure_future(follow(client, job_id, queue)) for queue in queues]
        for queue in queues:
            assert await asyncio.wait_for(queue.get(), ANSWER_S) == "state"
        answers = await asyncio.gather(*(client.get("/v1/jobs") for _ in range(20)))
        assert [answer.status_code for answer in answers] == [200] * 20
        assert not any(stream.done() for stream in streams)
        assert (await client.post(f"/v1/jobs/{job_id}/cancel")).status_code == 200
        ends = await asyncio.wait_for(asyncio.gather(*streams), ANSWER_S)
        assert ends == ["end"] * FOLLOWERS


def read_until_closed(response: httpx.Response) -> list[str]:
    return [line for line in response.iter_lines() if line.startswith("event: ")]


def test_the_service_from_start_to_start(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "empty"
    folder.mkdir()
    with service(home, folder) as running, running.client() as client:
        assert httpx.get(f"{running.url}/v1/jobs", trust_env=False).status_code == 401
        assert client.get("/readyz").json()["status"] == "ready"
        assert client.get("/v1/cluster").json()["nodes"][0]["address"] == "127.0.0.1"
        for pid in descendants(running.process.pid):
            assert TOKEN.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        job_id = create(client)
        asyncio.run(hold_followers(running, job_id))
        # An open stream does not hold the service's end back.
        kept = create(client)
        with client.stream(
            "GET", f"/v1/jobs/{kept}/events", headers={"Accept": "text/event-stream"}
        ) as stream:
            assert stream.status_code == 200
            with ending(running):
                running.process.terminate()
                assert "event: end" not in read_until_closed(stream)
    with service(home, folder) as running, running.client() as client:
        listed = {job["id"]: job["state"] for job in client.get("/v1/jobs").json()["items"]}
        assert listed[job_id] == "CANCELLED"
        assert listed[kept] in ("QUEUED", "UNSCHEDULABLE")
        assert running.process.stdin is not None
        with ending(running):
            running.process.stdin.close()  # As it does when whoever started the service ends.


def test_told_to_stop_while_it_starts_it_leaves_nothing(tmp_path: Path) -> None:
    with service(tmp_path / "home", tmp_path) as running:
        deadline = time.monotonic() + START_S
        while len(descendants(running.process.pid)) < 4:  # Ray's first processes
            assert running.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with ending(running):
            running.process.terminate()


def test_a_taken_port_is_told_in_a_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = os.environ | {"CADENZA_HOME": str(tmp_path / "home"), "CADENZA_PORT": port}
        done = subprocess.run(
            [sys.executable, "-P", "-m", "cadenza_api.server.deploy"],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
        )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert f"port {port}" in line
    assert "CADENZA_PORT" in line
