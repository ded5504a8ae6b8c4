"""What a codec left out is owed, and sent later: error feedback and DGC's momentum correction. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from cadenza.plane.codecs.base import Codec, Floats, Turn
from cadenza.plane.codecs.scratch import scratch
from cadenza.plane.codecs.sparsified import Dgc
from cadenza.plane.units import Unit

MOMENTUM = 0.9
"""DGC's m."""


def compress(
    codec: Codec,
    values: Floats,
    residual_in: Floats | None,
    unit: Unit,
    turn: Turn,
    out: memoryview,
    residual_out: Floats | None,
) -> None:
    """Encode ``values`` and what is owed into ``out``; ``residual_out`` becomes what is owed then.

    p = v + e;  send C(p);  e ← p - C(p). Error feedback: Seide et al. 2014 (Interspeech), Karimireddy et al. 2019,
    arXiv 1901.09847. What an unbiased codec misses is noise of mean zero; after it nothing is owed.

    Args:
        residual_in: e of length ``unit.length``; None for zeros.
        residual_out: may be ``residual_in``; None to keep nothing. Where p or C(p) is not finite, e stays as it was:
            the receiver drops such a contribution.
    """
    total = values
    if residual_in is not None:
        kind = np.result_type(values, residual_in)
        total = np.add(values, residual_in, out=scratch("feedback.total", unit.length, kind.type))
    codec.encode(total, unit, turn, out)
    if residual_out is None:
        return
    left = scratch("feedback.left", unit.length, total.dtype.type)
    if codec.biased or codec.exact:
        codec.decode(out, unit, turn, left)
        with np.errstate(invalid="ignore", over="ignore"):
            np.subtract(total, left, out=left)
    else:
        with np.errstate(invalid="ignore"):
            # Zero, but still no number where the total is none.
            np.multiply(total, 0, out=left)
    _settle(left, residual_in, residual_out)


def correct_momentum(
    codec: Dgc,
    gradient: Floats,
    momentum: Floats,
    velocity: Floats,
    unit: Unit,
    turn: Turn,
    out: memoryview,
) -> None:
    """One round of deep gradient compression (Lin et al. 2018, arXiv 1712.01887) with m = 0.9.

    u ← m u + g;  v ← v + u;  send v where |v| is largest; u and v become zero there. ``momentum`` is u and ``velocity``
    is v, both changed in place, unless something is not finite: then both stay and the receiver sees it.
    """
    kind = velocity.dtype.type
    u = np.multiply(momentum, MOMENTUM, out=scratch("feedback.momentum", unit.length, kind))
    with np.errstate(invalid="ignore", over="ignore"):
        np.add(u, gradient, out=u)
        v = np.add(velocity, u, out=scratch("feedback.total", unit.length, kind))
    codec.encode(v, unit, turn, out)
    if not np.isfinite(v).all():
        return
    sent = codec.sent(out, unit, turn.round)
    u[sent] = v[sent] = 0
    np.copyto(momentum, u)
    np.copyto(velocity, v)


def _settle(left: Floats, residual_in: Floats | None, residual_out: Floats) -> None:
    finite: Any = np.isfinite(left)
    if finite.all():
        np.copyto(residual_out, left, casting="same_kind")
        return
    np.copyto(residual_out, 0 if residual_in is None else residual_in, casting="same_kind")
    np.copyto(residual_out, left, where=finite, casting="same_kind")
