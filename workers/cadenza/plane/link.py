"""What a session needs from its surroundings: one interface, over the network or alone.

:class:`cadenza.plane.network.NetworkLink` speaks to a job's coordinator and shards; :class:`cadenza.training.solo.SoloLink`
runs the same loop in one process without any network, so that a script can be debugged on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.layout import Layout
from cadenza.plane.messages import Answer, Exhausted, Joined, Lease, Leased, Notice, Request
from cadenza.plane.units import Unit

Arrays = Mapping[str, NDArray[np.generic]]
"""Whole vectors by name, one-dimensional, in the vector's own element type (ml_dtypes.bfloat16 for bfloat16)."""


class LinkError(Exception):
    """The job's other side failed, refused, or did not answer in time; the text says who and what to do."""


class Timings:
    """Seconds that the latest flight spent: handing bytes over, waiting for the answer to begin, receiving it."""

    send: float = 0.0
    wait: float = 0.0
    receive: float = 0.0


class Flight(Protocol):
    """A request that every shard was sent, and whose answers are on their way."""

    def landed(self) -> bool:
        """Whether :meth:`result` returns, or raises, without waiting."""

    def result(self) -> Answer:
        """Wait for the answer, whose values are then in the arrays that ``into`` named. May be called again.

        Raises:
            LinkError: a shard was lost or refused, or the round did not end in time.
        """


class Stream(Protocol):
    """An update whose values leave as they become known."""

    def send(self, vector: str, number: int, ready: Callable[[], None] | None = None) -> None:
        """The values of the vector's unit ``number`` are there; they may be sent again until :meth:`close`.

        Thread-safe. ``ready`` is called on another thread before the values are read, and may wait for a device.
        """

    def close(self, request: Request) -> Flight:
        """Send every unit that was not sent yet, and the request itself: the values change no more."""


class Link(Protocol):
    """One worker's connections. Not thread-safe: called from the training thread only, unless said otherwise."""

    worker: int
    """This worker's number, from 0."""

    timings: Timings

    @property
    def push_bytes(self) -> int:
        """Bytes sent to shards so far, frame headers included."""

    @property
    def pull_bytes(self) -> int:
        """Bytes received from shards so far, frame headers included."""

    @property
    def raw_push_bytes(self) -> int:
        """The values that were sent, before the codec."""

    @property
    def raw_pull_bytes(self) -> int:
        """The values that were received, before the codec."""

    def join(self, layout: Layout, *, node: str, device: str) -> Joined:
        """Wait for the job's other workers and connect to the shards.

        Raises:
            LinkError: another worker's model differs, or some worker did not join in time.
        """

    def publish(self, vectors: tuple[str, ...], values: Arrays) -> None:
        """Make ``values`` of the named vectors the shards' state."""

    def ready(self) -> None:
        """Tell the coordinator that the first state is published."""

    def units(self, vector: str) -> list[Unit]:
        """How a vector is cut, in order; known after :meth:`join`."""

    def sparse(self, vector: str, numbers: Iterable[int]) -> None:
        """Of the next update, these units of the vector are mostly zero: they travel packed, without loss."""

    def begin(self, request: Request, values: Arrays, into: Arrays) -> Flight:
        """Send one request to every shard.

        ``values`` holds the vectors of an update (in the vectors' own types), and is empty otherwise. The
        answer's vectors are written into ``into``, but for content ``gradients``: see :meth:`replayed`. ``into`` holds
        the committed values that the worker has, for content ``change``, which is added to them. Until the flight
        has landed nobody else may write to ``values``, or use ``into``. There is one flight at a time.
        """

    def stream(self, seq: int, base_version: int, values: Arrays, into: Arrays) -> Stream:
        """Begin an update whose values are not all known yet; arguments as for :meth:`begin`."""

    def replayed(self, vector: str) -> NDArray[np.generic]:
        """After an answer ``gradients``: the vector's values, shape [rounds, length]."""

    def lease(self, request: Lease) -> Leased | Exhausted:
        """Ask for samples."""

    def evaluating(self) -> None:
        """Say that rounds should go on without this worker until its next exchange."""

    def report(self, metrics: dict[str, float], steps: int) -> None:
        """Pass on what the user reported. Does not wait. Thread-safe."""

    def notice(self, notice: Notice) -> None:
        """Make an event. Does not wait. Thread-safe."""

    def telemetry(
        self, *, steps: int, samples: int, compute_seconds: float, apply_seconds: float | None
    ) -> None:
        """Pass on cumulative figures; ``apply_seconds`` of the latest sync, or none outside one. Cheap, may be dropped."""

    def finish(self) -> bool:
        """Say that this worker takes no more steps; whether it is the last."""

    def published(self) -> None:
        """Tell the coordinator that the last worker has published the rest."""
