"""How a model's vectors are cut into shards, and how two layouts are told apart."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.plane.layout import NUMPY_TYPES, Layout, Tensor, Vector, accumulator, cut
from cadenza.plane.messages import Join, decode, encode

W = Tensor("w", "float32", (2, 3), "parameters.float32", 0)
B = Tensor("b", "float32", (3,), "parameters.float32", 6)
LAYOUT = Layout(
    (Vector("parameters", "float32", 9), Vector("buffers", "float32", 4), Vector("static", "uint8", 8)),
    (W, B),
    ("w", "b"),
    (("tied", "w"),),
)


@settings(deadline=None)
@given(length=st.integers(0, 10**12), parts=st.integers(1, 1_000))
def test_pieces_are_contiguous_complete_and_nearly_equal(length: int, parts: int) -> None:
    pieces = [cut(length, part, parts) for part in range(parts)]
    assert pieces[0][0] == 0
    assert pieces[-1][1] == length
    assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))
    sizes = [stop - start for start, stop in pieces]
    assert max(sizes) - min(sizes) <= 1


def test_more_shards_than_elements_leave_some_with_nothing() -> None:
    lengths = [[part.length for part in LAYOUT.slices(shard, 20, LAYOUT.every())] for shard in range(20)]
    assert [sum(column) for column in zip(*lengths, strict=True)] == [9, 4, 8]
    assert [0, 0, 0] in lengths


def test_slices_come_in_layout_order_whatever_the_order_asked_for() -> None:
    names = ("static.uint8", "parameters.float32")
    slices = LAYOUT.slices(1, 2, names)
    assert [(part.vector, part.start, part.stop) for part in slices] == [
        ("parameters.float32", 4, 9),
        ("static.uint8", 4, 8),
    ]
    assert [part.size_bytes for part in slices] == [20, 4]
    assert LAYOUT.slices(0, 1, ("unknown",)) == []


def test_static_vectors_do_not_travel() -> None:
    assert LAYOUT.travelling() == ("parameters.float32", "buffers.float32")
    assert LAYOUT.every() == ("parameters.float32", "buffers.float32", "static.uint8")


@pytest.mark.parametrize("dtype", sorted(NUMPY_TYPES))
def test_sums_are_kept_at_least_as_precisely_as_values(dtype: str) -> None:
    kept = accumulator(dtype)
    assert kept.name == ("float64" if dtype == "float64" else "float32")
    assert kept.itemsize >= NUMPY_TYPES[dtype].itemsize


def changed(**fields: Any) -> Layout:
    return msgspec.structs.replace(LAYOUT, **fields)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (changed(tensors=(W,)), "1 tensors instead of 2"),
        (changed(tensors=(W, B, B)), "3 tensors instead of 2"),
        (
            changed(tensors=(msgspec.structs.replace(W, shape=(3, 2)), B)),
            "w float32[3, 2] instead of w float32[2, 3]",
        ),
        (
            changed(tensors=(W, msgspec.structs.replace(B, dtype="float16"))),
            "b float16[3] instead of b float32[3]",
        ),
        (
            changed(tensors=(W, msgspec.structs.replace(B, vector="static.uint8", offset=0))),
            "b is at 0 of static.uint8 instead of 6 of parameters.float32",
        ),
        (changed(trainable=("w",)), "another set of trainable parameters (b)"),
        (changed(aliases=()), "other ties between tensors"),
    ],
    ids=["fewer", "more", "shape", "dtype", "role", "trainable", "ties"],
)
def test_the_first_difference_is_told(other: Layout, says: str) -> None:
    assert LAYOUT.difference(other) == says
    assert other != LAYOUT
    assert LAYOUT.digest() != other.digest()


def test_a_layout_is_the_same_after_the_wire() -> None:
    arrived = decode(encode(Join(LAYOUT, "node", "cpu")))
    assert isinstance(arrived, Join)
    assert arrived.layout == LAYOUT
    assert arrived.layout.digest() == LAYOUT.digest()


@pytest.mark.parametrize(
    ("role", "dtype", "length"),
    [
        ("parameters", "complex64", 1),
        ("parameters", "uint8", 1),
        ("static", "float32", 1),
        ("buffers", "float32", -1),
        ("optimizer", "float32", 1),
    ],
)
def test_a_vector_that_cannot_be_does_not_arrive(role: Any, dtype: str, length: int) -> None:
    message = {
        "type": "Join",
        "node": "",
        "device": "",
        "layout": {
            "vectors": [{"role": role, "dtype": dtype, "length": length}],
            "tensors": [],
            "trainable": [],
        },
    }
    with pytest.raises(msgspec.ValidationError, match=r"layout\.vectors"):
        decode(msgspec.msgpack.encode(message))
