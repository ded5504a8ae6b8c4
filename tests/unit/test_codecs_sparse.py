"""Sparse values come over to the bit, in fewer bytes than dense ones, or not at all."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cadenza.plane.codecs.sparse import pack, unpack
from cadenza.plane.wire import ProtocolError

TYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


def sparse(length: int, share: float, dtype: Any, seed: int = 0) -> NDArray[Any]:
    random = np.random.default_rng(seed)
    return np.where(random.random(length) < share, random.normal(size=length), 0).astype(dtype)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(TYPES),
    st.integers(0, 300),
    st.sampled_from([0.0, 0.01, 0.3, 0.6, 1.0]),
    st.integers(0, 999),
)
def test_packing_is_lossless_or_not_worth_it(dtype: Any, length: int, share: float, seed: int) -> None:
    values = sparse(length, share, dtype, seed)
    count = int(np.count_nonzero(values.view(f"u{values.itemsize}")))
    packed = pack(values)
    assert (packed is None) == (count * (2 + values.itemsize) >= values.nbytes)
    if packed is not None:
        assert packed.nbytes == count * (2 + values.itemsize)
        out = np.ones(length, dtype)
        unpack(packed, length, out)
        assert out.tobytes() == values.tobytes()


def test_no_values_at_all_need_no_bytes() -> None:
    packed = pack(np.zeros(100, np.float32))
    assert packed is not None
    assert packed.nbytes == 0
    out = np.ones(100, np.float32)
    unpack(packed, 100, out)
    assert not out.any()


def test_what_is_no_number_and_negative_zeros_come_over() -> None:
    values = np.zeros(20, np.float32)
    values[[3, 5, 7]] = [-0.0, np.nan, np.inf]
    packed = pack(values)
    assert packed is not None
    out = np.empty(20, np.float32)
    unpack(packed, 20, out)
    assert out.tobytes() == values.tobytes()


def test_long_runs_have_wide_indices_and_accumulators_may_be_wider() -> None:
    values = sparse(70_000, 0.001, ml_dtypes.bfloat16)
    packed = pack(values)
    assert packed is not None
    assert packed.nbytes == 6 * np.count_nonzero(values)
    out = np.empty(70_000, np.float32)
    unpack(packed, 70_000, out, values.dtype)
    assert np.array_equal(out, values.astype(np.float32))


def entries(indices: list[int], length: int = 10) -> memoryview:
    values = np.ones(len(indices), np.float32)
    return memoryview(np.array(indices, "<u2").tobytes() + values.tobytes())


FORGED_INDICES = [[10], [3, 3], [4, 3], [65_535], list(range(7)), list(range(10))]


@pytest.mark.parametrize(
    "data",
    [*map(entries, FORGED_INDICES), entries([1])[:5], entries([1, 2])[1:]],
    ids=lambda data: data.hex(),
)
def test_forged_bytes_are_refused(data: memoryview) -> None:
    with pytest.raises(ProtocolError, match="sparse values"):
        unpack(data, 10, np.empty(10, np.float32))


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=60), st.integers(0, 12))
def test_garbage_is_refused_or_unpacked(data: bytes, length: int) -> None:
    out = np.full(length, 7, np.float32)
    try:
        unpack(memoryview(data), length, out)
    except ProtocolError:
        assert (out == 7).all(), "nothing is written before everything is checked"
