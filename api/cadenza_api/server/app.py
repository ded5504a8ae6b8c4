"""The REST API as a plain FastAPI app: it needs a store, a storage and settings, and no cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from cadenza.spec import JobSpec
from cadenza_api.server import problems, routes_files, routes_following, routes_jobs, routes_operations
from cadenza_api.server.followers import TICK_S, Followers
from cadenza_api.server.guard import Guard
from cadenza_api.server.services import Services
from cadenza_api.server.sse import StreamSlots
from cadenza_service.jobs.storage import Storage
from cadenza_service.jobs.store import Store
from cadenza_service.settings import Settings

TITLE = "Cadenza"
API_VERSION = "1"
SCHEMAS = "#/components/schemas/{model}"


def create_app(
    store: Store,
    storage: Storage,
    settings: Settings,
    *,
    cluster: Callable[[], dict[str, Any]] | None = None,
    tick_s: float = TICK_S,
) -> FastAPI:
    """The app over an open store; closing the store stays with the caller.

    ``cluster`` answers ``GET /v1/cluster``; ``tick_s`` is how often followed jobs are looked at.
    """
    services = Services(
        store=store,
        storage=storage,
        settings=settings,
        followers=Followers(store, tick_s=tick_s),
        slots=StreamSlots(settings.streams_per_token),
        cluster=cluster,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await services.followers.close()

    app = FastAPI(title=TITLE, version=API_VERSION, redoc_url=None, lifespan=lifespan)
    app.state.services = services
    app.add_middleware(Guard, settings=settings)
    problems.install(app)
    for routes in (routes_jobs, routes_following, routes_files, routes_operations):
        app.include_router(routes.router)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The description of the API, with the job spec, which the routes read by themselves."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        spec = JobSpec.model_json_schema(ref_template=SCHEMAS)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(spec.pop("$defs", {}) | {"JobSpec": spec})
        app.openapi_schema = document
    return app.openapi_schema
