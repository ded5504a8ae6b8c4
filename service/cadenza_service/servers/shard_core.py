"""A parameter server's core: committed weights, waiting contributions, and what the coordinator's log does to them.

No socket, no thread, no clock. Everything follows from the requests that arrived and from the coordinator's log,
whose entries are carried out in order, so that all shards of a job agree.

Three kinds of callers: a worker's connection fills that worker's :class:`Slot`; whoever holds the server's lock calls
the core's events; the coordinator's connection alone carries out the log, one entry after another, and computes
outside the lock, on slots that nobody writes to until they are answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from cadenza.plane.connection import Refusal
from cadenza.plane.holdings import NATIVE, Holdings
from cadenza.plane.layout import Slice, as_bytes
from cadenza.plane.messages import (
    BARRIER_MODES,
    Answer,
    Assign,
    Content,
    Decision,
    Key,
    Part,
    Publish,
    Received,
    Reply,
    Request,
    Tentative,
)
from cadenza.plane.wire import ProtocolError
from cadenza_service.servers.answers import Outgoing, Values, Watermark, Work
from cadenza_service.servers.slots import Slot
from cadenza_service.servers.weights import MOST_COMPUTED_ELEMENTS, Private, Weighted, Weights

Array = NDArray[Any]


@dataclass(frozen=True)
class _Round:
    """sync: what one committed round answered, kept for a worker that is evaluating."""

    version: int
    present: bytes
    values: dict[str, Array]


class ShardCore:
    """One shard of one job."""

    def __init__(self, assign: Assign) -> None:
        self.assign = assign
        self.version = 0
        self.round = 0
        self.record: Decision | None = None
        """The latest commit's record, kept with the weights."""
        self.holdings = Holdings(assign.layout, assign.cut, assign.shard, assign.groups)
        self.weights = Weights(assign, self.holdings)
        self._index = 0
        self._slots: dict[int, Slot] = {}
        self._private: dict[int, Private] = {}
        self._tentative: dict[int, tuple[Part, ...]] = {}
        """What each group of the open round was answered with."""
        self._early: list[Watermark] = []
        """Of these answers."""
        self._history: deque[_Round] = deque()

    # --- what workers send ---

    def slot(self, worker: int, incarnation: int) -> Slot:
        """The worker's memory; raises Refusal where a newer incarnation is known."""
        slot = self._slots.get(worker)
        if slot is not None and incarnation < slot.incarnation:
            raise Refusal("stale_incarnation", f"worker {worker} has been replaced by a newer incarnation")
        if slot is None or incarnation > slot.incarnation:
            slot = self._slots[worker] = Slot(self.holdings, worker, incarnation, self.assign.seed)
        return slot

    def slices(self, vectors: Iterable[str]) -> list[Slice]:
        """The shard's slices of the named vectors; raises ProtocolError on an unknown name."""
        names = tuple(vectors)
        unknown = [name for name in names if name not in self.holdings.slices]
        if unknown:
            raise ProtocolError(f"vectors that the layout does not have: {', '.join(unknown)}")
        return [part for name, part in self.holdings.slices.items() if name in names]

    def publish(self, worker: int, message: Publish, bodies: Sequence[memoryview]) -> None:
        """A worker's values of whole vectors become the committed ones."""
        parts = self.slices(message.vectors)
        for part, body in zip(parts, bodies, strict=True):
            self.weights.set(part.vector, body)
        self._holds(worker, [part.vector for part in parts])

    def request(self, worker: int, incarnation: int, request: Request) -> list[Received]:
        """A worker's request; whatever became complete by it is returned, nothing where it is already known.

        Raises:
            Refusal: it comes from an old incarnation of the worker, or was answered before.
            ProtocolError: it is not well-formed.
        """
        slot = self.slot(worker, incarnation)
        if request.kind == "update" and request.vectors != self.holdings.travelling:
            raise ProtocolError(f"an update of {request.vectors} instead of {self.holdings.travelling}")
        self.slices(request.vectors)
        if request.seq < slot.seq or (request.seq == slot.seq and slot.answered):
            raise Refusal("answered", f"request {request.seq} was answered before")
        if request.seq > slot.seq:
            slot.begin(request.seq)
        if slot.request is None:
            slot.request = request
        return self.news(slot)

    def news(self, slot: Slot) -> list[Received]:
        """What became complete of a worker's request since this was last asked."""
        request = slot.request
        if request is None:
            return []
        return [
            Received(
                shard=self.assign.shard,
                group=group,
                key=Key(slot.worker, slot.incarnation, slot.seq),
                kind=request.kind,
                base_version=request.base_version,
                samples=request.samples,
                steps=request.steps,
                loss=request.loss,
                finite=finite,
                present=request.present,
                spans=request.spans,
                reason=request.reason,
                lost_samples=request.lost_samples,
                lost_spans=request.lost_spans,
            )
            for group, finite in slot.news()
        ]

    def read(self, vectors: Iterable[str]) -> list[memoryview]:
        """The committed values of the named vectors, in their own types, in layout order; copies."""
        return [as_bytes(self.weights.wire(part.vector)) for part in self.slices(vectors)]

    # --- the log ---

    def tentative(self, entry: Tentative) -> Work:
        """Answer one group of the open round as if it were decided."""
        self._next_entry(entry.index)
        self._tentative[entry.group] = entry.parts
        work = Work()
        positions = self.holdings.group(entry.group)
        turn = self.round + 1
        contributions = self._contributions(entry.parts)
        for slot, _, _ in contributions:
            values = self._values(slot, positions, len(positions), turn, work.watermark)
            work.outgoing.append(Outgoing(_key(slot), values))
        work.compute = self._steps(positions, contributions, turn, work.watermark)
        self._early.append(work.watermark)
        return work

    def decide(self, decision: Decision) -> Work:
        """Carry out the next entry of the coordinator's log: the answers that it releases, and what is to compute."""
        self._next_entry(decision.index)
        # Else only fetches are answered: what the open round was answered with still holds.
        closes = decision.round != self.round
        self.round = decision.round
        work = Work()
        if self.assign.mode in BARRIER_MODES:
            self._decide_together(decision, self._tentative if closes else {}, work)
        else:
            self._decide_alone(decision, work)
        if closes:
            self._tentative, self._early = {}, []
        self._forget(decision.keep_after)
        return work

    def _decide_together(self, decision: Decision, answered: dict[int, tuple[Part, ...]], work: Work) -> None:
        """sync, local: one answer for all, sent while it is computed."""
        groups = range(self.holdings.groups)
        done = [group for group in groups if answered.get(group) == decision.parts]
        stale = [p for group in groups if group not in done for p in self.holdings.group(group)]
        fresh = [p for group in done for p in self.holdings.group(group)]
        contributions = self._contributions(decision.parts)
        merged = {part.key for part in decision.parts}
        for reply in decision.replies:
            slot = self._slots[reply.key.worker]
            # Whose contribution is not in has not got the tentative answers.
            positions = stale if reply.key in merged else stale + fresh
            values = self._values(slot, positions, len(stale), decision.round, work.watermark)
            work.outgoing.append(self._reply(slot, reply, decision, values, taken_back=bool(answered)))
        if decision.parts:
            if len(done) < len(answered):
                self._retract()
            work.compute = self._steps(stale, contributions, decision.round, work.watermark)
            work.commit.append(lambda: self._commit(decision))

    def _retract(self) -> None:
        """Tentative answers were wrong, and may still be on their way: no more of them is sent, and none is overwritten."""
        for watermark in self._early:
            watermark.retract()
        self.weights.renew()

    def _decide_alone(self, decision: Decision, work: Work) -> None:
        """ssp, async: a contribution is merged on arrival, and each worker is answered by itself."""
        if decision.parts:
            positions = range(len(self.holdings.places))
            contributions = self._contributions(decision.parts)
            work.compute = self._steps(positions, contributions, decision.round, work.watermark)
            work.commit.append(lambda: self._commit(decision))
        for reply in decision.replies:
            slot = self._slots[reply.key.worker]
            work.outgoing.append(self._reply_alone(slot, reply, decision, work))

    def _commit(self, decision: Decision) -> None:
        self.weights.commit()
        self.record = decision
        self.version = decision.version
        if self.assign.mode == "sync" and decision.keep_after is not None:
            values = self.weights.gradients(decision.round)
            self._history.append(_Round(decision.version, decision.present, values))

    # --- answers ---

    def _reply(
        self, slot: Slot, reply: Reply, decision: Decision, values: Values, *, taken_back: bool
    ) -> Outgoing:
        request = slot.finish()
        if request.kind == "fetch":
            return self._answer_fetch(slot, reply, request)
        sync = self.assign.mode == "sync"
        if decision.parts and self._content() == "change" and request.base_version != self.version:
            # It was away, and holds older values than those that the others' change is to be added to.
            answer = Answer("weights", reply.note, self.holdings.travelling)
            return Outgoing(reply.key, self._committed_then(slot, values), answer)
        if decision.parts:
            present = (decision.present,) if sync else ()
            answer = Answer(self._content(), reply.note, self.holdings.travelling, present)
            return Outgoing(reply.key, values, answer)
        if sync:
            # Tentative answers may have brought buffers of a round that is skipped now.
            restored = self._committed_buffers(slot, decision.round) if taken_back else None
            return Outgoing(reply.key, restored, Answer("unchanged", reply.note))
        return self._committed(slot, reply, self.holdings.travelling)

    def _committed_buffers(self, slot: Slot, turn: int) -> Values:
        """The averaged buffers as they are."""
        holdings = self.holdings
        copies = {n: self.weights.wire(n) for n in holdings.travelling if holdings.roles[n] == "buffers"}
        positions = [p for p, place in enumerate(holdings.places) if place.vector in copies]
        return self._native(slot, turn, positions, copies.__getitem__)

    def _committed_then(self, slot: Slot, values: Values) -> Values:
        """All committed values, once the computation that ``values`` wait for is committed."""
        copies: dict[str, Array] = {}

        def copy(name: str) -> Array:
            if not copies:
                values.watermark.wait_done()
                copies.update({name: self.weights.wire(name) for name in self.holdings.travelling})
            return copies[name]

        return self._native(slot, values.turn, range(len(self.holdings.places)), copy)

    def _native(
        self, slot: Slot, turn: int, positions: Sequence[int], vector: Callable[[str], Array]
    ) -> Values:
        """Units of vectors in their own types."""

        def bodies(run: range) -> list[memoryview]:
            first, last = self.holdings.places[run.start], self.holdings.places[run[-1]]
            return [as_bytes(vector(first.vector)[first.start : last.stop])]

        there = Watermark()
        there.finish()
        return Values(self.holdings, slot.seq, NATIVE, turn, positions, 0, bodies, _never_packed, there)

    def _reply_alone(self, slot: Slot, reply: Reply, decision: Decision, work: Work) -> Outgoing:
        request = slot.finish()
        if request.kind == "fetch":
            return self._answer_fetch(slot, reply, request)
        private = self._private_of(slot.worker)
        positions = range(len(self.holdings.places))
        turn, watermark = decision.index, Watermark()
        work.prepare.append(lambda: private.prepare(self.weights, turn, watermark))
        values = Values(
            self.holdings,
            slot.seq,
            private.codec,
            turn,
            positions,
            len(positions),
            private.bodies,
            _never_packed,
            watermark,
        )
        return Outgoing(reply.key, values, Answer(self._content(), reply.note, self.holdings.travelling))

    def _content(self) -> Content:
        if self.assign.mode == "sync":
            return "gradient"
        return "weights" if self.assign.codec == NATIVE else "change"

    def _answer_fetch(self, slot: Slot, reply: Reply, request: Request) -> Outgoing:
        if request.base_version == self.version and not self._approximate:
            return Outgoing(reply.key, None, Answer("unchanged", reply.note))
        if self.assign.mode == "sync" and request.base_version >= 0:
            return self._replay(reply, request)
        return self._committed(slot, reply, request.vectors)

    def _committed(self, slot: Slot, reply: Reply, names: Iterable[str]) -> Outgoing:
        """The committed values as they are: the commit before this entry is complete."""
        parts = self.slices(names)
        answer = Answer("weights", reply.note, tuple(part.vector for part in parts))
        self._holds(slot.worker, answer.vectors)
        return Outgoing(reply.key, None, answer, tuple(self.read(answer.vectors)))

    def _replay(self, reply: Reply, request: Request) -> Outgoing:
        missed = [kept for kept in self._history if kept.version > request.base_version]
        if [kept.version for kept in missed] != list(range(request.base_version + 1, self.version + 1)):
            # The coordinator never lets an evaluating worker fall behind what is kept, so this is a bug's last net.
            raise ProtocolError(f"version {request.base_version} is older than the rounds that are kept")
        names = self.holdings.travelling
        answer = Answer("gradients", reply.note, names, tuple(kept.present for kept in missed))
        bodies = tuple(as_bytes(kept.values[name]) for kept in missed for name in names)
        return Outgoing(reply.key, None, answer, bodies)

    def _values(
        self, slot: Slot, positions: Sequence[int], awaited: int, turn: int, watermark: Watermark
    ) -> Values:
        return Values(
            self.holdings,
            slot.seq,
            self.assign.codec,
            turn,
            positions,
            awaited,
            self.weights.bodies,
            self.weights.packed.__getitem__,
            watermark,
        )

    # --- inside ---

    def _next_entry(self, index: int) -> None:
        if index != self._index + 1:
            raise ProtocolError(f"entry {index} of the coordinator's log after entry {self._index}")
        self._index = index

    def _contributions(self, parts: Sequence[Part]) -> Weighted:
        return [(self._slots[part.key.worker], part.weight, part.buffer_weight) for part in parts]

    def _steps(
        self, positions: Sequence[int], contributions: Weighted, turn: int, watermark: Watermark
    ) -> list[Callable[[], None]]:
        def compute() -> None:
            count = 0
            for run in self.holdings.runs(positions, MOST_COMPUTED_ELEMENTS):
                self.weights.compute(run, contributions, turn)
                count += len(run)
                watermark.advance(count)

        return [compute]

    def _forget(self, keep_after: int | None) -> None:
        while self._history and (keep_after is None or self._history[0].version <= keep_after):
            self._history.popleft()

    def _private_of(self, worker: int) -> Private:
        if worker not in self._private:
            self._private[worker] = Private(self.assign, self.holdings)
        return self._private[worker]

    def _holds(self, worker: int, vectors: Iterable[str]) -> None:
        """Where answers say what has changed since a worker's latest one, remember what it has now."""
        if self._approximate:
            self._private_of(worker).holds(self.weights, vectors)

    @property
    def _approximate(self) -> bool:
        """Whether a worker that knows a version may hold something else, for which its answers owe it the rest."""
        return self.assign.mode not in BARRIER_MODES and self.assign.codec != NATIVE


def _key(slot: Slot) -> Key:
    return Key(slot.worker, slot.incarnation, slot.seq)


def _never_packed(position: int) -> bool:
    return False
