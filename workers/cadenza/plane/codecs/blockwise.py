"""A scale for each 1024 values, and a few bits for each value: int8 and e3m0.

With peak = max|v| over a block, the scale is 0 where peak is below 2⁻¹⁰⁰ (the block decodes to zeros) and NaN where
peak is not finite (the block decodes to NaN, so that the receiver sees it).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.codecs.base import (
    F4,
    TINY,
    U1,
    Fields,
    FieldTypes,
    Floats,
    Format,
    Singles,
    Turn,
    check_scales,
    single,
)
from cadenza.plane.codecs.scratch import scratch
from cadenza.plane.units import Unit

BLOCK = 1024
"""Values under one scale; the last block of a unit may be shorter."""


def block_count(length: int) -> int:
    """Blocks that ``length`` values fill."""
    return -(-length // BLOCK)


class Int8(Format):
    """``int8``: scale = max|v| / 127 per block, q = round(v / scale); 4·⌈d/1024⌉ + d bytes.

    Error of each value at most scale / 2.
    """

    name = "int8"

    def fields(self, unit: Unit, round: int) -> FieldTypes:
        return [(F4, block_count(unit.length)), (np.dtype("i1"), unit.length)]

    def write(self, values: Floats, fields: Fields, unit: Unit, turn: Turn) -> None:
        scales, codes = fields
        scaled, broken = normalised(single(values), np.float32(127), scales)
        np.rint(scaled, out=scaled)
        np.copyto(codes, scaled, casting="unsafe")
        for block in broken:
            codes[block * BLOCK : (block + 1) * BLOCK] = 0
        scales /= np.float32(127)

    def read(self, fields: Fields, unit: Unit, turn: Turn, out: Floats) -> None:
        scales, codes = fields
        check_scales(self, scales, unit)
        if codes.min(initial=0) == -128:
            raise self.never(unit, "-128")
        multiply_blocks(codes, scales, out)


class E3M0(Format):
    """``e3m0``: a sign and three bits of exponent, two values per byte; 4·⌈d/1024⌉ + ⌈d/2⌉ bytes.

    scale = max|v| per block; |v|/scale is rounded to the nearest of 0, 2⁻⁶, 2⁻⁵, … 1. Error of each value at most
    max(|v|/3, scale/128). The format of Streaming DiLoCo's outer gradients (Douillard et al. 2025, arXiv 2501.18512).
    """

    name = "e3m0"

    # Between 2^j and 2^(j+1) the middle is 1.5·2^j. After a multiplication by 4/3 it is the next power of two,
    # so that the exponent's bits alone tell the nearest one. Only the middle between 0 and 2⁻⁶ needs a comparison.
    _stretch = np.float32(4 / 3)
    _least_one = np.asarray([4 / 3 * 2.0**-7], np.float32).view(np.uint32)[0]
    _exponent_of_zero = np.uint32(127 - 7)

    def __init__(self) -> None:
        magnitudes = np.array([0.0] + [2.0**power for power in range(-6, 1)], np.float32)
        of_nibble = np.concatenate([magnitudes, -magnitudes])
        byte = np.arange(256)
        pairs = np.stack([of_nibble[byte & 15], of_nibble[byte >> 4]], axis=1)
        self._pairs = np.ascontiguousarray(pairs).view(np.complex64).ravel()

    def fields(self, unit: Unit, round: int) -> FieldTypes:
        return [(F4, block_count(unit.length)), (U1, -(-unit.length // 2))]

    def write(self, values: Floats, fields: Fields, unit: Unit, turn: Turn) -> None:
        scales, packed = fields
        scaled, broken = normalised(single(values), self._stretch, scales)
        nibbles = self._nibbles(scaled)
        for block in broken:
            nibbles[block * BLOCK : (block + 1) * BLOCK] = 0
        nibbles[unit.length :] = 0
        np.left_shift(nibbles[1::2], 4, out=packed)
        np.bitwise_or(packed, nibbles[::2], out=packed)

    def read(self, fields: Fields, unit: Unit, turn: Turn, out: Floats) -> None:
        scales, packed = fields
        check_scales(self, scales, unit)
        pairs = np.take(self._pairs, packed, out=scratch("pairs", packed.size, np.complex64), mode="clip")
        multiply_blocks(pairs.view(np.float32)[: unit.length], scales, out)

    def _nibbles(self, scaled: Singles) -> NDArray[np.uint8]:
        """Sign and exponent of each value, and one more where their number is odd."""
        bits = scaled.view(np.uint32)
        magnitude = np.bitwise_and(bits, 0x7FFF_FFFF, out=scratch("magnitude", bits.size, np.uint32))
        is_some = np.greater_equal(magnitude, self._least_one, out=scratch("is_some", bits.size, np.bool_))
        np.right_shift(magnitude, 23, out=magnitude)
        np.maximum(magnitude, self._exponent_of_zero, out=magnitude)
        np.subtract(magnitude, self._exponent_of_zero, out=magnitude)
        np.maximum(magnitude, is_some, out=magnitude)
        np.right_shift(bits, 31, out=bits)
        np.left_shift(bits, 3, out=bits)
        np.bitwise_or(bits, magnitude, out=bits)
        nibbles = scratch("nibbles", bits.size + bits.size % 2, np.uint8)
        np.copyto(nibbles[: bits.size], bits, casting="unsafe")
        return nibbles


def normalised(values: Singles, most: np.float32, peaks: Singles) -> tuple[Singles, list[int]]:
    """``values`` · ``most`` / peak for each block, and the numbers of the blocks that are not finite.

    Fills ``peaks`` with max|v| per block, 0 where that is tiny and NaN where it is not finite.
    """
    scaled = scratch("scaled", values.size)
    found = _block_peaks(np.abs(values, out=scaled))
    factors = most / found
    factors[found < TINY] = 0
    found[found < TINY] = 0
    found[np.isinf(found)] = np.nan
    peaks[:] = found
    multiply_blocks(values, factors, scaled)
    return scaled, np.flatnonzero(np.isnan(found)).tolist()


def multiply_blocks(values: NDArray[Any], factors: Singles, out: Floats) -> None:
    """``out`` = ``values`` times the factor of their block."""
    whole = values.size // BLOCK
    end = whole * BLOCK
    if whole:
        shape = (whole, BLOCK)
        np.multiply(values[:end].reshape(shape), factors[:whole, np.newaxis], out=out[:end].reshape(shape))
    if end < values.size:
        np.multiply(values[end:], factors[whole], out=out[end:])


def _block_peaks(magnitudes: Singles) -> Singles:
    whole = magnitudes.size // BLOCK
    end = whole * BLOCK
    peaks = np.empty(block_count(magnitudes.size), np.float32)
    np.max(magnitudes[:end].reshape(whole, BLOCK), axis=1, out=peaks[:whole])
    if end < magnitudes.size:
        peaks[whole] = magnitudes[end:].max()
    return peaks
