"""One value at a time in a narrower type: fp32, bf16, fp16 and fp8."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cadenza.plane.codecs.base import (
    F4,
    TINY,
    U1,
    Fields,
    FieldTypes,
    Floats,
    Format,
    Turn,
    check_scales,
    single,
)
from cadenza.plane.codecs.scratch import scratch
from cadenza.plane.layout import NUMPY_TYPES
from cadenza.plane.units import Unit


class Fp32(Format):
    """``fp32``: each value in its vector's own type; 4 bytes, 8 in a float64 vector, 2 in a 16-bit one."""

    name = "fp32"
    exact = True
    biased = False

    def fields(self, unit: Unit, round: int) -> FieldTypes:
        return [(NUMPY_TYPES[unit.dtype], unit.length)]

    def write(self, values: Floats, fields: Fields, unit: Unit, turn: Turn) -> None:
        np.copyto(fields[0], values, casting="unsafe")

    def read(self, fields: Fields, unit: Unit, turn: Turn, out: Floats) -> None:
        np.copyto(out, fields[0], casting="unsafe")


class Bf16(Format):
    """``bf16``: the upper half of each float32, rounded to nearest even; 2 bytes, relative error 2⁻⁸."""

    name = "bf16"

    def fields(self, unit: Unit, round: int) -> FieldTypes:
        return [(NUMPY_TYPES["bfloat16"], unit.length)]

    def write(self, values: Floats, fields: Fields, unit: Unit, turn: Turn) -> None:
        np.copyto(fields[0], single(values), casting="unsafe")

    def read(self, fields: Fields, unit: Unit, turn: Turn, out: Floats) -> None:
        # Shifting bits is four times as fast as the cast of ml_dtypes.
        wide: Floats = out if out.dtype == np.float32 else scratch("wide", unit.length)
        bits = wide.view(np.uint32)
        np.copyto(bits, fields[0].view(np.uint16))
        np.left_shift(bits, 16, out=bits)
        if wide is not out:
            np.copyto(out, wide)


class Fp16(Format):
    """``fp16``: IEEE half precision, saturating at ±65504; 2 bytes, relative error 2⁻¹¹ above 6e-5."""

    name = "fp16"
    _most = np.float32(65_504)

    def fields(self, unit: Unit, round: int) -> FieldTypes:
        return [(np.dtype("<f2"), unit.length)]

    def write(self, values: Floats, fields: Fields, unit: Unit, turn: Turn) -> None:
        kept = np.clip(values, -self._most, self._most, out=scratch("clipped", unit.length))
        # An infinite value must remain one.
        np.copyto(kept, values, where=np.isinf(values), casting="unsafe")
        np.copyto(fields[0], kept, casting="unsafe")

    def read(self, fields: Fields, unit: Unit, turn: Turn, out: Floats) -> None:
        np.copyto(out, fields[0])


class Fp8(Format):
    """``fp8_e4m3`` or ``fp8_e5m2``: 8-bit floats (Micikevicius et al. 2022, arXiv 2209.05433) under a scale for the unit.

    scale = max|v| / M with M the type's largest number (448 or 57344); each v/scale is rounded to nearest even.
    4 + 1·d bytes for d values.
    """

    def __init__(self, kind: str, dtype: type, most: float) -> None:
        self.name = f"fp8_{kind}"
        self._dtype = dtype
        self._most = np.float32(most)
        self._table = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)

    def fields(self, unit: Unit, round: int) -> FieldTypes:
        return [(F4, 1), (U1, unit.length)]

    def write(self, values: Floats, fields: Fields, unit: Unit, turn: Turn) -> None:
        scale, codes = fields
        v = single(values)
        scaled = scratch("scaled", unit.length)
        peak = np.abs(v, out=scaled).max(initial=0)
        if not TINY <= peak < np.inf:
            scale[0] = 0 if peak < TINY else np.nan
            codes[:] = 0
            return
        scale[0] = peak / self._most
        np.multiply(v, self._most / peak, out=scaled)
        np.copyto(codes.view(self._dtype), scaled, casting="unsafe")

    def read(self, fields: Fields, unit: Unit, turn: Turn, out: Floats) -> None:
        scale, codes = fields
        check_scales(self, scale, unit)
        wide = np.take(self._table, codes, out=scratch("wide", unit.length), mode="clip")
        np.multiply(wide, scale[0], out=out)


def fp8(kind: str) -> Fp8:
    """The codec ``fp8_{kind}`` for ``e4m3`` or ``e5m2``."""
    if kind == "e4m3":
        return Fp8(kind, ml_dtypes.float8_e4m3fn, most=448)
    return Fp8(kind, ml_dtypes.float8_e5m2, most=57_344)
