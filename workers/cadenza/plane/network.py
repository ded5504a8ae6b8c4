"""The link of a worker in a job: a control connection to the coordinator, a data connection to each shard."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.codecs import Compressor
from cadenza.plane.congestion import CongestionControlError
from cadenza.plane.connection import Buffer, Connection, Pending
from cadenza.plane.control import CONTROL_TIMEOUT_S, Control, expect
from cadenza.plane.flights import Moments, NetworkFlight, NetworkStream
from cadenza.plane.holdings import Holdings
from cadenza.plane.layout import NUMPY_TYPES, Layout, Slice, as_bytes
from cadenza.plane.link import Arrays, LinkError, Timings
from cadenza.plane.messages import (
    BARRIER_MODES,
    BUCKETS,
    SYNC_BOUNDS_S,
    Answer,
    Done,
    Evaluating,
    Exhausted,
    Finish,
    Finished,
    Join,
    Joined,
    Lease,
    Leased,
    Message,
    Notice,
    Publish,
    Published,
    Ready,
    Report,
    Request,
    SyncPhase,
    Telemetry,
)
from cadenza.plane.observer import LinkObserver
from cadenza.plane.shard_end import Incoming, ShardEnd
from cadenza.plane.transport import connect
from cadenza.plane.turns import Turns, rotation
from cadenza.plane.units import Unit
from cadenza.plane.uplink import Uplink
from cadenza.plane.wire import Identity, ProtocolError, Role

SLACK_S = 30.0
"""How much longer than the coordinator a worker waits, so that the coordinator's better-informed error comes first."""

TELEMETRY_INTERVAL_S = 0.5

MOST_REPLAYED_ROUNDS = 1_024


class NetworkLink:
    """See :class:`cadenza.plane.link.Link`."""

    def __init__(self, control: Control) -> None:
        self.worker = control.worker
        self.timings = Timings()
        self.raw_push_bytes = 0
        self.raw_pull_bytes = 0
        self._control = control
        self._layout: Layout | None = None
        self._joined: Joined | None = None
        self._ends: list[ShardEnd] = []
        self._packed: list[set[int]] = []
        """By shard, units of the next update that travel packed."""
        self._changes: dict[str, NDArray[Any]] = {}
        self._replayed: dict[str, dict[int, NDArray[Any]]] = {}
        """By vector and shard, each of shape [rounds, slice length]."""
        self._phases: dict[SyncPhase, tuple[list[int], float]] = {
            phase: ([0] * BUCKETS, 0.0) for phase in get_args(SyncPhase)
        }
        self._told_at = 0.0
        self._report = LinkObserver()

    @property
    def push_bytes(self) -> int:
        return sum(end.connection.sent_bytes for end in self._ends)

    @property
    def pull_bytes(self) -> int:
        return sum(end.connection.received_bytes for end in self._ends)

    def join(self, layout: Layout, *, node: str, device: str) -> Joined:
        if self._joined is not None:
            raise LinkError(
                "this worker has joined before, and a job trains one model in one session; put all that is to be "
                "trained into one module with one optimizer, or submit a job for each"
            )
        # The coordinator has the deadline for joining, and ends the connection when it has passed.
        joined = self._control.ask(Join(layout, node, device), Joined, timeout_s=24 * 3600.0)
        lengths = {vector.name: vector.length for vector in layout.vectors if vector.role == "parameters"}
        # Gradients that change after they have left are sent again.
        streams = joined.mode == "sync" and joined.overlap != "off"
        self.compressor = Compressor(
            joined.codec, lengths, seed=joined.seed, worker=self.worker, repeatable=streams
        )
        for number, (host, port) in enumerate(joined.shards):
            holdings = Holdings(layout, joined.cut, number)
            end = ShardEnd(number, holdings, self.compressor, joined.seed)
            end.connection = self._connect(end, host, port)
            self._ends.append(end)
        self._uplink = Uplink(joined.congestion_control)
        for end in self._ends:
            try:
                end.lane = self._uplink.add(end.connection)
            except CongestionControlError as error:
                raise LinkError(str(error)) from error
        self._packed = [set() for _ in self._ends]
        self._changes = self._memory_for_changes(layout, joined)
        self._layout, self._joined = layout, joined
        return joined

    def _connect(self, end: ShardEnd, host: str, port: int) -> Connection:
        identity = Identity(Role.WORKER, self.worker, self._control.incarnation)
        peer = f"shard {end.number}"
        try:
            connection = connect(
                host, port, self._control.key, identity, end, peer=peer, timeout_s=CONTROL_TIMEOUT_S
            )
        except ConnectionError as error:
            raise LinkError(str(error)) from error
        end.connection = connection
        self._control.close_with(connection.start())
        return connection

    def _memory_for_changes(self, layout: Layout, joined: Joined) -> dict[str, NDArray[Any]]:
        """Outside sync mode, encoded answers are changes, which count once the round is decided."""
        if joined.mode == "sync" or not self._ends:
            return {}
        holdings = self._ends[0].holdings
        return {
            vector.name: np.zeros(vector.length, NUMPY_TYPES[vector.dtype])
            for vector in layout.vectors
            if holdings.answered_encoded(vector.name, joined.codec)
        }

    def publish(self, vectors: tuple[str, ...], values: Arrays) -> None:
        calls = []
        for end in self._ends:
            parts = self._parts(end, vectors)
            bodies = [as_bytes(piece) for part in parts for piece in part.pieces(values[part.vector])]
            calls.append(end.connection.call(Publish(vectors), bodies))
        for call in calls:
            expect(call, Done, self._answer_timeout_s())

    def ready(self) -> None:
        self._control.ask(Ready(), Done)

    def units(self, vector: str) -> list[Unit]:
        layout, joined = self._job()
        return layout.units(joined.cut, vector)

    def sparse(self, vector: str, numbers: Iterable[int]) -> None:
        for number in numbers:
            shard, position = self._owner(vector, number)
            self._packed[shard].add(position)

    def begin(self, request: Request, values: Arrays, into: Arrays) -> NetworkFlight:
        begun_at = self._take_off()
        incoming = self._await_values(request, into)
        packed = self._take_packed()
        if request.kind == "update":
            calls = self._update(request, values, into, packed)
        else:
            calls = [end.connection.call(request, into=self._whole(end, into)) for end in self._ends]
        return self._flight(request, calls, incoming, begun_at)

    def stream(self, seq: int, base_version: int, values: Arrays, into: Arrays) -> NetworkStream:
        self._take_off()

        def close(request: Request) -> NetworkFlight:
            # What left during the backward pass cost no time.
            begun_at = time.monotonic()
            incoming = self._await_values(request, into)
            calls = [
                end.connection.call(end.telling(request), into=self._whole(end, into)) for end in self._ends
            ]
            return self._flight(request, calls, incoming, begun_at)

        return NetworkStream(seq, base_version, values, self._ends, self._owner, close, self._take_packed)

    def replayed(self, vector: str) -> NDArray[Any]:
        layout, _ = self._job()
        (whole,) = layout.named([vector])
        rows = next(iter(self._replayed[vector].values())).shape[0]
        values = np.empty((rows, whole.length), NUMPY_TYPES[whole.dtype])
        for number, mine in self._replayed[vector].items():
            start = 0
            for piece in self._ends[number].holdings.slices[vector].units:
                values[:, piece.start : piece.stop] = mine[:, start : start + piece.length]
                start += piece.length
        return values

    def lease(self, request: Lease) -> Leased | Exhausted:
        reply = self._control.ask_either(request)
        if not isinstance(reply, Leased | Exhausted):
            raise LinkError(f"the coordinator answered a lease with {type(reply).__name__}")
        return reply

    def evaluating(self) -> None:
        self._control.ask(Evaluating(), Done)

    def report(self, metrics: dict[str, float], steps: int) -> None:
        self._control.tell(Report(metrics, steps))

    def notice(self, notice: Notice) -> None:
        self._control.tell(notice)

    def telemetry(
        self, *, steps: int, samples: int, compute_seconds: float, apply_seconds: float | None
    ) -> None:
        if apply_seconds is not None:
            timings = self.timings
            for phase, seconds in zip(
                self._phases, (timings.send, timings.wait, timings.receive, apply_seconds), strict=True
            ):
                self._observe(phase, seconds)
        now = time.monotonic()
        if apply_seconds is not None and now - self._told_at < TELEMETRY_INTERVAL_S:
            return
        self._told_at = now
        self._control.tell(
            Telemetry(
                steps=steps,
                samples=samples,
                compute_seconds=compute_seconds,
                push_bytes=self.push_bytes,
                pull_bytes=self.pull_bytes,
                raw_push_bytes=self.raw_push_bytes,
                raw_pull_bytes=self.raw_pull_bytes,
                link=self._report.latest,
                phases={phase: (tuple(counts), total) for phase, (counts, total) in self._phases.items()},
            )
        )

    def finish(self) -> bool:
        return self._control.ask(Finish(), Finished).last

    def published(self) -> None:
        self._control.ask(Published(), Done)

    def close(self) -> None:
        """End the data connections; the control connection belongs to whoever made it."""
        for end in self._ends:
            end.connection.close()

    # --- one request ---

    def _job(self) -> tuple[Layout, Joined]:
        assert self._layout is not None, "join comes first"
        assert self._joined is not None, "join comes first"
        return self._layout, self._joined

    def _await_values(self, request: Request, into: Arrays) -> list[Incoming]:
        """Be ready for the answer's values: one that comes to a request which is not open ends the connection."""
        self._replayed = {}
        _, joined = self._job()
        changes = self._changes if joined.mode != "sync" else {}
        incoming = [Incoming(request.seq, into, changes) for _ in self._ends]
        for end, expected in zip(self._ends, incoming, strict=True):
            end.incoming = expected
        return incoming

    def _take_packed(self) -> list[set[int]]:
        packed, self._packed = self._packed, [set() for _ in self._ends]
        return packed

    def _update(
        self, request: Request, values: Arrays, into: Arrays, packed: list[set[int]]
    ) -> list[Pending]:
        """Send an update to every shard: behind a barrier to one other host after another, and then to each its turn."""
        _, joined = self._job()
        turns = Turns() if joined.mode in BARRIER_MODES else None
        calls: dict[int, Pending] = {}
        for end in rotation(self._ends, self.worker + 1):
            in_turn = turns if not end.connection.local else None
            whole = self._whole(end, into)
            calls[end.number] = end.update(request, values, packed[end.number], in_turn, whole)
        return [calls[number] for number in range(len(self._ends))]

    def _take_off(self) -> float:
        """A transfer begins; returns the time."""
        for end in self._ends:
            if end.lane is not None:
                end.lane.begin()
        return time.monotonic()

    def _flight(
        self, request: Request, calls: list[Pending], incoming: list[Incoming], begun_at: float
    ) -> NetworkFlight:
        layout, joined = self._job()
        if request.kind == "update":
            self.raw_push_bytes += _size_bytes(layout, request.vectors)

        def landed(answers: Sequence[Answer], moments: Moments) -> None:
            rounds = len(answers[0].present) if answers[0].content == "gradients" else 1
            self.raw_pull_bytes += rounds * _size_bytes(layout, answers[0].vectors)
            self._report.landed([end.lane for end in self._ends], answers, moments)
            if joined.mode in BARRIER_MODES:
                # Elsewhere nobody knows who else sends at the moment.
                told = [answer.pace_bytes_per_s for answer in answers]
                self._uplink.settle(joined.fan_in, min((pace for pace in told if pace), default=None))

        return NetworkFlight(
            calls,
            incoming,
            begun_at=begun_at,
            timeout_s=self._answer_timeout_s(),
            timings=self.timings,
            landed=landed,
        )

    def _owner(self, vector: str, number: int) -> tuple[int, int]:
        """The shard that owns a unit, and the unit's position among all that travel there."""
        layout, joined = self._job()
        (whole,) = layout.named([vector])
        shard, own = joined.cut.owner(whole, number)
        return shard, self._ends[shard].holdings.position(vector, own)

    # --- whole vectors, of a fetch ---

    def _parts(self, end: ShardEnd, vectors: tuple[str, ...]) -> list[Slice]:
        return [part for name, part in end.holdings.slices.items() if name in vectors]

    def _whole(self, end: ShardEnd, into: Arrays) -> Callable[[Message, int], Sequence[Buffer]]:
        """Where an answer's whole vectors go, of a fetch or where nothing was merged: slices, in layout order."""

        def destination(message: Message, length: int) -> Sequence[Buffer]:
            if not isinstance(message, Answer):
                raise ProtocolError(f"shard {end.number} answered with something unexpected")
            parts = self._parts(end, message.vectors)
            if message.content == "gradients":
                return self._replay_buffers(end.number, parts, len(message.present), length)
            return [as_bytes(piece) for part in parts for piece in part.pieces(into[part.vector])]

        return destination

    def _replay_buffers(self, number: int, parts: list[Slice], rounds: int, length: int) -> list[Buffer]:
        if rounds > MOST_REPLAYED_ROUNDS:
            raise ProtocolError(f"{rounds} rounds to replay; at most {MOST_REPLAYED_ROUNDS} are expected")
        expected = rounds * sum(part.size_bytes for part in parts)
        if length != expected:
            raise ProtocolError(
                f"shard {number} sends {length} bytes for {rounds} rounds; {expected} are expected"
            )
        arrays = {part.vector: np.empty((rounds, part.length), NUMPY_TYPES[part.dtype]) for part in parts}
        for vector, array in arrays.items():
            self._replayed.setdefault(vector, {})[number] = array
        buffers = [as_bytes(arrays[part.vector][index]) for index in range(rounds) for part in parts]
        return [buffer for buffer in buffers if buffer.nbytes]

    def _answer_timeout_s(self) -> float:
        _, joined = self._job()
        return joined.round_timeout_s + SLACK_S

    # --- time ---

    def _observe(self, phase: SyncPhase, seconds: float) -> None:
        counts, total = self._phases[phase]
        for index in range(bisect.bisect_left(SYNC_BOUNDS_S, seconds), len(counts)):
            counts[index] += 1
        self._phases[phase] = (counts, total + seconds)


def _size_bytes(layout: Layout, vectors: Iterable[str]) -> int:
    return sum(vector.length * vector.itemsize for vector in layout.named(vectors))
