"""The link of a worker in a job: a control connection to the coordinator, a data connection to each shard."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.codecs import CODECS, as_bytes
from cadenza.plane.connection import Buffer, Connection, NoRequests, Pending, RefusedError
from cadenza.plane.layout import NUMPY_TYPES, Layout, Slice
from cadenza.plane.link import Arrays, LinkError, Timings
from cadenza.plane.messages import (
    BUCKETS,
    SYNC_BOUNDS_S,
    Answer,
    Done,
    Ended,
    Evaluating,
    Exhausted,
    Failed,
    Finish,
    Finished,
    Join,
    Joined,
    Lease,
    Leased,
    Log,
    Message,
    Notice,
    Publish,
    Published,
    Ready,
    Report,
    Request,
    Stream,
    SyncPhase,
    Telemetry,
)
from cadenza.plane.transport import connect
from cadenza.plane.wire import Identity, ProtocolError, Role

CONTROL_TIMEOUT_S = 60.0
"""A control call is one small message each way; a coordinator that needs longer is lost."""

SLACK_S = 30.0
"""How much longer than the coordinator a worker waits, so that the coordinator's better-informed error comes first."""

TELEMETRY_INTERVAL_S = 0.5

MOST_REPLAYED_ROUNDS = 1_024

_Reply = TypeVar("_Reply", bound=Message)


class Control:
    """A worker's connection to the coordinator. Thread-safe."""

    def __init__(self, connection: Connection, worker: int, incarnation: int, key: bytes) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.key = key
        self._connection = connection

    @classmethod
    def connect(
        cls, host: str, port: int, key: bytes, *, worker: int, incarnation: int, timeout_s: float = 10.0
    ) -> Control:
        """Connect to the job's coordinator.

        Raises:
            ConnectionError: it cannot be reached, or refuses; the text says why.
        """
        handler = _EndingOthers()
        identity = Identity(Role.WORKER, worker, incarnation)
        connection = connect(host, port, key, identity, handler, peer="the coordinator", timeout_s=timeout_s)
        control = cls(connection.start(), worker, incarnation, key)
        control._handler = handler
        return control

    _handler: _EndingOthers

    def close_with(self, connection: Connection) -> None:
        """When the coordinator is gone, end ``connection`` too, so that nobody waits on it for a round that cannot come."""
        self._handler.others.append(connection)
        if self._connection.closed:
            connection.close()

    def ask(self, message: Message, reply: type[_Reply], timeout_s: float = CONTROL_TIMEOUT_S) -> _Reply:
        """Send ``message`` and wait for a reply of the given type; raises LinkError."""
        return _expect(self._connection.call(message), reply, timeout_s)

    def ask_either(self, message: Message, timeout_s: float = CONTROL_TIMEOUT_S) -> Message:
        """Send ``message`` and wait for a reply of whatever type; raises LinkError."""
        return _result(self._connection.call(message), timeout_s)

    def tell(self, message: Message) -> None:
        """Send a one-way message; it is lost if the connection ends."""
        self._connection.send(message)

    def failed(self, failure: Failed) -> None:
        """Report that this worker failed, and wait until the report is on its way."""
        self.tell(failure)
        self.flush()

    def log(self, lines: Sequence[tuple[float, Stream, str]]) -> None:
        """Pass printed lines on: seconds since the Unix epoch, stream, text."""
        self.tell(Log(tuple(lines)))

    def notice(
        self, kind: str, message: str, severity: Literal["info", "warning", "error"] = "info", **data: Any
    ) -> None:
        """Make an event."""
        self.tell(Notice(kind, message, severity, data))

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until what was told is handed to the kernel."""
        self._connection.flush(timeout_s)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


class _EndingOthers(NoRequests):
    """Ends the data connections when the control connection ends or the coordinator says that the attempt did."""

    def __init__(self) -> None:
        self.others: list[Connection] = []

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        if not isinstance(message, Ended):
            raise ProtocolError(f"the coordinator sent {type(message).__name__}")
        reason = ConnectionError(f"the job failed: {message.reason}")
        for other in list(self.others):
            other.close(reason)
        connection.close(reason)

    def closed(self, connection: Connection, error: Exception | None) -> None:
        for other in list(self.others):
            other.close(ConnectionError("the connection to the coordinator ended"))


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
        self._shards: list[Connection] = []
        self._replayed: dict[str, dict[int, NDArray[Any]]] = {}
        """By vector and shard, each of shape [rounds, slice length]."""
        self._phases: dict[SyncPhase, tuple[list[int], float]] = {
            phase: ([0] * BUCKETS, 0.0) for phase in get_args(SyncPhase)
        }
        self._told_at = 0.0

    @property
    def push_bytes(self) -> int:
        return sum(shard.sent_bytes for shard in self._shards)

    @property
    def pull_bytes(self) -> int:
        return sum(shard.received_bytes for shard in self._shards)

    def join(self, layout: Layout, *, node: str, device: str) -> Joined:
        if self._joined is not None:
            raise LinkError(
                "this worker has joined before, and a job trains one model in one session; put all that is to be "
                "trained into one module with one optimizer, or submit a job for each"
            )
        # The coordinator has the deadline for joining, and ends the connection when it has passed.
        joined = self._control.ask(Join(layout, node, device), Joined, timeout_s=24 * 3600.0)
        identity = Identity(Role.WORKER, self.worker, self._control.incarnation)
        for number, (host, port) in enumerate(joined.shards):
            try:
                shard = connect(
                    host,
                    port,
                    self._control.key,
                    identity,
                    peer=f"shard {number}",
                    timeout_s=CONTROL_TIMEOUT_S,
                )
            except ConnectionError as error:
                raise LinkError(str(error)) from error
            self._shards.append(shard.start())
            self._control.close_with(shard)
        self._layout, self._joined = layout, joined
        return joined

    def publish(self, vectors: tuple[str, ...], values: Arrays) -> None:
        calls = []
        for number, shard in enumerate(self._shards):
            bodies = [
                as_bytes(values[part.vector][part.start : part.stop])
                for part in self._slices(number, vectors)
            ]
            calls.append(shard.call(Publish(vectors), bodies))
        for call in calls:
            _expect(call, Done, self._answer_timeout_s())

    def ready(self) -> None:
        self._control.ask(Ready(), Done)

    def exchange(self, request: Request, values: Arrays, into: Arrays) -> Answer:
        self._replayed = {}
        begun_at = time.monotonic()
        calls = [self._call(number, request, values, into) for number in range(len(self._shards))]
        answers = [_expect(call, Answer, self._answer_timeout_s()) for call in calls]
        if any(answer.note != answers[0].note or answer.content != answers[0].content for answer in answers):
            raise LinkError(
                "the shards answered one request with different rounds; this is a bug, please report it"
            )
        self._time(begun_at, calls)
        rounds = len(answers[0].present) if answers[0].content == "gradients" else 1
        self.raw_pull_bytes += rounds * self._size_bytes(answers[0].vectors)
        return answers[0]

    def replayed(self, vector: str) -> NDArray[Any]:
        return np.concatenate([piece for _, piece in sorted(self._replayed[vector].items())], axis=1)

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
                phases={phase: (tuple(counts), total) for phase, (counts, total) in self._phases.items()},
            )
        )

    def finish(self) -> bool:
        return self._control.ask(Finish(), Finished).last

    def published(self) -> None:
        self._control.ask(Published(), Done)

    def close(self) -> None:
        """End the data connections; the control connection belongs to whoever made it."""
        for shard in self._shards:
            shard.close()

    # --- one shard ---

    def _slices(self, shard: int, vectors: tuple[str, ...]) -> list[Slice]:
        assert self._layout is not None, "join comes first"
        return self._layout.slices(shard, len(self._shards), vectors)

    def _call(self, number: int, request: Request, values: Arrays, into: Arrays) -> Pending:
        bodies: list[Buffer] = []
        if request.kind == "update":
            codec = CODECS[request.codec]
            parts = self._slices(number, request.vectors)
            bodies = [codec.encode(values[part.vector][part.start : part.stop], part) for part in parts]
            self.raw_push_bytes += sum(part.size_bytes for part in parts)
        return self._shards[number].call(request, bodies, self._destination(number, into))

    def _destination(self, number: int, into: Arrays) -> Callable[[Message, int], Sequence[Buffer]]:
        """Where shard ``number``'s answer goes: its slices of the arrays, in layout order."""

        def destination(message: Message, length: int) -> Sequence[Buffer]:
            if not isinstance(message, Answer) or message.codec != "fp32":
                raise ProtocolError(f"shard {number} answered with something unexpected")
            parts = self._slices(number, message.vectors)
            if message.content == "gradients":
                return self._replay_buffers(number, parts, len(message.present), length)
            buffers = [as_bytes(into[part.vector][part.start : part.stop]) for part in parts]
            return [buffer for buffer in buffers if buffer.nbytes]

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

    def _size_bytes(self, vectors: tuple[str, ...]) -> int:
        assert self._layout is not None, "join comes first"
        return sum(vector.length * vector.itemsize for vector in self._layout.named(vectors))

    def _answer_timeout_s(self) -> float:
        assert self._joined is not None, "join comes first"
        return self._joined.round_timeout_s + SLACK_S

    # --- time ---

    def _time(self, begun_at: float, calls: list[Pending]) -> None:
        # A reply can come before the sender thread has noted that its last byte left.
        sent_at = max(call.sent_at or begun_at for call in calls)
        answered_at = max(min(call.begun_at for call in calls), sent_at)
        self.timings.send = max(sent_at - begun_at, 0.0)
        self.timings.wait = answered_at - sent_at
        self.timings.receive = time.monotonic() - answered_at

    def _observe(self, phase: SyncPhase, seconds: float) -> None:
        counts, total = self._phases[phase]
        for index in range(bisect.bisect_left(SYNC_BOUNDS_S, seconds), len(counts)):
            counts[index] += 1
        self._phases[phase] = (counts, total + seconds)


def _result(call: Pending, timeout_s: float) -> Message:
    try:
        return call.result(timeout_s)
    except (TimeoutError, RefusedError, ConnectionError) as error:
        raise LinkError(str(error)) from error


def _expect(call: Pending, reply: type[_Reply], timeout_s: float) -> _Reply:
    result = _result(call, timeout_s)
    if not isinstance(result, reply):
        raise LinkError(f"{call.peer} answered with {type(result).__name__} instead of {reply.__name__}")
    return result
