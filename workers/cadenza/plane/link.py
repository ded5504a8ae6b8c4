"""What a session needs from its surroundings: one interface, over the network or alone.

:class:`cadenza.plane.network.NetworkLink` speaks to a job's coordinator and shards; :class:`cadenza.training.solo.SoloLink`
runs the same loop in one process without any network, so that a script can be debugged on a laptop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.layout import Layout
from cadenza.plane.messages import Answer, Exhausted, Joined, Lease, Leased, Notice, Request

Arrays = Mapping[str, NDArray[np.generic]]
"""Whole vectors by name, one-dimensional, in the vector's own element type (ml_dtypes.bfloat16 for bfloat16)."""


class LinkError(Exception):
    """The job's other side failed, refused, or did not answer in time; the text says who and what to do."""


class Timings:
    """Seconds that the latest exchange spent: handing bytes over, waiting for the answer to begin, receiving it."""

    send: float = 0.0
    wait: float = 0.0
    receive: float = 0.0


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

    def exchange(self, request: Request, values: Arrays, into: Arrays) -> Answer:
        """Send one request to every shard and wait for its answer.

        ``values`` holds the vectors of an update (in the vectors' own types), and is empty otherwise. The
        answer's vectors are written into ``into``, but for content ``gradients``: see :meth:`replayed`.

        Raises:
            LinkError: a shard was lost or refused, or the round did not end in time.
        """

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
