"""A worker's requests on their way to all shards, and their answers on the way back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cadenza.plane.connection import Pending
from cadenza.plane.control import expect
from cadenza.plane.link import Arrays, Flight, LinkError, Timings
from cadenza.plane.messages import Answer, Request
from cadenza.plane.shard_end import Incoming, ShardEnd


class Moments(NamedTuple):
    """Monotonic seconds of one flight, in order."""

    begun_at: float
    sent_at: float
    """When the last byte was handed to the kernel."""
    ended_at: float
    """When the last byte of the answers was there."""


class NetworkFlight:
    """See :class:`cadenza.plane.link.Flight`.

    Args:
        incoming: where each shard's answer goes.
        timeout_s: from now, for the whole round.
        landed: called once with all shards' answers, when they are there.
    """

    def __init__(
        self,
        calls: Sequence[Pending],
        incoming: Sequence[Incoming],
        *,
        begun_at: float,
        timeout_s: float,
        timings: Timings,
        landed: Callable[[Sequence[Answer], Moments], None],
    ) -> None:
        self._calls = calls
        self._incoming = incoming
        self._begun_at = begun_at
        self._deadline = time.monotonic() + timeout_s
        self._timings = timings
        self._landed = landed
        self._answer: Answer | None = None

    def landed(self) -> bool:
        return all(call.done for call in self._calls)

    def result(self) -> Answer:
        if self._answer is None:
            answers = [
                expect(call, Answer, max(self._deadline - time.monotonic(), 0.0)) for call in self._calls
            ]
            self._answer = _agreed(answers)
            if self._answer.content == "change":
                self._add_changes(self._incoming[0])
            self._landed(answers, self._time())
        return self._answer

    def _add_changes(self, incoming: Incoming) -> None:
        for name, change in incoming.changes.items():
            np.add(incoming.into[name], change, out=incoming.into[name])

    def _time(self) -> Moments:
        # A reply can come before the sender thread has noted that its last byte left.
        sent_at = max(call.sent_at or self._begun_at for call in self._calls)
        begun = [
            incoming.begun_at or call.begun_at
            for call, incoming in zip(self._calls, self._incoming, strict=True)
        ]
        answered_at = max(min(begun), sent_at)
        ended_at = max(call.ended_at for call in self._calls)
        self._timings.send = max(sent_at - self._begun_at, 0.0)
        self._timings.wait = answered_at - sent_at
        self._timings.receive = max(ended_at - answered_at, 0.0)
        return Moments(self._begun_at, max(sent_at, self._begun_at), max(ended_at, sent_at, self._begun_at))


def _agreed(answers: Sequence[Answer]) -> Answer:
    first = answers[0]
    if any(answer.note != first.note or answer.content != first.content for answer in answers):
        raise LinkError(
            "the shards answered one request with different rounds; this is a bug, please report it"
        )
    return first


class NetworkStream:
    """See :class:`cadenza.plane.link.Stream`."""

    def __init__(
        self,
        seq: int,
        base_version: int,
        values: Arrays,
        ends: Sequence[ShardEnd],
        owner: Callable[[str, int], tuple[int, int]],
        close: Callable[[Request], Flight],
        packed: Callable[[], Sequence[set[int]]],
    ) -> None:
        """
        Args:
            owner: gives the shard that owns a vector's unit, and the unit's position there.
            close: sends the request itself.
            packed: by shard, the positions that travel packed; asked for once, at the end.
        """
        self._seq = seq
        self._turn = base_version
        self._values = values
        self._ends = ends
        self._owner = owner
        self._close = close
        self._packed = packed
        self._sent: list[set[int]] = [set() for _ in ends]

    def send(self, vector: str, number: int, ready: Callable[[], None] | None = None) -> None:
        shard, position = self._owner(vector, number)
        end = self._ends[shard]
        self._sent[shard].add(position)
        end.connection.stream(end.frames(self._seq, self._turn, self._values, (position,), ready=ready))

    def close(self, request: Request) -> Flight:
        for end, sent, zeros in zip(self._ends, self._sent, self._packed(), strict=True):
            left = [position for position in range(len(end.holdings.places)) if position not in sent]
            if left:
                end.connection.stream(end.frames(self._seq, self._turn, self._values, left, zeros))
        return self._close(request)
