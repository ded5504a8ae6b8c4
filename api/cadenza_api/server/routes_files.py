"""Routes of files: packages of user code in, trained models out."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from cadenza_api.server.answers import JsonResponse, checkpoint_answer
from cadenza_api.server.problems import Problem
from cadenza_api.server.services import Given, Services
from cadenza_service.jobs.lifecycle import TERMINAL
from cadenza_service.jobs.records import Job
from cadenza_service.jobs.storage import Checkpoint, PackageTooLarge

router = APIRouter(tags=["files"])

Digest = Annotated[
    str, Path(pattern="^[0-9a-f]{64}$", description="The sha256 of the zip, in lower-case hex.")
]

ZIP_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.put("/v1/packages/{sha256}", status_code=201, openapi_extra=ZIP_BODY)
async def put_package(request: Request, given: Given, sha256: Digest) -> Response:
    """Upload a job's code as a zip. 201 if it is new, 200 if it was there."""
    limit_bytes = given.settings.package_limit_bytes
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise PackageTooLarge(limit_bytes)
    with await run_in_threadpool(given.storage.receive_package, sha256) as upload:
        async for chunk in request.stream():
            await run_in_threadpool(upload.write, chunk)
        created = await run_in_threadpool(upload.finish)
    return JsonResponse({"sha256": sha256, "working_dir": f"sha256:{sha256}"}, 201 if created else 200)


@router.head("/v1/packages/{sha256}")
def has_package(given: Given, sha256: Digest) -> Response:
    """Whether a package was uploaded: 200 or 404."""
    path = given.storage.package(sha256)
    return Response(headers={"Content-Length": str(path.stat().st_size)}, media_type="application/zip")


@router.get("/v1/jobs/{job_id}/checkpoints")
def checkpoints(given: Given, job_id: str) -> Response:
    """List a job's complete checkpoints, oldest first."""
    job = given.store.job(job_id)
    return JsonResponse(
        {"items": [checkpoint_answer(job.id, found) for found in given.storage.checkpoints(job.id)]}
    )


@router.get(
    "/v1/jobs/{job_id}/checkpoints/{number}/model.safetensors",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
def download(
    given: Given, job_id: str, number: Annotated[str, Path(pattern=r"^(latest|[0-9]{1,9})$")]
) -> FileResponse:
    """Download the weights of a checkpoint, given by its number or ``latest``, as safetensors."""
    job = given.store.job(job_id)
    found = _chosen(given, job, number)
    return FileResponse(
        given.storage.model_path(job.id, found.n),
        media_type="application/octet-stream",
        filename=f"{job.id}-{found.n}.safetensors",
        headers={"ETag": f'"{found.sha256}"', "X-Cadenza-Checkpoint": str(found.n)},
    )


def _chosen(given: Services, job: Job, number: str) -> Checkpoint:
    complete = given.storage.checkpoints(job.id)
    chosen = complete[-1:] if number == "latest" else [found for found in complete if found.n == int(number)]
    if not chosen:
        raise _none_yet(job, number, [found.n for found in complete])
    return chosen[0]


def _none_yet(job: Job, number: str, complete: list[int]) -> Problem:
    wanted = "no checkpoint" if number == "latest" else f"no checkpoint {number}"
    why = f": {job.reason.message}" if job.reason else ""
    if complete:
        remedy = f"choose one of {', '.join(map(str, complete))}, or latest"
    elif job.state in TERMINAL:
        remedy = "the events say what the job came to; submit it again"
    else:
        remedy = "follow the job's events and try again when it has written one"
    return Problem(
        404, "checkpoint_not_found", f"job {job.id} has {wanted}; it is {job.state}{why}", remedy=remedy
    )
