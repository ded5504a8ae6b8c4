"""A few bits for each value under one scale: QSGD, TernGrad and scaled sign.

Symbols of b bits lie on the wire as b planes: first the lowest bit of all values, eight to a byte, then the next.
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
    own_generator,
    single,
)
from cadenza.plane.codecs.scratch import scratch
from cadenza.plane.units import Unit


class Qsgd(Format):
    """``qsgd:s``: v_i becomes ‖v‖₂ · ξ_i / s with ξ_i = ⌊s v_i / ‖v‖₂ + U[0,1)⌋.

    Unbiased; E‖Q(v) - v‖² ≤ min(d/s², √d/s) ‖v‖². Alistarh et al. 2017, arXiv 1610.02132.
    The norm is that of the unit; each value has ⌈log₂(2s+1)⌉ bits, in planes: 4 + ⌈log₂(2s+1)⌉·⌈d/8⌉ bytes.
    """

    biased = False

    def __init__(self, levels: int) -> None:
        self.name = f"qsgd:{levels}"
        self._levels = levels
        self._bits = (2 * levels).bit_length()

    def fields(self, unit: Unit, round: int) -> FieldTypes:
        return [(F4, 1), *planes(self._bits, unit.length)]

    def write(self, values: Floats, fields: Fields, unit: Unit, turn: Turn) -> None:
        scale, *bits = fields
        v = single(values)
        norm = euclidean(v)
        symbols = scratch("symbols", unit.length, np.uint16)
        if TINY <= norm < np.inf:
            scale[0] = norm
            signed = stochastic(v, np.float32(self._levels) / norm, own_generator("qsgd", unit, turn))
            np.clip(signed, -self._levels, self._levels, out=signed)
            np.add(signed, self._levels, out=symbols, casting="unsafe")
        else:
            scale[0] = 0 if norm < TINY else np.nan
            symbols.fill(self._levels)
        pack_planes(symbols, bits)

    def read(self, fields: Fields, unit: Unit, turn: Turn, out: Floats) -> None:
        scale, *bits = fields
        check_scales(self, scale, unit)
        symbols = unpack_planes(bits, unit.length)
        if symbols.max(initial=0) > 2 * self._levels:
            raise self.never(unit, f"a level above {self._levels}")
        levels = np.subtract(symbols, np.float32(self._levels), out=scratch("levels", unit.length))
        np.multiply(levels, scale[0] / np.float32(self._levels), out=out)


class TernGrad(Format):
    """``terngrad``: v_i becomes m · sign(v_i) · b_i with m = max|v| and P(b_i = 1) = |v_i| / m.

    Unbiased. Wen et al. 2017, arXiv 1705.07878. Two planes, b and the sign: 4 + 2·⌈d/8⌉ bytes.
    """

    name = "terngrad"
    biased = False

    def fields(self, unit: Unit, round: int) -> FieldTypes:
        return [(F4, 1), *planes(2, unit.length)]

    def write(self, values: Floats, fields: Fields, unit: Unit, turn: Turn) -> None:
        scale, chosen, negative = fields
        v = single(values)
        peak = np.abs(v, out=scratch("scaled", unit.length)).max(initial=0)
        if not TINY <= peak < np.inf:
            scale[0] = 0 if peak < TINY else np.nan
            chosen[:] = negative[:] = 0
            return
        scale[0] = peak
        signed = stochastic(v, 1 / peak, own_generator("terngrad", unit, turn))
        _pack(signed != 0, chosen)
        _pack(signed < 0, negative)

    def read(self, fields: Fields, unit: Unit, turn: Turn, out: Floats) -> None:
        scale, chosen, negative = fields
        check_scales(self, scale, unit)
        if bool((negative & ~chosen).any()):
            raise self.never(unit, "the sign of a zero")
        symbols = _unpack(chosen, unit.length).view(np.int8)
        signs = _unpack(negative, unit.length).view(np.int8)
        np.subtract(symbols, signs, out=symbols)
        np.subtract(symbols, signs, out=symbols)
        np.multiply(symbols, scale[0], out=out)


class ScaledSign(Format):
    """``sign``: v_i becomes sign(v_i) · mean|v|, with sign(0) = 1; 4 + ⌈d/8⌉ bytes.

    Karimireddy et al. 2019, arXiv 1901.09847, after Bernstein et al. 2018, arXiv 1802.04434.
    """

    name = "sign"

    def fields(self, unit: Unit, round: int) -> FieldTypes:
        return [(F4, 1), *planes(1, unit.length)]

    def write(self, values: Floats, fields: Fields, unit: Unit, turn: Turn) -> None:
        scale, negative = fields
        v = single(values)
        total = np.abs(v, out=scratch("scaled", unit.length)).sum(dtype=np.float64)
        mean = np.float32(total / max(unit.length, 1))
        scale[0] = mean if np.isfinite(mean) else np.nan
        _pack(np.signbit(v), negative)

    def read(self, fields: Fields, unit: Unit, turn: Turn, out: Floats) -> None:
        scale, negative = fields
        check_scales(self, scale, unit)
        np.multiply(_unpack(negative, unit.length).view(np.int8), -2 * scale[0], out=out)
        np.add(out, scale[0], out=out)


def euclidean(values: Singles) -> np.float32:
    """‖v‖₂; infinite only where it is beyond float32."""
    square = np.dot(values, values)
    if not TINY < square < np.inf:
        # The squares leave the range of float32 long before the norm does.
        square = np.square(values, dtype=np.float64).sum()
    return np.float32(np.sqrt(square))


def stochastic(values: Singles, factor: np.float32, random: np.random.Generator) -> Singles:
    """``values`` · ``factor``, each rounded up or down at random so that its mean is kept."""
    scaled: Singles = scratch("scaled", values.size)
    np.multiply(values, factor, out=scaled)
    noise = random.random(dtype=np.float32, out=scratch("noise", values.size))
    np.add(scaled, noise, out=scaled)
    np.floor(scaled, out=scaled)
    return scaled


def planes(bits: int, length: int) -> list[tuple[np.dtype[Any], int]]:
    """The fields of ``length`` symbols of ``bits`` bits."""
    return [(U1, -(-length // 8))] * bits


def pack_planes(symbols: NDArray[np.uint16], fields: Fields) -> None:
    """Write bit i of all ``symbols`` into field i."""
    bit = scratch("bit", symbols.size, np.uint16)
    flags = scratch("flags", symbols.size, np.bool_)
    for position, field in enumerate(fields):
        np.bitwise_and(symbols, 1 << position, out=bit)
        # packbits is twenty times as fast on bytes as on anything wider.
        _pack(np.not_equal(bit, 0, out=flags), field)


def unpack_planes(fields: Fields, length: int) -> NDArray[np.uint16]:
    """The symbols, in an array of this thread."""
    symbols = scratch("symbols", length, np.uint16)
    symbols.fill(0)
    bit = scratch("bit", length, np.uint16)
    for position, field in enumerate(fields):
        np.left_shift(_unpack(field, length), position, out=bit, dtype=np.uint16)
        np.bitwise_or(symbols, bit, out=symbols)
    return symbols


def _pack(flags: NDArray[Any], field: NDArray[np.uint8]) -> None:
    field[:] = np.packbits(flags, bitorder="little")


def _unpack(field: NDArray[np.uint8], length: int) -> NDArray[np.uint8]:
    return np.unpackbits(field, count=length, bitorder="little")
