"""A shard's committed weights, the next ones while a round computes them, and the answers in wire form.

Everything that a round changes is kept twice: what is committed stays as it is until :meth:`Weights.commit`
exchanges the two. So a group of a round may be computed, and answered, before the round is decided, and computed
again if the decision differs, in other memory (:meth:`Weights.renew`). Memory, beside the workers' slots: twice the
slice, twice the server optimizer's state and, with a codec that loses precision, twice the residual.

The second buffer of round r is written again in round r + 2. By then every worker has received the answer to round
r, since it has contributed to round r + 1; so answers are sent from these buffers without a copy. Where workers do
not wait for each other (ssp, async), each has a buffer of its own: see :class:`Private`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.codecs import Turn, codec_named, compress, sparse
from cadenza.plane.holdings import NATIVE, Holdings, Place
from cadenza.plane.layout import as_bytes
from cadenza.plane.messages import Assign
from cadenza_service.servers.aggregate import ServerOptimizer, server_optimizer, weighted_sum
from cadenza_service.servers.answers import Watermark
from cadenza_service.servers.slots import Slot

Array = NDArray[Any]

MOST_COMPUTED_ELEMENTS = 1 << 16
"""At a time: 256 KiB of float32 per array, so that all arrays of a step stay in a core's cache."""

SERVER = -1
"""A server's number where a codec draws at random."""

Weighted = Sequence[tuple[Slot, float, float]]
"""Contributions in the order of summation, each with its weight and that of its buffers."""


class Weights:
    """One shard's values. Used from one thread, but for what is read of the committed ones."""

    def __init__(self, assign: Assign, holdings: Holdings) -> None:
        self.committed: dict[str, Array] = {
            name: np.zeros(part.length, holdings.sum_type(name)) for name, part in holdings.slices.items()
        }
        self.packed: list[bool] = [False] * len(holdings.places)
        """Units whose bodies are packed."""
        self._assign = assign
        self._holdings = holdings
        self._sync = assign.mode == "sync"
        self._next = {name: np.zeros_like(self.committed[name]) for name in holdings.travelling}
        self._optimizers: dict[str, ServerOptimizer] = {
            name: server_optimizer(assign.outer, len(self.committed[name]), self.committed[name].dtype)
            for name in holdings.travelling
            if holdings.roles[name] == "parameters" and not self._sync
        }
        self._wire = {
            name: np.zeros(holdings.slices[name].length, holdings.wire_type(name))
            for name in holdings.travelling
            if holdings.wire_type(name) != holdings.sum_type(name)
        }
        self._lossy = {name for name in holdings.travelling if holdings.answered_encoded(name, assign.codec)}
        self._codec = codec_named(assign.codec)
        self._residual = {name: np.zeros_like(self._next[name]) for name in self._lossy if self._owes}
        self._next_residual = {name: np.zeros_like(values) for name, values in self._residual.items()}
        self._encoded: dict[int, bytearray] = {}
        self._bodies: list[memoryview] = [memoryview(b"")] * len(holdings.places)
        self._source: dict[str, Array] = {}
        """Where the bytes of vectors lie that are answered as they are."""
        most = max([MOST_COMPUTED_ELEMENTS, *(place.stop - place.start for place in holdings.places)])
        self._total = np.zeros(most, np.float64)
        self._scratch = np.zeros(most, np.float64)

    @property
    def _owes(self) -> bool:
        return self._codec.biased

    def bodies(self, run: range) -> list[memoryview]:
        """The answer's bytes for consecutive units of one vector, as they were computed last."""
        vector = self._holdings.places[run.start].vector
        source = self._source.get(vector)
        if source is None or any(self.packed[position] for position in run):
            return [self._bodies[position] for position in run]
        return [as_bytes(source[self._span(run)])]

    # --- a round ---

    def compute(self, run: range, contributions: Weighted, turn: int) -> None:
        """Sum consecutive units of one vector, let the server optimizer step, and make the answer.

        At most MOST_COMPUTED_ELEMENTS values, or one unit.
        """
        name, span = self._holdings.places[run.start].vector, self._span(run)
        buffers = self._holdings.roles[name] == "buffers"
        weights = [buffer_weight if buffers else weight for _, weight, buffer_weight in contributions]
        out, scratch = self._memory(name, span.stop - span.start)
        total = weighted_sum([slot.values[name][span] for slot, _, _ in contributions], weights, out, scratch)
        if self._sync and not buffers:
            self._answer_gradient(run, name, span, total, contributions, turn)
            return
        committed, moved = self.committed[name][span], self._next[name][span]
        if buffers:
            np.add(committed, total, out=moved)
        else:
            self._optimizers[name].step(committed, total, moved, span.start)
        if name in self._lossy:
            np.subtract(moved, committed, out=out)
            self._encode(run, out, turn, decoded=scratch)
            np.add(committed, scratch, out=moved)
        elif name in self._wire:
            self._wire[name][span] = moved
            self._source[name] = self._wire[name]
        else:
            self._source[name] = self._next[name]

    def renew(self) -> None:
        """Compute the open round in other memory from now on: what was computed of it may still be being sent."""
        self._next = {name: values.copy() for name, values in self._next.items()}
        self._wire = {name: values.copy() for name, values in self._wire.items()}
        self._encoded = {}

    def commit(self) -> None:
        """What was computed, of every unit, becomes the committed state."""
        for name in self._holdings.travelling:
            if self._sync and self._holdings.roles[name] == "parameters":
                continue
            self.committed[name], self._next[name] = self._next[name], self.committed[name]
        for optimizer in self._optimizers.values():
            optimizer.commit()
        self._residual, self._next_residual = self._next_residual, self._residual

    # --- sync ---

    def _answer_gradient(
        self, run: range, name: str, span: slice, total: Array, contributions: Weighted, turn: int
    ) -> None:
        if name in self._lossy:
            self._encode(run, total, turn)
            return
        source = self._source[name] = self._wire.get(name, self._next[name])
        source[span] = total
        for position in run:
            packed = None
            if all(slot.packed[position] for slot, _, _ in contributions):
                packed = sparse.pack(source[self._span(range(position, position + 1))])
                self._bodies[position] = memoryview(b"") if packed is None else packed
            self.packed[position] = packed is not None

    def gradients(self, turn: int) -> dict[str, Array]:
        """The travelling vectors' slices as the latest round's answer holds them, in their own types, copied."""
        answer = {}
        for name in self._holdings.travelling:
            if name in self._lossy:
                answer[name] = self._decoded(name, turn)
            elif self._holdings.roles[name] == "buffers":
                answer[name] = self.wire(name)
            else:
                answer[name] = self._wire.get(name, self._next[name]).copy()
        return answer

    def _decoded(self, name: str, turn: int) -> Array:
        values = np.zeros_like(self._next[name])
        at = Turn(self._assign.seed, turn, SERVER)
        for position, place in enumerate(self._holdings.places):
            if place.vector == name:
                self._codec.decode(self._bodies[position], place.unit, at, values[place.start : place.stop])
        return values

    # --- reading and writing ---

    def wire(self, name: str) -> Array:
        """The committed values of one vector in its own type, copied."""
        return self.committed[name].astype(self._holdings.wire_type(name))

    def set(self, name: str, body: memoryview) -> None:
        """Make the values in ``body``, of the vector's own type, the committed ones."""
        self.committed[name][:] = np.frombuffer(body, self._holdings.wire_type(name))

    # --- memory ---

    def _memory(self, name: str, length: int) -> tuple[Array, Array]:
        if self._holdings.sum_type(name) == np.float64:
            return self._total[:length], self._scratch[:length]
        return self._total.view(np.float32)[:length], self._scratch.view(np.float32)[:length]

    def _span(self, run: range) -> slice:
        """Where consecutive units lie in the slice."""
        return slice(self._holdings.places[run.start].start, self._holdings.places[run[-1]].stop)

    def _encode(self, run: range, values: Array, turn: int, decoded: Array | None = None) -> None:
        first = self._holdings.places[run.start].start
        for position in run:
            place = self._holdings.places[position]
            within = slice(place.start - first, place.stop - first)
            self._encode_unit(position, place, values[within], turn)
            if decoded is not None:
                at = Turn(self._assign.seed, turn, SERVER)
                self._codec.decode(self._bodies[position], place.unit, at, decoded[within])

    def _encode_unit(self, position: int, place: Place, values: Array, turn: int) -> None:
        body = self._bodies[position] = _room(
            self._encoded, position, self._codec.size_bytes(place.unit, turn)
        )
        span = slice(place.start, place.stop)
        owed, owing = self._residual.get(place.vector), self._next_residual.get(place.vector)
        compress(
            self._codec,
            values,
            None if owed is None else owed[span],
            place.unit,
            Turn(self._assign.seed, turn, SERVER),
            body,
            None if owing is None else owing[span],
        )


class Private:
    """One worker's own answers, where workers do not wait for each other.

    With a codec that loses precision, what the worker holds is known here, and each answer is the difference to it:
    what one answer could not say is in the next one. That needs a codec whose error is smaller than what it encodes:
    the others, the unbiased ones, are for updates only, and answers are exact. Memory: one slice per worker.
    """

    def __init__(self, assign: Assign, holdings: Holdings) -> None:
        self.codec = assign.codec if codec_named(assign.codec).biased else NATIVE
        """Of the answers."""
        self._seed = assign.seed
        self._holdings = holdings
        self._codec = codec_named(self.codec)
        self._values = {
            name: np.zeros(
                holdings.slices[name].length,
                holdings.sum_type(name)
                if holdings.answered_encoded(name, self.codec)
                else holdings.wire_type(name),
            )
            for name in holdings.travelling
        }
        """What is sent; of vectors that a codec changes, what the worker holds."""
        self._encoded: dict[int, bytearray] = {}
        self._bodies: list[memoryview] = [memoryview(b"")] * len(holdings.places)

    def bodies(self, run: range) -> list[memoryview]:
        """The answer's bytes for consecutive units, as they were prepared last."""
        return [self._bodies[position] for position in run]

    def prepare(self, weights: Weights, turn: int, watermark: Watermark) -> None:
        """Bring the answer to the committed values, unit by unit."""
        try:
            for position in range(len(self._holdings.places)):
                self._prepare(position, weights, turn)
                watermark.advance(position + 1)
        except BaseException:
            watermark.abandon()
            raise
        watermark.finish()

    def _prepare(self, position: int, weights: Weights, turn: int) -> None:
        place = self._holdings.places[position]
        span = slice(place.start, place.stop)
        held, committed = self._values[place.vector][span], weights.committed[place.vector][span]
        if not self._holdings.answered_encoded(place.vector, self.codec):
            held[:] = committed
            self._bodies[position] = as_bytes(held)
            return
        body = self._bodies[position] = _room(
            self._encoded, position, self._codec.size_bytes(place.unit, turn)
        )
        at = Turn(self._seed, turn, SERVER)
        self._codec.encode(committed - held, place.unit, at, body)
        change = np.empty_like(held)
        self._codec.decode(body, place.unit, at, change)
        held += change

    def holds(self, weights: Weights, names: Iterable[str]) -> None:
        """The worker was given, or gave, the committed values of these vectors as they are."""
        for name in names:
            if name in self._values:
                self._values[name][:] = weights.committed[name]


def _room(memory: dict[int, bytearray], position: int, size: int) -> memoryview:
    """So many bytes for one unit, which are allocated once."""
    room = memory.get(position)
    if room is None or len(room) < size:
        room = memory[position] = bytearray(size)
    return memoryview(room)[:size]
