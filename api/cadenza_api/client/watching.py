"""Follows a job to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cadenza_api.client.client import Client
from cadenza_api.client.errors import ApiError, Unreachable
from cadenza_api.client.patience import Patience
from cadenza_api.views import EventView, JobView

INTERVAL_S = 1.0
"""The service stores progress at most once a second, so that asking more often shows nothing new."""


@dataclass(frozen=True)
class Update:
    """A job as it stands, and what has happened since the update before."""

    job: JobView
    events: list[EventView]


def updates(client: Client, job_id: str, tell: Callable[[str], None]) -> Iterator[Update]:
    """One update a second until the job has ended; the last one shows its end and holds all events up to it.

    Outages of the service are borne for ``client.reconnect_s``; ``tell`` hears of them.
    """
    patience = Patience(client.reconnect_s, client.sleep, tell)
    after = 0
    while True:
        try:
            # The job first: the events, read later, then include the one that ended it.
            job = client.job(job_id)
            events = list(client.events(job_id, after))
        except (ApiError, Unreachable) as error:
            patience.bear(error)
            continue
        patience.succeeded()
        after = events[-1].seq if events else after
        yield Update(job, events)
        if job.ended:
            return
        client.sleep(INTERVAL_S)
