"""A shard: its core by itself, and its server against clients that break the rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from cadenza.plane import wire
from cadenza.plane.connection import Frame, Refusal, RefusedError
from cadenza.plane.layout import NUMPY_TYPES, Cut, Layout, accumulator, as_bytes
from cadenza.plane.messages import (
    Answer,
    Assign,
    Done,
    Key,
    Message,
    Part,
    Publish,
    Read,
    Received,
    Request,
    State,
    Units,
    encode,
)
from cadenza.plane.wire import HandshakeError, Identity, ProtocolError, Role
from cadenza_service.servers.shard_core import ShardCore
from tests.unit.shard_bench import SOON_S, Bench, Values, sent
from tests.unit.shards import (
    BUFFERS,
    PARAMETERS,
    STATIC,
    bodies_of,
    body,
    carry_out,
    core_of,
    decision,
    layout_of,
    merge,
    push,
    replies,
    update,
    values_of,
)

Array = NDArray[Any]


# --- requests that are not well-formed ---


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (update(vectors=()), "an update of"),
        (update(vectors=(PARAMETERS,)), "an update of"),
        (update(vectors=(BUFFERS, PARAMETERS)), "an update of"),
        (update(vectors=(PARAMETERS, BUFFERS, STATIC)), "an update of"),
        (Request("fetch", 1, -1, ("parameters.float64",)), "does not have: parameters.float64"),
        (Request("abstain", 1, 0, ("nonsense",)), "does not have: nonsense"),
    ],
    ids=["none", "fewer", "order", "static", "unknown", "abstain"],
)
def test_a_request_that_is_not_well_formed_leaves_no_trace(request_: Request, says: str) -> None:
    core = core_of(layout_of())
    with pytest.raises(ProtocolError, match=says):
        core.request(0, 1, request_)
    slot = core.slot(0, 1)
    assert (slot.seq, slot.request) == (0, None)
    assert len(push(core, 0, 1, body(1, 2, 3, 4), body(1, 2))) == 1


def test_a_request_counts_once_and_an_old_life_not_at_all() -> None:
    core = core_of(layout_of())
    bodies = [body(1, 2, 3, 4), body(1, 2)]
    assert len(push(core, 0, 5, *bodies)) == 1
    assert push(core, 0, 5, *bodies) == []
    for seq in (4, 1):
        with pytest.raises(Refusal, match=f"request {seq} was answered before"):
            core.request(0, 1, update(seq=seq))
    carry_out(core, decision(1, 1, parts=merge(1.0, seq=5), replies=replies(Key(0, 1, 5))))
    with pytest.raises(Refusal, match="request 5 was answered before") as answered:
        core.request(0, 1, update(seq=5))
    assert answered.value.code == "answered"
    core.request(0, 2, update(seq=1))
    with pytest.raises(Refusal, match="worker 0 has been replaced") as caught:
        core.request(0, 1, update(seq=9))
    assert caught.value.code == "stale_incarnation"


def test_a_receipt_says_what_the_request_said() -> None:
    core = core_of(layout_of(2, 0, 0), groups=1)
    request = Request(
        "update", 3, 7, (PARAMETERS,), samples=5, steps=2, loss=0.5, present=b"\x01", lost_samples=1
    )
    assert core.request(4, 2, request) == []
    slot = core.slot(4, 2)
    message = Units(3, PARAMETERS, 0, 1, "fp32", 0)
    slot.accept(message, slot.destination(message, 8, lambda size: memoryview(bytearray(size))))
    (received,) = core.news(slot)
    assert received == Received(
        0, 0, Key(4, 2, 3), "update", 7, 5, 2, 0.5, True, b"\x01", (), "", lost_samples=1
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_a_value_that_is_not_finite_is_seen_in_any_vector(bad: float, where: int) -> None:
    bodies = [body(1, 2, 3, 4), body(1, 2)]
    np.frombuffer(bodies[where], np.float32)[-1] = bad
    (received,) = push(core_of(layout_of()), 0, 1, *bodies)
    assert not received.finite


# --- the log ---


@pytest.mark.parametrize("index", [0, 1, 3])
def test_the_log_has_no_gap_and_no_repetition(index: int) -> None:
    core = core_of(layout_of())
    carry_out(core, decision(1, 0))
    with pytest.raises(ProtocolError, match=f"entry {index} of the coordinator's log after entry 1"):
        core.decide(decision(index, 0))


def test_a_commit_merges_in_the_given_weights_and_keeps_its_record() -> None:
    core = core_of(layout_of(static=0))
    core.publish(0, Publish((PARAMETERS, BUFFERS)), [body(1, 1, 1, 1), body(5, 5)])
    for worker, value in enumerate((2.0, 4.0)):
        push(core, worker, 1, body(*[value] * 4), body(value, value))
    parts = (Part(Key(0, 1, 1), 0.5, 0.25), Part(Key(1, 1, 1), 0.5, 0.25))
    entry = decision(1, 1, parts=parts, replies=replies(Key(0, 1, 1)))
    (outgoing,) = carry_out(core, entry).outgoing
    assert values_of(bodies_of(outgoing)) == [4.0] * 4 + [6.5] * 2
    assert outgoing.answer == Answer("weights", entry.replies[0].note, (PARAMETERS, BUFFERS))
    assert (core.version, core.record) == (1, entry)
    assert core.slot(0, 1).answered
    assert not core.slot(1, 1).answered, "it was merged, but waits for its answer"


def test_nothing_is_committed_before_the_work_is_done() -> None:
    core = core_of(layout_of(2, 0, 0))
    push(core, 0, 1, body(1, 2))
    work = core.decide(decision(1, 1, parts=merge(1.0), replies=replies(Key(0, 1, 1))))
    assert (core.version, values_of(core.read((PARAMETERS,)))) == (0, [0, 0])
    work.run()
    assert (core.version, values_of(core.read((PARAMETERS,)))) == (1, [1, 2])


@pytest.mark.parametrize("mode", ["sync", "local"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_behind_a_barrier_the_next_updates_do_not_change_an_answer_on_its_way(mode: str, dtype: str) -> None:
    core = core_of(layout_of(4, 0, 0, dtype), mode, name="sgd", lr=1.0, momentum=0.5)
    push(core, 0, 1, body(1, 1, 1, 1, dtype=dtype))
    for turn in range(1, 6):
        entry = decision(turn, turn, parts=merge(1.0, seq=turn), replies=replies(Key(0, 1, turn)))
        (outgoing,) = carry_out(core, entry).outgoing
        bodies = bodies_of(outgoing)
        then = b"".join(bodies)
        push(core, 0, turn + 1, body(9, 9, 9, turn, dtype=dtype))
        assert b"".join(bodies) == then


def test_outside_barriers_rounds_do_not_change_an_answer_on_its_way() -> None:
    for codec in ("fp32", "int8"):
        core = core_of(layout_of(4, 2, 0), "async", codec=codec)
        push(core, 0, 1, body(1, 2, 3, 4), body(5, 6))
        first = decision(1, 1, parts=merge(1.0), replies=replies(Key(0, 1, 1)))
        (outgoing,) = carry_out(core, first).outgoing
        bodies = bodies_of(outgoing)
        then = b"".join(bodies)
        for turn in range(2, 6):
            push(core, 1, turn, body(9, 9, 9, 9), body(9, 9))
            parts = (Part(Key(1, 1, turn), 1.0, 0.5),)
            carry_out(core, decision(turn, turn, parts=parts, replies=replies(Key(1, 1, turn))))
        assert b"".join(bodies) == then


def test_buffers_never_meet_the_server_optimizer() -> None:
    core = core_of(layout_of(1, 1, 0), name="sgd", lr=0.5, momentum=0.0)
    push(core, 0, 1, body(8), body(8))
    carry_out(core, decision(1, 1, parts=merge(1.0)))
    assert values_of(core.read((PARAMETERS, BUFFERS))) == [4.0, 8.0]


def test_what_is_not_merged_is_still_answered_and_its_memory_used_again() -> None:
    core = core_of(layout_of(2, 0, 0))
    push(core, 0, 1, body(np.nan, 1))
    (outgoing,) = carry_out(core, decision(1, 0, replies=replies(Key(0, 1, 1)))).outgoing
    assert values_of(bodies_of(outgoing)) == [0.0, 0.0]
    assert core.record is None
    push(core, 0, 2, body(3, 1))
    carry_out(core, decision(2, 1, parts=merge(1.0, seq=2), replies=replies(Key(0, 1, 2))))
    assert values_of(core.read((PARAMETERS,))) == [3.0, 1.0]


# --- layouts at the edge ---


@pytest.mark.parametrize(
    "layout",
    [layout_of(0, 2, 0), layout_of(3, 0, 0), layout_of(0, 0, 5), layout_of(0, 0, 0), layout_of(1, 1, 1)],
    ids=["no_parameters", "no_buffers", "static_only", "nothing", "one_each"],
)
@pytest.mark.parametrize("mode", ["sync", "local"])
@pytest.mark.parametrize("shards", [1, 7])
@pytest.mark.parametrize("groups", [1, 3])
def test_every_layout_goes_through_a_round(layout: Layout, mode: str, shards: int, groups: int) -> None:
    names = layout.travelling()
    total = 0
    for shard in range(shards):
        core = core_of(layout, mode, shard, shards, groups=groups)
        bodies = [as_bytes(np.ones(part.length, NUMPY_TYPES[part.dtype])) for part in core.slices(names)]
        assert [received.group for received in push(core, 0, 1, *bodies)] == list(range(groups))
        entry = decision(1, 1, parts=merge(1.0), replies=replies(Key(0, 1, 1)))
        (outgoing,) = carry_out(core, entry).outgoing
        assert outgoing.answer is not None
        assert outgoing.answer.vectors == names
        values = values_of(bodies_of(outgoing))
        assert values == [1.0] * len(values)
        total += len(values)
    assert total == sum(vector.length for vector in layout.named(names))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_small_types_are_summed_in_a_larger_one(dtype: str) -> None:
    # 256 + 1 is not a bfloat16; a sum of 32 deltas of 1 is lost unless it is kept more precisely.
    name = f"parameters.{dtype}"
    core = core_of(layout_of(1, 0, 0, dtype))
    core.publish(0, Publish((name,)), [body(4096.0, dtype=dtype)])
    for turn in range(1, 33):
        push(core, 0, turn, body(1.0, dtype=dtype))
        carry_out(core, decision(turn, turn, parts=merge(1.0, seq=turn), replies=replies(Key(0, 1, turn))))
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
            (part,) = core.slices((name,))
            core.publish(0, Publish((name,)), [as_bytes(piece) for piece in part.pieces(values)] or [body()])
            read[name] += [bytes(piece) for piece in core.read((name,))]
    assert {name: b"".join(pieces) for name, pieces in read.items()} == {
        name: values.tobytes() for name, values in whole.items()
    }


# --- fetching ---


def train_in_sync(core: ShardCore, rounds: int, keep_after: int | None) -> None:
    for turn in range(1, rounds + 1):
        push(core, 0, turn, body(turn))
        entry = decision(
            turn,
            turn,
            parts=merge(1.0, seq=turn),
            replies=replies(Key(0, 1, turn), version=turn),
            present=bytes([turn]),
            keep_after=keep_after,
        )
        carry_out(core, entry)


def fetch(core: ShardCore, base: int, index: int, vectors: tuple[str, ...] = (PARAMETERS,)) -> Any:
    core.request(1, 1, Request("fetch", 1, base, vectors))
    entry = decision(index, core.version, replies=replies(Key(1, 1, 1), version=core.version))
    (outgoing,) = carry_out(core, entry).outgoing
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
    core.request(1, 1, Request("fetch", 1, 1, (PARAMETERS,)))
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
        0, Publish((STATIC, PARAMETERS, BUFFERS)), [body(1), body(2), as_bytes(np.array([3], np.uint8))]
    )
    outgoing = fetch(core, -1, 1, (STATIC, PARAMETERS))
    assert outgoing.answer.vectors == (PARAMETERS, STATIC)
    assert b"".join(outgoing.bodies) == np.float32(1).tobytes() + b"\x03"


# --- the server ---


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def unit(vector: str = PARAMETERS, **fields: Any) -> Units:
    values = {"seq": 1, "first": 0, "count": 1, "codec": "fp32", "turn": 0, **fields}
    return Units(vector=vector, **values)


@pytest.mark.parametrize(
    ("message", "bodies"),
    [
        (update(), [body(1, 2, 3, 4)]),
        (update(vectors=()), []),
        (update(vectors=(PARAMETERS,)), []),
        (unit(), [body(1, 2, 3)]),
        (unit(), [body(1, 2, 3, 4), body(1)]),
        (unit(), []),
        (unit(first=1), [body(1)]),
        (unit(count=2), [body(1, 2, 3, 4)]),
        (unit(STATIC), [memoryview(b"abc")]),
        (unit("x"), [body(1)]),
        (unit(codec="gzip"), [body(1, 2, 3, 4)]),
        (unit(packed=True), [body(1)]),
        (unit(BUFFERS, codec="int8"), [body(1)]),
        (unit(seq=0), [body(1, 2, 3, 4)]),
        (unit(turn=-1), [body(1, 2, 3, 4)]),
        (Request("fetch", 1, -1, (PARAMETERS,)), [body(1)]),
        (Request("fetch", 1, -1, ("x",)), []),
        (Publish((PARAMETERS,)), [body(1)]),
        (Publish((PARAMETERS,)), []),
        (Publish(("x",)), [body(1)]),
        (Read((PARAMETERS,)), []),
        (decision(1, 0), []),
        (Assign(layout_of(), 0, 1, "local", {}), []),
        (Request("update", 0, 0, (PARAMETERS, BUFFERS)), []),
        (Request("update", 1, -2, (PARAMETERS, BUFFERS)), []),
        (update(steps=-1), []),
    ],
)
def test_what_a_worker_may_not_send_ends_its_connection_and_no_other(
    bench: Bench, message: Message, bodies: list[memoryview]
) -> None:
    bench.assign(layout_of())
    with pytest.raises(ConnectionError):
        bench.worker(0).call(message, bodies).result(SOON_S)
    sent(bench.worker(1), 1, body(1, 2, 3, 4), body(1, 2), names=(PARAMETERS, BUFFERS))
    bench.log.wait_for(1)
    assert [receipt.key for receipt in bench.log.receipts] == [Key(1, 1, 1)]


def test_before_it_is_assigned_a_shard_refuses_and_takes_no_bytes(bench: Bench) -> None:
    with pytest.raises(RefusedError) as caught:
        bench.worker().call(Request("fetch", 1, -1, (PARAMETERS,))).result(SOON_S)
    assert caught.value.code == "not_assigned"
    with pytest.raises(ConnectionError):
        bench.worker().call(unit(), [body(1, 2, 3, 4)]).result(SOON_S)
    with pytest.raises(RefusedError):
        bench.connect(Identity(Role.OBSERVER)).call(Read((PARAMETERS,))).result(SOON_S)


def test_another_layout_is_refused_and_the_same_one_is_fine(bench: Bench) -> None:
    bench.assign(layout_of())
    bench.assign(layout_of())
    with pytest.raises(RefusedError, match="another layout"):
        bench.assign(layout_of(5))


def test_a_request_sent_again_is_answered_where_it_was_last_asked(bench: Bench) -> None:
    bench.assign(layout_of(1, 0, 0))
    values = Values()
    first, second = bench.worker(), bench.connect(Identity(Role.WORKER, 0, 1), values)
    sent(first, 1, body(3))
    bench.log.wait_for(1)
    call = sent(second, 1, body(3))
    # One connection's frames are taken in order, so the repeated request is in, too.
    assert second.call(Publish(())).result(SOON_S) == Done()
    key = Key(0, 1, 1)
    bench.coordinator.send(decision(1, 1, parts=merge(1.0), replies=replies(key)))
    answer = call.result(SOON_S)
    assert isinstance(answer, Answer)
    assert (answer.content, answer.vectors) == ("weights", (PARAMETERS,))
    assert values_of([memoryview(values.received)]) == [3.0]
    assert [receipt.key for receipt in bench.log.receipts] == [key]
    with pytest.raises(RefusedError, match="request 1 was answered before"):
        second.call(update(1, (PARAMETERS,))).result(SOON_S)


def test_a_packed_unit_of_zeros_has_no_bytes_and_is_one(bench: Bench) -> None:
    bench.assign(layout_of(4, 0, 0))
    worker = bench.worker()
    worker.stream([Frame(unit(packed=True))])
    worker.call(update(1, (PARAMETERS,)))
    bench.log.wait_for(1)
    assert bench.log.receipts[0].finite
    worker.stream([Frame(unit())])
    fetch = worker.call(Request("fetch", 2, -1, (PARAMETERS,)))
    with pytest.raises(ConnectionError):
        fetch.result(SOON_S)


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
    bench.assign(layout_of(1 << 18, 0, 0), cut=Cut(1, unit=1 << 18))
    half = bench.worker()
    half.call(update(1, (PARAMETERS,)))
    assert half.flush(SOON_S)
    message = encode(unit())
    header = wire.pack_header(wire.Header(0, False, len(message), 1 << 20, 0))
    half._sock.sendall(header + message + bytes(1 << 19))
    half.close()
    sent(bench.worker(1), 1, memoryview(bytes(1 << 20)))
    bench.log.wait_for(1)
    assert [receipt.key.worker for receipt in bench.log.receipts] == [1]


def test_an_answer_for_a_worker_that_is_gone_disturbs_nobody(bench: Bench) -> None:
    bench.assign(layout_of(1, 0, 0))
    gone, here = bench.worker(0), bench.worker(1)
    sent(gone, 1, body(1))
    bench.log.wait_for(1)
    gone.close()
    gone.join(SOON_S)
    call = sent(here, 1, body(3))
    bench.log.wait_for(2)
    keys = Key(0, 1, 1), Key(1, 1, 1)
    bench.coordinator.send(decision(1, 1, parts=merge(0.5, 0.5), replies=replies(*keys)))
    call.result(SOON_S)
    assert not bench.log.ended.is_set()
