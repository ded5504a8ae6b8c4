"""A shard: its core by itself, and its server against clients that break the rules."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from cadenza.plane import wire
from cadenza.plane.codecs import as_bytes
from cadenza.plane.connection import Buffer, Connection, NoRequests, Refusal, RefusedError
from cadenza.plane.layout import NUMPY_TYPES, Layout, Tensor, Vector, accumulator, cut
from cadenza.plane.messages import (
    Assign,
    Decision,
    Done,
    Key,
    Message,
    Note,
    Part,
    Publish,
    Read,
    Received,
    Reply,
    Request,
    RequestKind,
    State,
    encode,
)
from cadenza.plane.transport import connect
from cadenza.plane.wire import HandshakeError, Identity, ProtocolError, Role
from cadenza_service.servers.shard import ShardServer
from cadenza_service.servers.shard_core import ShardCore

Array = NDArray[Any]
SOON_S = 5.0
KEY = b"k" * 32
PARAMETERS, BUFFERS, STATIC = "parameters.float32", "buffers.float32", "static.uint8"


def layout_of(parameters: int = 4, buffers: int = 2, static: int = 3, dtype: str = "float32") -> Layout:
    """A model whose vectors have these lengths; those of length 0 are left out."""
    vectors = (
        Vector("parameters", dtype, parameters),
        Vector("buffers", dtype, buffers),
        Vector("static", "uint8", static),
    )
    kept = tuple(vector for vector in vectors if vector.length)
    tensors = tuple(Tensor(v.role, v.dtype, (v.length,), v.name, 0) for v in kept)
    return Layout(kept, tensors, tuple(t.name for t in tensors if t.name == "parameters"))


def core_of(layout: Layout, mode: str = "local", shard: int = 0, shards: int = 1, **outer: Any) -> ShardCore:
    return ShardCore(Assign(layout, shard, shards, mode, outer or {"name": "average"}))


def body(*values: float, dtype: str = "float32") -> memoryview:
    return as_bytes(np.array(values, NUMPY_TYPES[dtype]))


def update(seq: int = 1, vectors: tuple[str, ...] = (PARAMETERS, BUFFERS), **fields: Any) -> Request:
    return Request("update", seq, fields.pop("base_version", 0), vectors, samples=1, **fields)


def decision(index: int, version: int, **fields: Any) -> Decision:
    return Decision(index=index, epoch=1, round=index, version=version, **fields)


def merge(*weights: float, seq: int = 1) -> tuple[Part, ...]:
    return tuple(Part(Key(worker, 1, seq), weight, weight) for worker, weight in enumerate(weights))


def replies(*keys: Key, version: int = 1) -> tuple[Reply, ...]:
    return tuple(Reply(key, Note(version, 1, 1)) for key in keys)


def values_of(bodies: Sequence[memoryview], dtype: Any = np.float32) -> list[float]:
    return [float(value) for value in np.frombuffer(b"".join(bodies), dtype)]


# --- requests that are not well-formed ---


@pytest.mark.parametrize(
    ("request_", "bodies", "says"),
    [
        (update(vectors=()), [], "an update of"),
        (update(vectors=(PARAMETERS,)), [body(1, 2, 3, 4)], "an update of"),
        (update(vectors=(BUFFERS, PARAMETERS)), [body(1, 2), body(1, 2, 3, 4)], "an update of"),
        (update(vectors=(PARAMETERS, BUFFERS, STATIC)), [], "an update of"),
        (update(codec="gzip"), [body(1, 2, 3, 4), body(1, 2)], "unknown codec 'gzip'"),
        (update(), [body(1, 2, 3), body(1, 2, 3)], "12 bytes for parameters.float32; 16 are expected"),
        (update(), [body(1, 2, 3, 4), body()], "0 bytes for buffers.float32; 8 are expected"),
        (Request("fetch", 1, -1, ("parameters.float64",)), [], "does not have: parameters.float64"),
        (Request("abstain", 1, 0, ("nonsense",)), [], "does not have: nonsense"),
    ],
    ids=["none", "fewer", "order", "static", "codec", "short", "missing", "unknown", "abstain"],
)
def test_a_request_that_is_not_well_formed_leaves_no_trace(
    request_: Request, bodies: list[memoryview], says: str
) -> None:
    core = core_of(layout_of())
    with pytest.raises(ProtocolError, match=says):
        core.request(0, 1, request_, bodies)
    assert not core.waits(Key(0, 1, 1))
    assert core.request(0, 1, update(), [body(1, 2, 3, 4), body(1, 2)]) is not None


@pytest.mark.parametrize("kind", ["fetch", "abstain"])
def test_only_updates_have_a_body(kind: RequestKind) -> None:
    with pytest.raises(ProtocolError, match=f"of kind {kind} with a body"):
        core_of(layout_of()).request_sizes(Request(kind, 1, 0, ()))


def test_a_request_counts_once_and_an_old_life_not_at_all() -> None:
    core = core_of(layout_of())
    bodies = [body(1, 2, 3, 4), body(1, 2)]
    assert core.request(0, 2, update(seq=5), bodies) is not None
    for seq in (5, 4, 1):
        assert core.request(0, 2, update(seq=seq), bodies) is None
    with pytest.raises(Refusal, match="worker 0 has been replaced") as caught:
        core.request(0, 1, update(seq=9), bodies)
    assert caught.value.code == "stale_incarnation"
    assert core.request(0, 3, update(seq=1), bodies) is not None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_a_value_that_is_not_finite_is_seen_in_any_vector(bad: float, where: int) -> None:
    bodies = [body(1, 2, 3, 4), body(1, 2)]
    np.frombuffer(bodies[where], np.float32)[-1] = bad
    received = core_of(layout_of()).request(0, 1, update(), bodies)
    assert received is not None
    assert not received.finite


# --- the log ---


@pytest.mark.parametrize("index", [0, 1, 3])
def test_the_log_has_no_gap_and_no_repetition(index: int) -> None:
    core = core_of(layout_of())
    core.decide(decision(1, 0))
    with pytest.raises(ProtocolError, match=f"entry {index} of the coordinator's log after entry 1"):
        core.decide(decision(index, 0))


def test_a_commit_merges_in_the_given_weights_and_keeps_its_record() -> None:
    core = core_of(layout_of(static=0))
    core.publish(Publish((PARAMETERS, BUFFERS)), [body(1, 1, 1, 1), body(5, 5)])
    for worker, value in enumerate((2.0, 4.0)):
        core.request(worker, 1, update(), [body(*[value] * 4), body(value, value)])
    parts = (Part(Key(0, 1, 1), 0.5, 0.25), Part(Key(1, 1, 1), 0.5, 0.25))
    entry = decision(1, 1, parts=parts, replies=replies(Key(0, 1, 1)))
    (outgoing,) = core.decide(entry)
    assert values_of(outgoing.bodies) == [4.0] * 4 + [6.5] * 2
    assert (core.version, core.record) == (1, entry)
    assert core.waits(Key(1, 1, 1))
    assert not core.waits(Key(0, 1, 1))


def test_an_answer_on_its_way_is_not_changed_by_later_rounds() -> None:
    for mode in ("sync", "local"):
        core = core_of(layout_of(4, 0, 0), mode, name="sgd", lr=1.0, momentum=0.5)
        sent = []
        for turn in range(1, 5):
            core.request(0, 1, update(turn, (PARAMETERS,)), [body(turn, turn, turn, turn)])
            entry = decision(turn, turn, parts=merge(1.0, seq=turn), replies=replies(Key(0, 1, turn)))
            (outgoing,) = core.decide(entry)
            sent.append((outgoing.bodies, values_of(outgoing.bodies)))
        assert all(values_of(bodies) == then for bodies, then in sent)


def test_buffers_never_meet_the_server_optimizer() -> None:
    core = core_of(layout_of(1, 1, 0), name="sgd", lr=0.5, momentum=0.0)
    core.request(0, 1, update(), [body(8), body(8)])
    core.decide(decision(1, 1, parts=merge(1.0)))
    assert values_of(core.read((PARAMETERS, BUFFERS))) == [4.0, 8.0]


def test_what_is_discarded_is_freed_but_still_answered() -> None:
    core = core_of(layout_of(2, 0, 0))
    core.request(0, 1, update(1, (PARAMETERS,)), [body(np.nan, 1)])
    (outgoing,) = core.decide(decision(1, 0, discard=(Key(0, 1, 1),), replies=replies(Key(0, 1, 1))))
    assert values_of(outgoing.bodies) == [0.0, 0.0]
    assert core.record is None


# --- layouts at the edge ---


@pytest.mark.parametrize(
    "layout",
    [layout_of(0, 2, 0), layout_of(3, 0, 0), layout_of(0, 0, 5), layout_of(0, 0, 0), layout_of(1, 1, 1)],
    ids=["no_parameters", "no_buffers", "static_only", "nothing", "one_each"],
)
@pytest.mark.parametrize("mode", ["sync", "local"])
@pytest.mark.parametrize("shards", [1, 7])
def test_every_layout_goes_through_a_round(layout: Layout, mode: str, shards: int) -> None:
    names = layout.travelling()
    total = 0
    for shard in range(shards):
        core = core_of(layout, mode, shard, shards)
        bodies = [
            as_bytes(np.ones(part.length, NUMPY_TYPES[part.dtype]))
            for part in layout.slices(shard, shards, names)
        ]
        assert core.request(0, 1, update(1, names), bodies) is not None
        (outgoing,) = core.decide(decision(1, 1, parts=merge(1.0), replies=replies(Key(0, 1, 1))))
        assert outgoing.answer.vectors == names
        values = values_of(outgoing.bodies)
        assert values == [1.0] * len(values)
        total += len(values)
    assert total == sum(vector.length for vector in layout.named(names))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_small_types_are_summed_in_a_larger_one(dtype: str) -> None:
    # 256 + 1 is not a bfloat16; a sum of 32 deltas of 1 is lost unless it is kept more precisely.
    name = f"parameters.{dtype}"
    core = core_of(layout_of(1, 0, 0, dtype))
    core.publish(Publish((name,)), [body(4096.0, dtype=dtype)])
    for turn in range(1, 33):
        core.request(0, 1, update(turn, (name,)), [body(1.0, dtype=dtype)])
        core.decide(decision(turn, turn, parts=merge(1.0, seq=turn), replies=replies(Key(0, 1, turn))))
    assert values_of(core.read((name,)), NUMPY_TYPES[dtype]) == [4128.0]
    assert accumulator(dtype).itemsize >= NUMPY_TYPES[dtype].itemsize
    assert float(ml_dtypes.bfloat16(4096.0) + ml_dtypes.bfloat16(1.0)) == 4096.0


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_the_pieces_of_all_shards_are_the_whole(shards: int) -> None:
    layout = layout_of(5, 3, 7)
    whole = {
        vector.name: np.arange(vector.length, dtype=NUMPY_TYPES[vector.dtype]) for vector in layout.vectors
    }
    read: dict[str, list[bytes]] = {name: [] for name in whole}
    for shard in range(shards):
        core = core_of(layout, shard=shard, shards=shards)
        for name, values in whole.items():
            start, stop = cut(len(values), shard, shards)
            core.publish(Publish((name,)), [as_bytes(values[start:stop])])
            read[name] += [bytes(piece) for piece in core.read((name,))]
    assert {name: b"".join(pieces) for name, pieces in read.items()} == {
        name: values.tobytes() for name, values in whole.items()
    }


# --- fetching ---


def train_in_sync(core: ShardCore, rounds: int, keep_after: int | None) -> None:
    for turn in range(1, rounds + 1):
        core.request(0, 1, update(turn, (PARAMETERS,)), [body(turn)])
        core.decide(
            decision(
                turn,
                turn,
                parts=merge(1.0, seq=turn),
                replies=replies(Key(0, 1, turn), version=turn),
                present=bytes([turn]),
                keep_after=keep_after,
            )
        )


def fetch(core: ShardCore, base: int, index: int, vectors: tuple[str, ...] = (PARAMETERS,)) -> Any:
    core.request(1, 1, Request("fetch", 1, base, vectors), [])
    (outgoing,) = core.decide(
        decision(index, core.version, replies=replies(Key(1, 1, 1), version=core.version))
    )
    return outgoing


@pytest.mark.parametrize("base", [0, 1, 3])
def test_a_worker_that_evaluated_gets_the_rounds_that_it_missed_in_order(base: int) -> None:
    core = core_of(layout_of(1, 0, 0), "sync")
    train_in_sync(core, 4, keep_after=0)
    outgoing = fetch(core, base, index=5)
    assert outgoing.answer.content == "gradients"
    assert outgoing.answer.present == tuple(bytes([turn]) for turn in range(base + 1, 5))
    assert values_of(outgoing.bodies) == [float(turn) for turn in range(base + 1, 5)]


def test_nothing_is_kept_beyond_what_somebody_lacks() -> None:
    core = core_of(layout_of(1, 0, 0), "sync")
    train_in_sync(core, 4, keep_after=2)
    core.request(1, 1, Request("fetch", 1, 1, (PARAMETERS,)), [])
    with pytest.raises(ProtocolError, match="older than the rounds that are kept"):
        core.decide(decision(5, 4, replies=replies(Key(1, 1, 1), version=4)))


@pytest.mark.parametrize("mode", ["sync", "local"])
def test_who_has_the_committed_version_gets_no_bytes(mode: str) -> None:
    core = core_of(layout_of(1, 0, 0), mode)
    train_in_sync(core, 2, keep_after=None)
    outgoing = fetch(core, 2, index=3)
    assert (outgoing.answer.content, outgoing.bodies) == ("unchanged", ())


def test_a_fetch_gives_the_vectors_that_it_names_in_layout_order() -> None:
    core = core_of(layout_of(1, 1, 1))
    core.publish(
        Publish((STATIC, PARAMETERS, BUFFERS)), [body(1), body(2), as_bytes(np.array([3], np.uint8))]
    )
    outgoing = fetch(core, -1, 1, (STATIC, PARAMETERS))
    assert outgoing.answer.vectors == (PARAMETERS, STATIC)
    assert b"".join(outgoing.bodies) == np.float32(1).tobytes() + b"\x03"


# --- the server ---


class Log(NoRequests):
    """The coordinator's end: keeps receipts."""

    def __init__(self) -> None:
        self.receipts: list[Received] = []
        self.arrived = threading.Condition()
        self.ended = threading.Event()

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        assert isinstance(message, Received)
        with self.arrived:
            self.receipts.append(message)
            self.arrived.notify_all()

    def closed(self, connection: Connection, error: Exception | None) -> None:
        self.ended.set()

    def wait_for(self, count: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.receipts) >= count, SOON_S)


class Bench:
    """A shard's server with a coordinator's connection in the test's hand."""

    def __init__(self) -> None:
        self.server = ShardServer("127.0.0.1", KEY, epoch=1)
        self.open: list[Connection] = []
        self.log = Log()
        self.coordinator = self.connect(Identity(Role.COORDINATOR, epoch=1), self.log)

    def connect(self, identity: Identity, handler: Log | None = None) -> Connection:
        host, port = self.server.address
        connection = connect(host, port, KEY, identity, handler, peer="shard 0", timeout_s=SOON_S).start()
        self.open.append(connection)
        return connection

    def worker(self, number: int = 0) -> Connection:
        return self.connect(Identity(Role.WORKER, number, 1))

    def assign(self, layout: Layout) -> None:
        assign = Assign(layout, 0, 1, "local", {"name": "average"})
        assert self.coordinator.call(assign).result(SOON_S) == Done()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for connection in bench.open:
        connection.close()
    bench.server.close()


def into(*sizes: int) -> Any:
    buffers: list[Buffer] = [memoryview(bytearray(size)) for size in sizes]
    return lambda message, length: buffers


@pytest.mark.parametrize(
    ("message", "bodies"),
    [
        (update(), [body(1, 2, 3, 4)]),
        (update(), [body(1, 2, 3, 4), body(1, 2), body(1)]),
        (update(), []),
        (update(vectors=()), []),
        (update(vectors=(PARAMETERS,)), [body(1, 2, 3, 4)]),
        (update(codec="gzip"), [body(1, 2, 3, 4), body(1, 2)]),
        (Request("fetch", 1, -1, (PARAMETERS,)), [body(1)]),
        (Request("fetch", 1, -1, ("x",)), []),
        (Publish((PARAMETERS,)), [body(1)]),
        (Publish((PARAMETERS,)), []),
        (Publish(("x",)), [body(1)]),
        (Read((PARAMETERS,)), []),
        (decision(1, 0), []),
        (Assign(layout_of(), 0, 1, "local", {}), []),
        (Request("update", 0, 0, (PARAMETERS, BUFFERS)), [body(1, 2, 3, 4), body(1, 2)]),
        (Request("update", 1, -2, (PARAMETERS, BUFFERS)), [body(1, 2, 3, 4), body(1, 2)]),
        (update(steps=-1), [body(1, 2, 3, 4), body(1, 2)]),
    ],
)
def test_what_a_worker_may_not_send_ends_its_connection_and_no_other(
    bench: Bench, message: Message, bodies: list[memoryview]
) -> None:
    bench.assign(layout_of())
    with pytest.raises(ConnectionError):
        bench.worker(0).call(message, bodies).result(SOON_S)
    bench.worker(1).call(update(), [body(1, 2, 3, 4), body(1, 2)])
    bench.log.wait_for(1)
    assert [receipt.key for receipt in bench.log.receipts] == [Key(1, 1, 1)]


def test_before_it_is_assigned_a_shard_refuses_and_takes_no_bytes(bench: Bench) -> None:
    with pytest.raises(RefusedError) as caught:
        bench.worker().call(Request("fetch", 1, -1, (PARAMETERS,))).result(SOON_S)
    assert caught.value.code == "not_assigned"
    with pytest.raises(ConnectionError):
        bench.worker().call(update(), [body(1, 2, 3, 4), body(1, 2)]).result(SOON_S)
    with pytest.raises(RefusedError):
        bench.connect(Identity(Role.OBSERVER)).call(Read((PARAMETERS,))).result(SOON_S)


def test_another_layout_is_refused_and_the_same_one_is_fine(bench: Bench) -> None:
    bench.assign(layout_of())
    bench.assign(layout_of())
    with pytest.raises(RefusedError, match="another layout"):
        bench.assign(layout_of(5))


def test_a_request_sent_again_is_answered_where_it_was_last_asked(bench: Bench) -> None:
    bench.assign(layout_of(1, 0, 0))
    first, second = bench.worker(), bench.worker()
    first.call(update(1, (PARAMETERS,)), [body(3)])
    bench.log.wait_for(1)
    call = second.call(update(1, (PARAMETERS,)), [body(3)], into(4))
    later = second.call(update(2, (PARAMETERS,)), [body(3)])
    bench.log.wait_for(2)  # One connection's requests are taken in order, so the repeated one is in, too.
    key = Key(0, 1, 1)
    bench.coordinator.send(decision(1, 1, parts=merge(1.0), replies=replies(key)))
    call.result(SOON_S)
    assert [receipt.key for receipt in bench.log.receipts] == [key, Key(0, 1, 2)]
    with pytest.raises(RefusedError, match="request 1 was answered before"):
        second.call(update(1, (PARAMETERS,)), [body(3)]).result(SOON_S)
    with pytest.raises(TimeoutError):
        later.result(0.01)


def test_an_old_epochs_coordinator_is_shut_out(bench: Bench) -> None:
    bench.assign(layout_of())
    newer = bench.connect(Identity(Role.COORDINATOR, epoch=3))
    with pytest.raises(HandshakeError, match="a newer incarnation"):
        bench.connect(Identity(Role.COORDINATOR, epoch=2))
    bench.coordinator.send(decision(1, 0))
    assert bench.log.ended.wait(SOON_S)
    newer.send(msgspec.structs.replace(decision(1, 0), epoch=3))
    newer.call(Assign(layout_of(), 0, 1, "local", {"name": "average"})).result(SOON_S)
    assert bench.connect(Identity(Role.OBSERVER)).call(Read(())).result(SOON_S) == State(0, 1)


def test_a_worker_that_vanishes_in_the_middle_of_a_push_leaves_no_trace(bench: Bench) -> None:
    bench.assign(layout_of(1 << 20, 0, 0))
    half = bench.worker()
    message = encode(update(1, (PARAMETERS,)))
    header = wire.pack_header(wire.Header(1, False, len(message), 4 << 20, 0))
    half._sock.sendall(header + message + bytes(2 << 20))
    half.close()
    bench.worker(1).call(update(1, (PARAMETERS,)), [memoryview(bytes(4 << 20))])
    bench.log.wait_for(1)
    assert [receipt.key.worker for receipt in bench.log.receipts] == [1]


def test_an_answer_for_a_worker_that_is_gone_disturbs_nobody(bench: Bench) -> None:
    bench.assign(layout_of(1, 0, 0))
    gone, here = bench.worker(0), bench.worker(1)
    gone.call(update(1, (PARAMETERS,)), [body(1)])
    bench.log.wait_for(1)
    gone.close()
    gone.join(SOON_S)
    call = here.call(update(1, (PARAMETERS,)), [body(3)], into(4))
    bench.log.wait_for(2)
    keys = Key(0, 1, 1), Key(1, 1, 1)
    bench.coordinator.send(decision(1, 1, parts=merge(0.5, 0.5), replies=replies(*keys)))
    call.result(SOON_S)
    assert not bench.log.ended.is_set()
