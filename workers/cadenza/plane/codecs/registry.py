"""Codecs by their names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cadenza.plane.codec_names import parse_codec
from cadenza.plane.codecs.base import Codec
from cadenza.plane.codecs.blockwise import E3M0, Int8
from cadenza.plane.codecs.casts import Bf16, Fp16, Fp32, fp8
from cadenza.plane.codecs.packed import Qsgd, ScaledSign, TernGrad
from cadenza.plane.codecs.powersgd import PowerSgd
from cadenza.plane.codecs.sparsified import Dgc, RandomK, TopK

_MAKERS: dict[str, Callable[..., Any]] = {
    "fp32": Fp32,
    "bf16": Bf16,
    "fp16": Fp16,
    "fp8_e4m3": functools.partial(fp8, "e4m3"),
    "fp8_e5m2": functools.partial(fp8, "e5m2"),
    "int8": Int8,
    "e3m0": E3M0,
    "qsgd": Qsgd,
    "terngrad": TernGrad,
    "sign": ScaledSign,
    "topk": TopK,
    "randomk": RandomK,
    "dgc": Dgc,
    "powersgd": PowerSgd,
}


@functools.lru_cache(maxsize=256)
def codec_named(name: str) -> Codec:
    """The codec called ``name``, such as ``int8``, ``topk:0.01``, or ``topk`` with its default parameter.

    Raises:
        ValueError: there is no such codec, or its parameter is not allowed.
    """
    base, parameter = parse_codec(name)
    codec: Codec = _MAKERS[base]() if parameter is None else _MAKERS[base](parameter)
    return codec
