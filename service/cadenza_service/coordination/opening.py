"""How an attempt opens: every worker joins with the same model, one publishes the first state, all begin.

Pure: no clock, no socket. A *ticket* is whatever answers a worker's join later.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from cadenza.plane.layout import Layout
from cadenza_service.snapshot import Failure

Ticket = TypeVar("Ticket")


class ModelMismatch(Exception):
    """A worker's model differs from the others'."""


class Opening(Generic[Ticket]):
    """The workers that have joined, and what is still missing."""

    def __init__(self, workers: tuple[int, ...], *, join_timeout_s: float, publish_timeout_s: float) -> None:
        self.layout: Layout | None = None
        """The model's layout; none before the first worker has joined."""
        self.publisher: int | None = None
        """The worker whose model is the job's first state, once all have joined."""
        self._workers = workers
        self._join_timeout_s = join_timeout_s
        self._publish_timeout_s = publish_timeout_s
        self._tickets: dict[int, Ticket] = {}
        self._joined: set[int] = set()
        self._first_at = 0.0
        self._all_at = 0.0

    def join(self, worker: int, layout: Layout, ticket: Ticket, now: float) -> bool:
        """A worker joins; whether it is the last.

        Raises:
            ModelMismatch: its model differs; the text names the first difference.
        """
        if self.layout is None:
            self.layout = layout
        elif self.layout != layout:
            raise ModelMismatch(
                f"worker {worker}'s model differs from the others': {self.layout.difference(layout)}; "
                "every worker must build the same model"
            )
        if not self._joined:
            self._first_at = now
        self._joined.add(worker)
        self._tickets[worker] = ticket
        return len(self._joined) == len(self._workers)

    def choose_publisher(self, now: float) -> Ticket:
        """All have joined and the shards are ready: the lowest worker publishes; returns its ticket."""
        self.publisher, self._all_at = min(self._tickets), now
        return self._tickets.pop(self.publisher)

    def take_waiting(self) -> list[Ticket]:
        """The tickets of the workers that still wait for an answer, which are no longer kept."""
        tickets, self._tickets = list(self._tickets.values()), {}
        return tickets

    def overdue(self, now: float) -> Failure | None:
        """Why the job fails because somebody lets the others wait for too long; none while nobody does."""
        if self.publisher is not None:
            return self._publishing_overdue(self.publisher, now - self._all_at)
        missing = [worker for worker in self._workers if worker not in self._joined]
        if not self._joined or not missing:
            return None
        return self._joining_overdue(missing, now - self._first_at)

    def _joining_overdue(self, missing: list[int], waited_s: float) -> Failure | None:
        if waited_s <= self._join_timeout_s:
            return None
        names = ", ".join(f"worker {worker}" for worker in missing)
        return Failure(
            kind="timeout",
            message=f"{names} had not joined {waited_s:.0f} s after the first worker did",
            remedy="call cadenza.join on every worker, or raise CADENZA_JOIN_TIMEOUT_S if getting ready takes so long",
            worker=missing[0],
        )

    def _publishing_overdue(self, publisher: int, waited_s: float) -> Failure | None:
        if waited_s <= self._publish_timeout_s:
            return None
        return Failure(
            kind="timeout",
            message=f"worker {publisher} had not published its model {waited_s:.0f} s after all had joined",
            remedy="see the worker's log; raise CADENZA_ROUND_TIMEOUT_S if sending the model takes so long",
            worker=publisher,
        )
