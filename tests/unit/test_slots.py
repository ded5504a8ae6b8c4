"""One worker's contribution on a shard: what counts of what comes again, late, packed, encoded, broken or forged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cadenza.plane import holdings as holdings_module
from cadenza.plane.codecs import Turn, codec_named, sparse
from cadenza.plane.holdings import Holdings
from cadenza.plane.layout import NUMPY_TYPES, Cut, as_bytes
from cadenza.plane.messages import Request, Units
from cadenza.plane.wire import ProtocolError
from cadenza_service.servers.slots import Slot
from tests.unit.shards import BUFFERS, PARAMETERS, STATIC, body, fresh, hand_over, layout_of, update

Array = NDArray[Any]
SEED = 5
UNIT = 3


def slot_of(parameters: int = 8, buffers: int = 2, dtype: str = "float32", groups: int = 1) -> Slot:
    """Units of ``parameters``: 0 to 3, 3 to 6, 6 to 8."""
    layout = layout_of(parameters, buffers, 3, dtype)
    return Slot(Holdings(layout, Cut(1, UNIT), 0, groups), worker=2, incarnation=1, seed=SEED)


def units(first: int = 0, count: int = 1, *, seq: int = 1, vector: str = PARAMETERS, **fields: Any) -> Units:
    return Units(seq, vector, first, count, fields.pop("codec", "fp32"), fields.pop("turn", 0), **fields)


def fill(slot: Slot, seq: int = 1, value: float = 1.0) -> None:
    """All units of an update."""
    hand_over(slot, units(0, 3, seq=seq), body(*[value] * 8))
    hand_over(slot, units(seq=seq, vector=BUFFERS), body(value, value))


def ask(slot: Slot, seq: int = 1) -> None:
    """What the core does with a request."""
    if seq > slot.seq:
        slot.begin(seq)
    slot.request = update(seq)


# --- what counts ---


def test_units_come_in_any_order_and_the_request_before_or_after_them() -> None:
    for at in range(5):
        slot = slot_of()
        frames = [
            (units(2), body(7, 8)),
            (units(vector=BUFFERS), body(9, 9)),
            (units(0), body(1, 2, 3)),
            (units(1), body(4, 5, 6)),
        ]
        for number, (message, data) in enumerate([*frames[:at], (None, None), *frames[at:]]):
            if message is None or data is None:
                ask(slot)
            else:
                hand_over(slot, message, data)
            assert slot.news() == ([(0, True)] if number == 4 else [])
        assert slot.values[PARAMETERS].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        assert slot.values[BUFFERS].tolist() == [9, 9]


def test_before_the_request_the_later_value_counts_and_after_it_the_first() -> None:
    slot = slot_of()
    hand_over(slot, units(0, 2), body(*[1.0] * 6))
    hand_over(slot, units(1), body(5, 5, 5))
    ask(slot)
    hand_over(slot, units(0), body(7, 7, 7))
    assert slot.values[PARAMETERS].tolist() == [1, 1, 1, 5, 5, 5, 0, 0]
    hand_over(slot, units(2), body(2, 2))
    hand_over(slot, units(2), body(3, 3))
    assert slot.values[PARAMETERS].tolist() == [1, 1, 1, 5, 5, 5, 2, 2]


def test_what_was_told_is_not_told_again() -> None:
    slot = slot_of()
    ask(slot)
    fill(slot)
    assert slot.news() == [(0, True)]
    fill(slot, value=np.nan)
    assert slot.news() == []
    assert np.isfinite(slot.values[PARAMETERS]).all()


def test_an_answered_or_older_contribution_is_received_and_forgotten() -> None:
    slot = slot_of()
    ask(slot, 4)
    fill(slot, 4)
    slot.finish()
    for seq in (4, 3, 1):
        fill(slot, seq, value=9.0)
        assert slot.news() == []
    assert (slot.values[PARAMETERS] == 1.0).all()
    fill(slot, 5, value=2.0)
    ask(slot, 5)
    assert slot.news() == [(0, True)]


def test_a_new_contribution_waits_until_the_latest_one_is_answered() -> None:
    slot = slot_of()
    ask(slot)
    fill(slot)
    with pytest.raises(ProtocolError, match="request 2 before request 1 was answered"):
        hand_over(slot, units(seq=2), body(5, 5, 5))
    assert (slot.values[PARAMETERS] == 1.0).all()


def test_a_contribution_that_was_given_up_before_its_request_leaves_nothing() -> None:
    slot = slot_of()
    hand_over(slot, units(0, 2, seq=1), body(*[np.nan] * 6))
    hand_over(slot, units(2, seq=2), body(1, 1))
    hand_over(slot, units(seq=2, vector=BUFFERS), body(1, 1))
    ask(slot, 2)
    assert slot.news() == []
    hand_over(slot, units(0, 2, seq=2), body(*[1.0] * 6))
    assert slot.news() == [(0, True)]


def test_a_unit_that_is_cut_off_while_it_comes_again_does_not_count() -> None:
    slot = slot_of()
    fill(slot)
    (target,) = slot.destination(units(1), 12, fresh)
    target[:5] = b"wreck"
    ask(slot)
    assert slot.news() == []
    hand_over(slot, units(1), body(4, 5, 6))
    assert slot.news() == [(0, True)]
    assert slot.values[PARAMETERS].tolist() == [1, 1, 1, 4, 5, 6, 1, 1]


# --- groups ---


def test_each_group_is_told_once_and_by_itself() -> None:
    slot = slot_of(groups=2)  # Units 0, 1 and 2, buffers.
    hand_over(slot, units(0, 2), body(*[1.0] * 6))
    assert slot.news() == []
    ask(slot)
    assert slot.news() == [(0, True)]
    hand_over(slot, units(2), body(np.inf, 1))
    assert slot.news() == []
    hand_over(slot, units(vector=BUFFERS), body(1, 1))
    assert slot.news() == [(1, False)]
    assert slot.news() == []


def test_a_group_without_units_is_complete_with_the_request() -> None:
    slot = slot_of(parameters=3, buffers=0, groups=3)  # One unit, in the last group.
    ask(slot)
    assert slot.news() == [(0, True), (1, True)]
    hand_over(slot, units(0), body(1, 2, 3))
    assert slot.news() == [(2, True)]


@pytest.mark.parametrize("kind", ["fetch", "abstain"])
def test_a_request_without_values_is_complete_at_once_in_one_group(kind: Any) -> None:
    slot = slot_of(groups=3)
    slot.begin(1)
    slot.request = Request(kind, 1, 0, ())
    assert slot.news() == [(0, True)]
    assert slot.news() == []


# --- values that are not finite ---


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_value_that_is_not_finite_is_seen_in_every_type(bad: float, dtype: str) -> None:
    slot = slot_of(3, 0, dtype)
    vector = f"parameters.{dtype}"
    hand_over(slot, units(vector=vector), body(1, bad, 1, dtype=dtype))
    ask(slot)
    assert slot.news() == [(0, False)]


def test_a_value_that_is_finite_when_it_comes_again_is() -> None:
    slot = slot_of()
    fill(slot, value=np.nan)
    fill(slot)
    ask(slot)
    assert slot.news() == [(0, True)]


@pytest.mark.parametrize("codec", ["int8", "topk:0.4", "qsgd", "sign", "bf16"])
def test_what_is_not_finite_is_seen_through_a_codec(codec: str) -> None:
    slot = slot_of()
    fill(slot)
    hand_over(slot, units(0, codec=codec), encoded(np.array([1, np.nan, 1], np.float32), codec))
    ask(slot)
    assert slot.news() == [(0, False)]


# --- other forms ---


def encoded(values: Array, codec_name: str, number: int = 0, turn: int = 0, worker: int = 2) -> memoryview:
    unit = Holdings(layout_of(8, 2, 3), Cut(1, UNIT), 0).places[number].unit
    codec = codec_named(codec_name)
    out = memoryview(bytearray(codec.size_bytes(unit, turn)))
    codec.encode(values, unit, Turn(SEED, turn, worker), out)
    return out


@pytest.mark.parametrize("codec", ["int8", "topk:0.4", "qsgd", "randomk:0.5", "e3m0"])
def test_encoded_units_are_decoded_as_the_sender_meant_them(codec: str) -> None:
    slot = slot_of()
    values = np.random.default_rng(1).normal(size=8).astype(np.float32)
    expected = np.empty(8, np.float32)
    data = b""
    for place in slot._holdings.places[:3]:
        span = slice(place.start, place.stop)
        piece = encoded(values[span], codec, place.number, turn=6)
        codec_named(codec).decode(piece, place.unit, Turn(SEED, 6, 2), expected[span])
        data += bytes(piece)
    hand_over(slot, units(0, 3, codec=codec, turn=6), data)
    assert slot.values[PARAMETERS].dtype == np.float32
    assert np.array_equal(slot.values[PARAMETERS], expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_vectors_of_16_bits_become_float32_whatever_form_they_come_in(dtype: str) -> None:
    values = np.array([1.5, -2.0, 0.0], NUMPY_TYPES[dtype])
    vector = f"parameters.{dtype}"
    packed = sparse.pack(np.array([0, 0, 3], NUMPY_TYPES[dtype]))
    assert packed is not None
    for message, data, expected in (
        (units(vector=vector), as_bytes(values), [1.5, -2, 0]),
        (units(vector=vector, packed=True), packed, [0, 0, 3]),
    ):
        slot = slot_of(3, 0, dtype)
        hand_over(slot, message, data)
        assert slot.values[vector].dtype == np.float32
        assert slot.values[vector].tolist() == expected
        assert slot.packed.tolist() == [message.packed]


@given(
    values=st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.0, -0.0, 2.5]), min_size=UNIT, max_size=UNIT),
    again=st.booleans(),
)
def test_a_packed_unit_is_what_was_packed(values: list[float], again: bool) -> None:
    slot = slot_of()
    fill(slot, value=7.0)
    array = np.array(values, np.float32)
    packed = sparse.pack(array)
    if packed is None:
        return
    hand_over(slot, units(0, packed=True), packed)
    assert slot.values[PARAMETERS][:UNIT].tobytes() == array.tobytes()
    assert slot.packed.tolist() == [True, False, False, False]
    if again:
        hand_over(slot, units(0), as_bytes(array))
        assert not slot.packed.any()


def test_packed_marks_do_not_outlive_their_contribution() -> None:
    slot = slot_of()
    fill(slot)
    hand_over(slot, units(0, packed=True), b"")
    ask(slot)
    assert slot.packed.tolist() == [True, False, False, False]
    slot.finish()
    fill(slot, seq=2)
    assert not slot.packed.any()


# --- what no worker sends ---


@pytest.mark.parametrize(
    ("message", "size", "says"),
    [
        (units(vector="parameters.float64"), 24, "which are not here"),
        (units(vector=STATIC), 3, "which are not here"),
        (units(vector=""), 0, "which are not here"),
        (units(3), 8, "units 3 to 4 of parameters.float32, which are not here"),
        (units(2, 2), 16, "which are not here"),
        (units(2**60), 12, "which are not here"),
        (units(0, 2**60), 12, "which are not here"),
        (units(0), 8, "8 bytes for 1 units of parameters.float32; 12 are expected"),
        (units(0), 16, "12 are expected"),
        (units(0), 2**60, "12 are expected"),
        (units(2), 12, "8 are expected"),
        (units(0, 3), 12, "32 are expected"),
        (units(0), 0, "12 are expected"),
        (units(codec="gzip"), 12, "units in an unknown codec"),
        (units(codec="topk:7"), 12, "units in an unknown codec"),
        (units(codec=""), 12, "units in an unknown codec"),
        (units(codec="int8"), 12, "are expected"),
        (units(vector=BUFFERS, codec="int8"), 6, "only parameters are encoded"),
        (units(packed=True), 13, "13 packed bytes for 1 units"),
        (units(packed=True), 2**60, "packed bytes for 1 units"),
        (units(0, 2, packed=True), 6, "6 packed bytes for 2 units"),
        (units(codec="int8", packed=True), 6, "6 packed bytes for 1 units"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused_before_any_memory_is_asked_for(
    message: Units, size: int, says: str
) -> None:
    slot = slot_of()

    def never(size: int) -> memoryview:
        raise AssertionError("memory was asked for")

    for seq in (1, 9):
        with pytest.raises(ProtocolError, match=says):
            slot.destination(Units(seq, *list(units_fields(message))), size, never)
    assert slot.seq == 0
    fill(slot)
    ask(slot)
    assert slot.news() == [(0, True)]


def units_fields(message: Units) -> tuple[Any, ...]:
    """All but the sequence number."""
    return (message.vector, message.first, message.count, message.codec, message.turn, message.packed)


@pytest.mark.parametrize(
    ("message", "data"),
    [
        (units(packed=True), b"\x03\x00" + np.float32(1).tobytes()),
        (units(packed=True), b"\xff\xff" + np.float32(1).tobytes()),
        (units(packed=True), b"\x00"),
        (units(packed=True), b"\x00" * 7),
        (units(packed=True), b"\x00" * 12),
        (units(codec="topk:0.4"), b"\xff" * 12),
    ],
    ids=["beyond", "far_beyond", "byte", "odd", "as_long_as_dense", "codec"],
)
def test_bytes_that_no_sender_writes_end_the_frame(message: Units, data: bytes) -> None:
    slot = slot_of()
    if message.codec != "fp32":
        data = data[: len(encoded(np.zeros(3, np.float32), message.codec))]
    with pytest.raises(ProtocolError):
        hand_over(slot, message, data)
    ask(slot)
    assert slot.news() == []


def test_several_units_in_one_frame_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings_module, "MOST_RUN_ELEMENTS", 5)
    slot = slot_of()
    with pytest.raises(ProtocolError, match="6 values in one frame; at most 5 are allowed"):
        hand_over(slot, units(0, 2), body(*[1.0] * 6))
    hand_over(slot, units(1, 2), body(*[1.0] * 5))


@pytest.mark.parametrize("turn", [2**31, 2**63, 2**64 - 1])
@pytest.mark.parametrize("codec", ["int8", "topk", "qsgd", "randomk", "dgc", "powersgd", "terngrad"])
def test_any_turn_that_the_wire_can_carry_is_one(codec: str, turn: int) -> None:
    data = encoded(np.ones(3, np.float32), codec, turn=turn)
    slot = slot_of()
    hand_over(slot, units(0, codec=codec, turn=turn), data)
    assert np.isfinite(slot.values[PARAMETERS]).all()
