"""Every codec keeps the contract: exact sizes, no trust in a peer's bytes, no failure on any value."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cadenza.plane.codecs import CODEC_NAMES, Codec, Turn, check_codec, codec_named
from cadenza.plane.codecs.sparsified import random_places
from cadenza.plane.layout import NUMPY_TYPES, accumulator
from cadenza.plane.units import Unit
from cadenza.plane.wire import ProtocolError

TURN = Turn(seed=7, round=1_000, worker=2)
NAMES = [
    *CODEC_NAMES,
    "qsgd:1",
    "qsgd:127",
    "qsgd:1000",
    "topk:1",
    "topk:0.3",
    "randomk:1",
    "dgc:0.5",
    "powersgd:1",
]
LENGTHS = [0, 1, 2, 9, 1_023, 1_024, 1_025, 3_000]
MATRIX = (3, 20, 30)
"""Offset, rows and columns of the matrix in units that are long enough for it."""


def unit_of(length: int, dtype: str = "float32") -> Unit:
    offset, rows, columns = MATRIX
    return Unit(
        f"parameters.{dtype}", 4, 50, 50 + length, (MATRIX,) if length >= offset + rows * columns else ()
    )


def values_of(length: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    return (scale * np.random.default_rng(seed).normal(size=length)).astype(np.float32)


def encoded(codec: Codec, values: NDArray[Any], unit: Unit, turn: Turn = TURN) -> memoryview:
    out = memoryview(bytearray(codec.size_bytes(unit, turn.round)))
    codec.encode(values, unit, turn, out)
    return out


def decoded(codec: Codec, data: memoryview, unit: Unit, dtype: type = np.float32) -> NDArray[Any]:
    out: NDArray[Any] = np.full(unit.length, np.nan, dtype)
    codec.decode(data, unit, TURN, out)
    return out


def formula(codec_name: str, d: int, round: int) -> int:
    """The bytes of d values as the documentation tells them."""
    base, _, text = codec_name.partition(":")
    parameter = float(text) if text else 0.0
    k = min(d, max(1, math.ceil(parameter * d)))
    match base:
        case "fp32":
            return 4 * d
        case "bf16" | "fp16":
            return 2 * d
        case "fp8_e4m3" | "fp8_e5m2":
            return 4 + d
        case "int8":
            return 4 * math.ceil(d / 1024) + d
        case "e3m0":
            return 4 * math.ceil(d / 1024) + math.ceil(d / 2)
        case "qsgd":
            return 4 + math.ceil(math.log2(2 * parameter + 1)) * math.ceil(d / 8)
        case "terngrad":
            return 4 + 2 * math.ceil(d / 8)
        case "sign":
            return 4 + math.ceil(d / 8)
        case "topk":
            return 6 * k
        case "dgc":
            return 6 * min(d, max(1, math.ceil(max(parameter, 4.0 ** -(1 + round // 100)) * d)))
        case "randomk":
            return 4 * k
        case "powersgd":
            _, m, n = MATRIX
            inside = m * n if d >= MATRIX[0] + m * n else 0
            return 4 * (d - inside + (min(int(parameter) * (m + n), m * n) if inside else 0))
    raise AssertionError(codec_name)


@pytest.fixture(params=NAMES)
def codec(request: pytest.FixtureRequest) -> Codec:
    return codec_named(request.param)


def test_a_codec_says_its_own_name(codec: Codec) -> None:
    assert codec_named(codec.name) is codec or codec_named(codec.name).name == codec.name


def test_names_are_canonical() -> None:
    assert check_codec("topk") == "topk:0.01"
    assert check_codec("topk:.0100") == "topk:0.01"
    assert check_codec("qsgd:016") == "qsgd:16"
    assert check_codec("int8") == "int8"
    assert codec_named("dgc").name == "dgc:0.001"


UNKNOWN = """int7 INT8 int8: int8:2 topk: topk:0 topk:1.5 topk:nan topk:-1 topk:0.1:2 topk:1_0 topk:1e
    qsgd:0 qsgd:1.5 qsgd:32768 powersgd:x powersgd:257 auto"""


@pytest.mark.parametrize("name", ["", "qsgd: 4", *UNKNOWN.split()])
def test_an_unknown_name_is_refused_with_all_that_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"randomk:f \(f above 0 and at most 1, 0.1 unless given\)") as error:
        check_codec(name)
    assert repr(name) in str(error.value)
    assert all(known in str(error.value) for known in CODEC_NAMES)


@pytest.mark.parametrize("round", [0, 250])
def test_sizes_follow_the_formula(codec: Codec, round: int) -> None:
    sizes = {length: codec.size_bytes(unit_of(length), round) for length in LENGTHS}
    assert sizes == {length: formula(codec.name, length, round) for length in LENGTHS}


def test_encode_fills_its_bytes_and_decode_all_values(codec: Codec) -> None:
    for length in LENGTHS:
        unit = unit_of(length)
        first = encoded(codec, values_of(length), unit)
        second = memoryview(bytearray(b"\xaa" * len(first)))
        codec.encode(values_of(length), unit, TURN, second)
        assert first == second, "bytes depend on nothing but the values and the turn"
        once = decoded(codec, first, unit)
        assert np.isfinite(once).all()
        assert np.array_equal(decoded(codec, first, unit, np.float64), once.astype(np.float64))


def test_bytes_may_lie_at_odd_addresses(codec: Codec) -> None:
    unit, values = unit_of(1_500), values_of(1_500)
    aligned = encoded(codec, values, unit)
    odd = memoryview(bytearray(len(aligned) + 1))[1:]
    codec.encode(values, unit, TURN, odd)
    assert odd == aligned
    assert np.array_equal(decoded(codec, odd, unit), decoded(codec, aligned, unit))


def test_double_values_are_taken_too(codec: Codec) -> None:
    unit, values = unit_of(1_500), values_of(1_500)
    assert encoded(codec, values.astype(np.float64), unit) == encoded(codec, values, unit)


def test_out_of_another_size_is_an_error_of_the_caller(codec: Codec) -> None:
    unit = unit_of(100)
    size = codec.size_bytes(unit, TURN.round)
    with pytest.raises(ValueError, match=f"out has {size + 1} bytes; {codec.name} writes {size}"):
        codec.encode(values_of(100), unit, TURN, memoryview(bytearray(size + 1)))


def test_bytes_of_another_size_are_refused(codec: Codec) -> None:
    unit = unit_of(1_500)
    size = codec.size_bytes(unit, TURN.round)
    for other in (0, size - 1, size + 1, 2 * size):
        with pytest.raises(ProtocolError, match=rf"{other} bytes of {codec.name} .*{size} are expected"):
            codec.decode(memoryview(bytes(other)), unit, TURN, np.empty(1_500, np.float32))


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(NAMES),
    length=st.integers(0, 80),
    seed=st.integers(0, 2**32),
    fill=st.sampled_from([None, 0, 255, 128]),
)
def test_garbage_is_refused_or_decoded_but_nothing_else(
    name: str, length: int, seed: int, fill: int | None
) -> None:
    codec, unit = codec_named(name), unit_of(length)
    size = codec.size_bytes(unit, TURN.round)
    data = np.random.default_rng(seed).bytes(size) if fill is None else bytes([fill]) * size
    out = np.empty(length, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            codec.decode(memoryview(data), unit, TURN, out)
        except ProtocolError as error:
            assert codec.name in str(error)  # noqa: PT017


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_by_the_receiver(codec: Codec, bad: float) -> None:
    unit = unit_of(1_500)
    for place in (0, 5, 700, 1_499):
        values = values_of(1_500)
        values[place] = bad
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            received = decoded(codec, encoded(codec, values, unit), unit)
        assert not np.isfinite(received).all(), place


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(NAMES),
    values=st.lists(
        st.floats(width=32)
        | st.sampled_from([0.0, -0.0, 1e-45, -1e-38, 2.0**-101, 3.4028234663852886e38, -3.4e38, 65_520.0]),
        max_size=40,
    ),
)
def test_no_value_makes_encoding_fail(name: str, values: list[float]) -> None:
    codec, unit, array = codec_named(name), unit_of(len(values)), np.array(values, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        received = decoded(codec, encoded(codec, array, unit), unit)
    if not np.isfinite(array).all():
        assert not np.isfinite(received).all()


def test_zeros_and_all_but_zeros_come_over_small(codec: Codec) -> None:
    for scale in (0.0, 1e-45, 1e-38, 1e-31):
        unit, values = unit_of(1_500), values_of(1_500, scale=scale)
        received = decoded(codec, encoded(codec, values, unit), unit)
        assert np.abs(received).max() <= 100 * scale, scale


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_fp32_keeps_every_bit_of_the_vectors_own_type(dtype: str) -> None:
    codec, unit = codec_named("fp32"), unit_of(300, dtype)
    own = np.random.default_rng(1).normal(size=300).astype(NUMPY_TYPES[dtype])
    own[:4] = [0.0, -0.0, np.inf, np.nan]
    values = own.astype(accumulator(dtype))
    received = decoded(codec, encoded(codec, values, unit), unit, accumulator(dtype).type)
    assert received.tobytes() == values.tobytes()
    assert codec.size_bytes(unit, 0) == own.nbytes
    assert codec.exact
    assert not codec.biased


def test_only_fp32_is_exact_and_only_four_codecs_are_unbiased() -> None:
    codecs = [codec_named(name) for name in CODEC_NAMES]
    assert [codec.name for codec in codecs if codec.exact] == ["fp32"]
    assert [codec.name for codec in codecs if not codec.biased] == [
        "fp32",
        "qsgd:16",
        "terngrad",
        "randomk:0.1",
    ]


@pytest.mark.parametrize("name", ["qsgd", "terngrad"])
def test_rounding_differs_between_workers_rounds_and_units(name: str) -> None:
    codec, unit, values = codec_named(name), unit_of(500), values_of(500)
    turns = [TURN, TURN._replace(worker=3), TURN._replace(round=5), TURN._replace(seed=8)]
    seen = {bytes(encoded(codec, values, unit, turn)) for turn in turns}
    seen.add(bytes(encoded(codec, values, unit._replace(number=5), TURN)))
    assert len(seen) == 5


def test_all_workers_send_the_same_random_places_and_each_round_others() -> None:
    codec, unit, values = codec_named("randomk:0.1"), unit_of(500), values_of(500)
    assert encoded(codec, values, unit, TURN) == encoded(codec, values, unit, TURN._replace(worker=3))
    assert encoded(codec, values, unit, TURN) != encoded(codec, values, unit, TURN._replace(round=3))


def test_random_places_stay_what_they_are() -> None:
    """Peers must agree on them whatever their version of numpy."""
    assert random_places(5, 100, "7/1/parameters.float32/0").tolist() == [18, 24, 33, 34, 63]
    drawn = np.concatenate([random_places(3, 12, str(seed)) for seed in range(400)])
    counts = np.bincount(drawn, minlength=12)
    assert abs(counts - 100).max() < 4 * math.sqrt(100 * 0.75)


def test_long_units_have_wide_indices() -> None:
    codec, unit = codec_named("topk:0.00001"), Unit("parameters.float32", 0, 0, 70_000)
    values = np.zeros(70_000, np.float32)
    values[69_999] = -2
    data = encoded(codec, values, unit)
    assert len(data) == 8
    assert np.array_equal(decoded(codec, data, unit), values)


def forged(name: str, values: NDArray[np.float32], *edits: tuple[int, int]) -> memoryview:
    data = encoded(codec_named(name), values, unit_of(values.size))
    for place, byte in edits:
        data[place] = byte
    return data


@pytest.mark.parametrize(
    ("name", "edits", "what"),
    [
        ("int8", [(3, 0xBF)], "scale"),
        ("int8", [(0, 0), (1, 0), (2, 0x80), (3, 0x7F)], "scale"),
        ("int8", [(4, 0x80)], "-128"),
        ("e3m0", [(3, 0xBF)], "scale"),
        ("fp8_e4m3", [(3, 0xBF)], "scale"),
        ("sign", [(3, 0xBF)], "scale"),
        ("qsgd:16", [(3, 0xBF)], "scale"),
        ("qsgd:16", [(place, 0xFF) for place in range(4, 10)], "level above 16"),
        ("terngrad", [(4, 0x00), (5, 0x01)], "sign of a zero"),
        ("topk:0.25", [(2, 8)], "indices"),
        ("topk:0.25", [(0, 7), (2, 7)], "indices"),
        ("topk:0.25", [(0, 7), (2, 6)], "indices"),
    ],
)
def test_what_no_sender_writes_is_refused(name: str, edits: list[tuple[int, int]], what: str) -> None:
    data = forged(name, values_of(8), *edits)
    with pytest.raises(ProtocolError, match=what):
        codec_named(name).decode(data, unit_of(8), TURN, np.empty(8, np.float32))


def test_a_scale_that_is_no_number_decodes_to_no_numbers() -> None:
    for name in ("int8", "e3m0", "fp8_e5m2", "sign", "qsgd", "terngrad"):
        data = forged(name, values_of(8), (0, 0), (1, 0), (2, 0xC0), (3, 0x7F))
        assert np.isnan(decoded(codec_named(name), data, unit_of(8))).all()
