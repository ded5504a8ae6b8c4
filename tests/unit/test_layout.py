"""How a model's vectors are cut into units, whose they are, and how two layouts are told apart."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.plane.layout import (
    NUMPY_TYPES,
    Cut,
    Layout,
    Matrix,
    Role,
    Tensor,
    Vector,
    accumulator,
    rows_between,
)
from cadenza.plane.messages import Join, decode, encode

W = Tensor("w", "float32", (2, 3), "parameters.float32", 0)
B = Tensor("b", "float32", (3,), "parameters.float32", 6)
LAYOUT = Layout(
    (Vector("parameters", "float32", 9), Vector("buffers", "float32", 4), Vector("static", "uint8", 8)),
    (W, B),
    ("w", "b"),
    (("tied", "w"),),
)


cuts = st.builds(
    Cut, shards=st.integers(1, 40), unit=st.one_of(st.integers(1, 9), st.just(16_384)), striped=st.booleans()
)
lengths = st.one_of(st.integers(0, 60), st.integers(0, 3_000))
roles = st.sampled_from(["parameters", "buffers", "static"])


def vector_of(role: Role, length: int) -> Vector:
    return Vector(role, "uint8" if role == "static" else "float32", length)


@given(cut=cuts, length=lengths, role=roles)
def test_units_are_contiguous_complete_and_within_their_size(cut: Cut, length: int, role: Role) -> None:
    vector = vector_of(role, length)
    units = cut.units(vector)
    assert [unit.number for unit in units] == list(range(len(units)))
    assert {unit.vector for unit in units} <= {vector.name}
    edges = [0, *(unit.stop for unit in units)]
    assert edges[-1] == length
    assert [unit.start for unit in units] == edges[:-1]
    sizes = [unit.length for unit in units]
    assert all(0 < size <= cut.unit for size in sizes)
    assert all(size == sizes[0] for size in sizes[:-1])
    assert not sizes or sizes[-1] <= sizes[0]


@given(cut=cuts, length=lengths, role=roles)
def test_every_unit_has_one_owner_and_both_ends_agree_on_it(cut: Cut, length: int, role: Role) -> None:
    vector = vector_of(role, length)
    owned = [cut.owned(shard, vector) for shard in range(cut.shards)]
    assert sorted(unit for units in owned for unit in units) == cut.units(vector)
    for unit in cut.units(vector):
        shard, position = cut.owner(vector, unit.number)
        assert owned[shard][position] == unit
    consecutive = not cut.striped or role == "static"
    for shard, units in enumerate(owned):
        numbers = [unit.number for unit in units]
        step = 1 if consecutive else cut.shards
        assert all(after - before == step for before, after in itertools.pairwise(numbers))
        assert consecutive or all(number % cut.shards == shard for number in numbers)


@given(cut=cuts, length=lengths, role=roles)
def test_no_shard_exceeds_its_share_by_an_element_for_each_of_its_units(
    cut: Cut, length: int, role: Role
) -> None:
    vector = vector_of(role, length)
    sizes = [sum(unit.length for unit in cut.owned(shard, vector)) for shard in range(cut.shards)]
    units_of_a_shard = -(-length // (cut.shards * cut.unit))
    assert sum(sizes) == length
    assert max(sizes) < length / cut.shards + units_of_a_shard or not length


@given(cut=cuts, length=lengths, role=roles)
def test_the_pieces_of_all_slices_are_the_vector(cut: Cut, length: int, role: Role) -> None:
    vector = vector_of(role, length)
    layout = Layout((vector,), (), ())
    whole = np.arange(length)
    seen = np.zeros(length, np.int64)
    for shard in range(cut.shards):
        (part,) = layout.slices(cut, shard, layout.every())
        pieces = part.pieces(whole)
        assert sum(len(piece) for piece in pieces) == part.length
        assert part.size_bytes == part.length * vector.itemsize
        assert all(before[-1] + 1 != after[0] for before, after in itertools.pairwise(pieces))
        for piece in pieces:
            assert np.shares_memory(piece, whole)
            seen[piece] += 1
    assert (seen == 1).all()


def test_more_shards_than_elements_leave_some_with_nothing() -> None:
    cut = Cut(20)
    owned = [[part.length for part in LAYOUT.slices(cut, shard, LAYOUT.every())] for shard in range(20)]
    assert [sum(column) for column in zip(*owned, strict=True)] == [9, 4, 8]
    assert [0, 0, 0] in owned


def test_slices_come_in_layout_order_whatever_the_order_asked_for() -> None:
    names = ("static.uint8", "parameters.float32")
    slices = LAYOUT.slices(Cut(2), 1, names)
    assert [(part.vector, [(unit.start, unit.stop) for unit in part.units]) for part in slices] == [
        ("parameters.float32", [(5, 9)]),
        ("static.uint8", [(4, 8)]),
    ]
    assert [part.size_bytes for part in slices] == [16, 4]
    assert LAYOUT.slices(Cut(1), 0, ("unknown",)) == []


def test_in_sync_mode_each_shard_owns_some_of_every_part_but_of_static_vectors_one() -> None:
    layout = Layout((Vector("parameters", "float32", 12), Vector("static", "uint8", 12)), (), ())
    slices = layout.slices(Cut(2, unit=3, striped=True), 1, layout.every())
    assert [[(unit.start, unit.stop) for unit in part.units] for part in slices] == [
        [(3, 6), (9, 12)],
        [(6, 9), (9, 12)],
    ]


@given(
    matrices=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 7)), max_size=4),
    cut=cuts,
)
def test_rows_are_whole_and_lie_in_their_unit(matrices: list[tuple[int, int, int]], cut: Cut) -> None:
    placed, offset = [], 0
    for gap, rows, columns in matrices:
        placed.append(Matrix(offset + gap, rows, columns))
        offset += gap + rows * columns
    vector = Vector("parameters", "float32", offset)
    for unit in cut.units(vector, placed):
        starts = [matrix.offset + row * matrix.columns for matrix in placed for row in range(matrix.rows)]
        widths = [matrix.columns for matrix in placed for _ in range(matrix.rows)]
        whole = [
            (start - unit.start, width)
            for start, width in zip(starts, widths, strict=True)
            if unit.start <= start and start + width <= unit.stop
        ]
        told = [(at + row * columns, columns) for at, rows, columns in unit.matrices for row in range(rows)]
        assert told == whole
        assert unit.matrices == rows_between(placed, unit.start, unit.stop)


def test_units_know_their_rows_only_where_the_codec_needs_them() -> None:
    assert [unit.matrices for unit in LAYOUT.units(Cut(1, rows=True), "parameters.float32")] == [((0, 2, 3),)]
    assert [unit.matrices for unit in LAYOUT.units(Cut(1), "parameters.float32")] == [()]


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
