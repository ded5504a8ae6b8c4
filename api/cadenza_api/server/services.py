"""What the routes work with, held by the app and handed to each route by FastAPI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from cadenza_api.server.followers import Followers
from cadenza_api.server.sse import StreamSlots
from cadenza_service.jobs.storage import Storage
from cadenza_service.jobs.store import Store
from cadenza_service.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Services:
    """One API process's share of the service."""

    store: Store
    storage: Storage
    settings: Settings
    followers: Followers
    slots: StreamSlots
    cluster: Callable[[], dict[str, Any]] | None
    """Tells of nodes and resources; None where the API runs without a cluster."""


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Given = Annotated[Services, Depends(_services)]
