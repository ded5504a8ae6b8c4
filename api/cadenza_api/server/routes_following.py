"""Routes of what a job tells: events and log lines, as JSON or as a stream."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from cadenza_api.server.answers import JsonResponse, event_answer, log_answer
from cadenza_api.server.followers import Topic
from cadenza_api.server.services import Given, Services
from cadenza_api.server.sse import FollowResponse, messages, resume_after, wants_stream

ROWS_LIMIT = 1_000

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["following"])

After = Annotated[int, Query(ge=0, lt=2**63, description="Only rows with a higher number.")]
Limit = Annotated[int, Query(ge=1, le=ROWS_LIMIT)]

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {"schema": {"type": "string"}}}}
}


@router.get("/events", responses=STREAMED)
async def events(
    request: Request, given: Given, job_id: str, after: After = 0, limit: Limit = 500
) -> Response:
    """What happened to a job. With ``Accept: text/event-stream`` as it happens, until the job's end."""
    if wants_stream(request):
        return await _stream(request, given, job_id, "events", after)
    rows = await run_in_threadpool(given.store.events, job_id, after, limit)
    return _rows([event_answer(row) for row in rows], after)


@router.get("/logs", responses=STREAMED)
async def logs(request: Request, given: Given, job_id: str, after: After = 0, limit: Limit = 500) -> Response:
    """What a job's workers printed. With ``Accept: text/event-stream`` as they print it, until the job's end."""
    if wants_stream(request):
        return await _stream(request, given, job_id, "logs", after)
    rows = await run_in_threadpool(given.store.logs, job_id, after, limit)
    return _rows([log_answer(row) for row in rows], after)


def _rows(items: list[dict[str, Any]], after: int) -> Response:
    return JsonResponse({"items": items, "next_after": items[-1]["seq"] if items else after})


async def _stream(request: Request, given: Services, job_id: str, topic: Topic, after: int) -> Response:
    after = resume_after(request, after)
    await run_in_threadpool(given.store.latest, job_id)  # An unknown job is a problem, not an empty stream.
    release = given.slots.take(request.headers.get("authorization", "local"))
    return FollowResponse(messages(given.followers, job_id, topic, after), release)
