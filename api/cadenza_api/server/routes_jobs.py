"""Routes of jobs: create, list, show, cancel."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from starlette.responses import Response

from cadenza.spec import JobSpec
from cadenza_api.server.answers import JsonResponse, job_answer
from cadenza_api.server.body import WORKING_DIR, read_spec
from cadenza_api.server.problems import Problem
from cadenza_api.server.services import Given
from cadenza_api.user_errors import FieldProblem
from cadenza_api.views import JobView
from cadenza_service.jobs.lifecycle import TERMINAL, JobState
from cadenza_service.jobs.storage import PackageNotFound, Storage

PAGE_LIMIT = 200

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

SPEC_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/JobSpec"}}},
    }
}
"""The body is read by ``read_spec``, which is stricter than the framework; this is for the documentation."""


@router.post("", status_code=201, openapi_extra=SPEC_BODY, responses={201: {"model": JobView}})
def create(
    given: Given,
    spec: Annotated[JobSpec, Depends(read_spec)],
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Response:
    """Submit a job. With an ``Idempotency-Key``, sending it again returns the first job with status 200."""
    _check_package(given.storage, spec)
    job, created = given.store.create(spec, idempotency_key=idempotency_key)
    return JsonResponse(job_answer(job), 201 if created else 200, {"Location": f"/v1/jobs/{job.id}"})


def _check_package(storage: Storage, spec: JobSpec) -> None:
    digest = spec.runtime_env.package
    if digest is None:
        return
    try:
        storage.package(digest)
    except PackageNotFound as error:
        field = FieldProblem(
            WORKING_DIR,
            "was not uploaded",
            spec.runtime_env.working_dir,
            f"PUT the zip to /v1/packages/{digest} first",
        )
        raise Problem(409, "package_missing", str(error), errors=[field]) from None


@router.get("")
def list_jobs(
    given: Given,
    state: JobState | None = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_LIMIT)] = 50,
    cursor: str | None = None,
) -> Response:
    """List jobs, newest first; ``next_cursor`` leads to the next page, null on the last."""
    page = given.store.jobs(state, limit, cursor)
    return JsonResponse({"items": [job_answer(job) for job in page.items], "next_cursor": page.next_cursor})


@router.get("/{job_id}", responses={200: {"model": JobView}})
def show(given: Given, job_id: str) -> Response:
    """Show a job: state and its reason, progress, workers, the decision in force."""
    return JsonResponse(job_answer(given.store.job(job_id)))


@router.post("/{job_id}/cancel", status_code=202, responses={202: {"model": JobView}})
def cancel(given: Given, job_id: str) -> Response:
    """Ask for a job's end: 202 while its processes stop, 200 once it is CANCELLED. Repeating does no harm."""
    job = given.store.cancel(job_id)
    return JsonResponse(job_answer(job), 200 if job.state in TERMINAL else 202)
