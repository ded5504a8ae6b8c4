"""The Python client of Cadenza's REST API.

>>> with Client("http://127.0.0.1:8000") as client:
...     job = client.submit(spec)
...     for event in client.events(job.id, follow=True):
...         print(event.message)
...     client.download_model(job.id, Path("model.safetensors"))

Every method raises :class:`ApiError` for a problem that the service reports and :class:`Unreachable` if it
does not answer; both print as plain sentences. Every request has a deadline.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from cadenza.spec import JobSpec
from cadenza_api.client.address import DEFAULT_URL, checked
from cadenza_api.client.errors import ApiError, Unreachable, raise_for_problem
from cadenza_api.client.event_stream import Message, messages
from cadenza_api.client.packaging import Package, describe, packed
from cadenza_api.client.patience import Patience
from cadenza_api.user_errors import UserError
from cadenza_api.views import Answer, CheckpointView, EventView, JobView, LogView
from cadenza_service.loopback import is_loopback

CONNECT_TIMEOUT_S = 5.0
STREAM_SILENCE_S = 60.0
"""An event stream without even a heartbeat for so long is dead; several heartbeats fit in."""

PAGE_LIMIT = 100
ROWS_LIMIT = 500

Row = TypeVar("Row", EventView, LogView)
Parsed = TypeVar("Parsed", bound=Answer)


class Client:
    """A connection to one Cadenza service; safe to share between threads."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        reconnect_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``timeout_s`` bounds each read or write of a request; ``reconnect_s`` is how long a follower bears
        an outage. Raises UserError if ``url`` is not an http(s) address."""
        self.url = url.rstrip("/")
        self.reconnect_s = reconnect_s
        self.sleep = sleep
        self._http = httpx.Client(
            base_url=checked(self.url),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
            transport=transport,
            # A proxy from the environment knows nothing of this machine's own addresses.
            trust_env=not is_loopback(httpx.URL(self.url).host),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def submit(self, spec: JobSpec, *, idempotency_key: str | None = None) -> JobView:
        """Create a job; the same key with the same spec returns the job that it made the first time."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        body = spec.model_dump(mode="json", exclude_unset=True)
        return self._parsed(JobView, self._request("POST", "/v1/jobs", json=body, headers=headers))

    def jobs(self, state: str | None = None, limit: int = 50) -> list[JobView]:
        """The newest ``limit`` jobs, newest first."""
        return list(islice(self.each_job(state, min(limit, PAGE_LIMIT)), limit))

    def each_job(self, state: str | None = None, page_limit: int = PAGE_LIMIT) -> Iterator[JobView]:
        """All jobs, newest first, fetched page by page as they are asked for."""
        query: dict[str, Any] = {"limit": page_limit} | ({"state": state} if state else {})
        while True:
            page = self._object(self._request("GET", "/v1/jobs", params=query))
            yield from (self._model(JobView, item) for item in page["items"])
            if not page.get("next_cursor"):
                return
            query["cursor"] = page["next_cursor"]

    def job(self, job_id: str) -> JobView:
        """One job with its progress."""
        return self._parsed(JobView, self._request("GET", _job_path(job_id)))

    def cancel(self, job_id: str) -> JobView:
        """Ask for a job's end; it is CANCELLED once its processes are gone. Repeating does no harm."""
        return self._parsed(JobView, self._request("POST", f"{_job_path(job_id)}/cancel"))

    def events(self, job_id: str, after: int = 0, *, follow: bool = False) -> Iterator[EventView]:
        """What happened to a job, from the event after number ``after``; with ``follow`` until the job has ended."""
        return self._rows(EventView, job_id, "events", after, follow)

    def logs(self, job_id: str, after: int = 0, *, follow: bool = False) -> Iterator[LogView]:
        """What a job's workers printed, from the line after number ``after``; with ``follow`` until the job has ended."""
        return self._rows(LogView, job_id, "logs", after, follow)

    def upload_package(self, source: Path) -> Package:
        """Upload a folder, or a zip as it is, unless the service has it already."""
        if source.is_dir():
            with packed(source) as package:
                self.put_package(package)
                return package
        package = describe(source)
        self.put_package(package)
        return package

    def put_package(self, package: Package) -> bool:
        """Upload a package; False if the service has it already."""
        path = f"/v1/packages/{package.sha256}"
        if self._send("HEAD", path).is_success:
            return False
        with package.path.open("rb") as body:
            self._request("PUT", path, content=body, headers={"Content-Type": "application/zip"})
        return True

    def checkpoints(self, job_id: str) -> list[CheckpointView]:
        """The complete checkpoints of a job."""
        answer = self._object(self._request("GET", f"{_job_path(job_id)}/checkpoints"))
        return [self._model(CheckpointView, item) for item in answer["items"]]

    def download_model(self, job_id: str, path: Path, number: int | str = "latest") -> int:
        """Write a checkpoint's weights to ``path`` as safetensors; returns their size in bytes.

        The file appears whole or not at all.
        """
        url = f"{_job_path(job_id)}/checkpoints/{number}/model.safetensors"
        with self._reached(), self._http.stream("GET", url) as response:
            _check_stream(response)
            return _write_whole(path, response.iter_bytes(1 << 20))

    def ready(self) -> bool:
        """Whether a service answers and is ready for jobs."""
        try:
            return self._send("GET", "/readyz").status_code == httpx.codes.OK
        except Unreachable:
            return False

    def _rows(self, kind: type[Row], job_id: str, topic: str, after: int, follow: bool) -> Iterator[Row]:
        path = f"{_job_path(job_id)}/{topic}"
        if not follow:
            return self._stored(kind, path, after)
        self.job(job_id)  # A wrong id, or a service that was never there, is told at once and not retried.
        return self._followed(kind, path, after)

    def _stored(self, kind: type[Row], path: str, after: int) -> Iterator[Row]:
        while True:
            query = {"after": after, "limit": ROWS_LIMIT}
            items = self._object(self._request("GET", path, params=query))["items"]
            if not items:
                return
            for item in items:
                row = self._model(kind, item)
                after = row.seq
                yield row

    def _followed(self, kind: type[Row], path: str, after: int) -> Iterator[Row]:
        """Rows as they come. A stream that breaks is taken up again after the last row seen."""
        patience = Patience(self.reconnect_s, self.sleep)
        while True:
            try:
                for message in self._stream(path, after):
                    patience.succeeded()
                    if message.event == "end":
                        return
                    if not message.is_heartbeat:
                        row = self._model(kind, message.data)
                        after = row.seq
                        yield row
                raise Unreachable(self.url, "the event stream ended before the job did")
            except (ApiError, Unreachable) as error:
                patience.bear(error)

    def _stream(self, path: str, after: int) -> Iterator[Message]:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        timeout = httpx.Timeout(self._http.timeout.read, connect=CONNECT_TIMEOUT_S, read=STREAM_SILENCE_S)
        with self._reached(), self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
            _check_stream(response)
            yield from messages(response.iter_lines())

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        response = self._send(method, path, **options)
        raise_for_problem(response)
        return response

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        with self._reached():
            return self._http.request(method, path, **options)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except httpx.RequestError as error:
            raise Unreachable(self.url, str(error) or type(error).__name__) from error

    def _object(self, response: httpx.Response) -> dict[str, Any]:
        try:
            document = response.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Unreachable(self.url, f"{response.url} answers with something else than Cadenza's API")
        return document

    def _parsed(self, kind: type[Parsed], response: httpx.Response) -> Parsed:
        return self._model(kind, self._object(response))

    def _model(self, kind: type[Parsed], document: object) -> Parsed:
        try:
            if isinstance(document, str):
                return kind.model_validate_json(document)
            return kind.model_validate(document)
        except ValidationError as error:
            raise Unreachable(
                self.url, f"its answer does not fit this client: {error.errors()[0]}"
            ) from error


def _check_stream(response: httpx.Response) -> None:
    if not response.is_success:
        response.read()
    raise_for_problem(response)


def _write_whole(path: Path, chunks: Iterator[bytes]) -> int:
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".cadenza-") as scratch:
            part = Path(scratch) / path.name
            with part.open("wb") as file:
                file.writelines(chunks)
            size_bytes = part.stat().st_size
            os.replace(part, path)
            return size_bytes
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file") from error


def _job_path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"
