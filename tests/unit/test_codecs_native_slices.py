"""Each slice codec: exact sizes, exact values where it promises them, and no trust in the bytes of a peer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cadenza.plane.codecs import AUTO, CODECS, SliceCodec, as_bytes
from cadenza.plane.layout import NUMPY_TYPES, Slice, accumulator
from cadenza.plane.wire import ProtocolError

FLOATS = sorted(set(NUMPY_TYPES) - {"uint8"})


def part_of(length: int, dtype: str = "float32") -> Slice:
    return Slice(f"parameters.{dtype}", dtype, 5, 5 + length)


def values_of(length: int, dtype: str) -> NDArray[Any]:
    return np.random.default_rng(length).normal(size=length).astype(NUMPY_TYPES[dtype])


@pytest.fixture(params=sorted(CODECS))
def codec(request: pytest.FixtureRequest) -> SliceCodec:
    return CODECS[request.param]


def test_every_codec_is_known_by_its_own_name() -> None:
    assert {codec.name for codec in CODECS.values()} == set(CODECS)
    assert AUTO in CODECS


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [0, 1, 2, 1_001])
def test_an_encoded_slice_has_the_size_that_was_announced(codec: SliceCodec, dtype: str, length: int) -> None:
    part = part_of(length, dtype)
    data = codec.encode(values_of(length, dtype), part)
    assert data.nbytes == codec.size_bytes(part)
    assert data.format == "B"
    decoded = codec.decode(data, part)
    assert decoded.shape == (length,)
    assert decoded.dtype == accumulator(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(deadline=None)
@given(extra=st.integers(-64, 64).filter(bool), seed=st.integers(0, 99))
def test_bytes_of_another_size_are_refused(dtype: str, extra: int, seed: int) -> None:
    for codec in CODECS.values():
        part = part_of(20, dtype)
        size = max(codec.size_bytes(part) + extra, 0)
        data = memoryview(np.random.default_rng(seed).bytes(size))
        with pytest.raises(ProtocolError, match=f"{size} bytes for {part.vector}"):
            codec.decode(data, part)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fp32_brings_every_value_over_exactly(dtype: str) -> None:
    codec, part = CODECS["fp32"], part_of(300, dtype)
    values = values_of(300, dtype)
    values[:4] = [0.0, -0.0, np.inf, np.nan]
    decoded = codec.decode(codec.encode(values, part), part)
    assert np.array_equal(decoded.astype(values.dtype), values, equal_nan=True)
    assert np.signbit(decoded[1])
    assert codec.size_bytes(part) == 300 * NUMPY_TYPES[dtype].itemsize


def test_fp32_takes_strided_values_and_other_types() -> None:
    codec, part = CODECS["fp32"], part_of(4)
    for values in (np.arange(8.0)[::2], np.arange(0, 8, 2, dtype=np.float32), np.arange(8.0)[::-2][::-1] - 1):
        assert list(codec.decode(codec.encode(values, part), part)) == [0.0, 2.0, 4.0, 6.0]


def test_fp32_does_not_copy_what_is_already_in_wire_form() -> None:
    values = np.arange(4, dtype=np.float32)
    data = CODECS["fp32"].encode(values, part_of(4))
    assert np.shares_memory(np.frombuffer(data, np.uint8), values)
    assert np.shares_memory(CODECS["fp32"].decode(data, part_of(4)), values)


def test_static_bytes_stay_bytes() -> None:
    part = Slice("static.uint8", "uint8", 0, 3)
    decoded = CODECS["fp32"].decode(memoryview(b"\x00\x7f\xff"), part)
    assert decoded.dtype == np.uint8
    assert list(decoded) == [0, 127, 255]


@pytest.mark.parametrize("dtype", sorted(NUMPY_TYPES))
def test_bytes_of_an_array_are_a_view_even_if_there_are_none(dtype: str) -> None:
    values = np.ones(3, NUMPY_TYPES[dtype])
    view = as_bytes(values)
    assert bytes(view) == values.tobytes()
    view[:] = bytes(view.nbytes)
    assert not values.astype(np.float64).any()
    assert as_bytes(values[:0]).nbytes == 0
