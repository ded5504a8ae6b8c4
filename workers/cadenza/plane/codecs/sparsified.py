"""A few of the values as they are: top-k, DGC's warm-up of it, and random-k."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.codecs.base import (
    F4,
    Fields,
    FieldTypes,
    Floats,
    Format,
    Turn,
    generator,
    single,
)
from cadenza.plane.codecs.scratch import scratch
from cadenza.plane.units import Unit

WARM_UP_ROUNDS = 100
"""Rounds for which DGC keeps one step of its warm-up; the paper takes an epoch."""

Indices = NDArray[np.intp]


def kept(fraction: float, length: int) -> int:
    """k = max(1, ⌈f·d⌉) of d values, none of none."""
    return min(length, max(1, math.ceil(fraction * length)))


def index_type(length: int) -> np.dtype[np.unsignedinteger]:
    """The type of an index below ``length`` on the wire."""
    return np.dtype("<u2") if length <= 1 << 16 else np.dtype("<u4")


class TopK(Format):
    """``topk:f``: the k = max(1, ⌈f·d⌉) values of largest magnitude, the others zero.

    Indices, increasing, in 2 bytes each (4 in units of more than 65,536 values), then the values in float32:
    6k bytes. Contracts: ‖v - C(v)‖² ≤ (1 - k/d) ‖v‖². Stich et al. 2018, arXiv 1809.07599.
    """

    def __init__(self, fraction: float) -> None:
        self.name = f"topk:{fraction!r}"
        self._fraction = fraction

    def fraction(self, round: int) -> float:
        """Share of the values that travels in ``round``."""
        return self._fraction

    def fields(self, unit: Unit, round: int) -> FieldTypes:
        k = kept(self.fraction(round), unit.length)
        return [(index_type(unit.length), k), (F4, k)]

    def write(self, values: Floats, fields: Fields, unit: Unit, turn: Turn) -> None:
        indices, sent = fields
        v = single(values)
        chosen = largest(np.abs(v, out=scratch("scaled", unit.length)), sent.size)
        indices[:] = chosen
        sent[:] = v[chosen]

    def read(self, fields: Fields, unit: Unit, turn: Turn, out: Floats) -> None:
        indices, sent = fields
        if indices.size and (indices[-1] >= unit.length or bool((indices[1:] <= indices[:-1]).any())):
            raise self.never(unit, "indices out of range or order")
        out.fill(0)
        out[indices] = sent

    def sent(self, data: memoryview, unit: Unit, round: int) -> Indices:
        """Which values ``data``, just encoded, holds."""
        (dtype, k), _ = self.fields(unit, round)
        return np.frombuffer(data, np.uint8)[: k * dtype.itemsize].view(dtype).astype(np.intp)


class Dgc(TopK):
    """``dgc:f``: top-k whose share falls with the round: max(f, 4^-(1 + ⌊round / 100⌋)).

    That is the exponential warm-up of deep gradient compression (Lin et al. 2018, arXiv 1712.01887): 75, 93.75, 98.4375,
    99.6 and at last 99.9 % of the values stay behind. Momentum correction is the sender's part, see
    ``feedback.correct_momentum``.
    """

    def __init__(self, fraction: float) -> None:
        super().__init__(fraction)
        self.name = f"dgc:{fraction!r}"

    def fraction(self, round: int) -> float:
        return max(self._fraction, 4.0 ** -(1 + min(round // WARM_UP_ROUNDS, 32)))


class RandomK(Format):
    """``randomk:f``: k = max(1, ⌈f·d⌉) values at random places, times d/k; 4k bytes, since the places do not travel.

    The places follow from the job's seed, the round and the unit: all workers send the same ones.
    Unbiased; E‖Q(v) - v‖² = (d/k - 1) ‖v‖². Stich et al. 2018, arXiv 1809.07599.
    """

    biased = False

    def __init__(self, fraction: float) -> None:
        self.name = f"randomk:{fraction!r}"
        self._fraction = fraction

    def fields(self, unit: Unit, round: int) -> FieldTypes:
        return [(F4, kept(self._fraction, unit.length))]

    def write(self, values: Floats, fields: Fields, unit: Unit, turn: Turn) -> None:
        (sent,) = fields
        v = single(values)
        np.multiply(v[self._places(sent.size, unit, turn)], unit.length / max(sent.size, 1), out=sent)
        if not np.isfinite(v).all():
            # The receiver has to see it, wherever it is.
            sent[0] = np.nan

    def read(self, fields: Fields, unit: Unit, turn: Turn, out: Floats) -> None:
        (sent,) = fields
        out.fill(0)
        out[self._places(sent.size, unit, turn)] = sent

    def _places(self, k: int, unit: Unit, turn: Turn) -> Indices:
        return random_places(k, unit.length, f"{turn.seed}/{turn.round}/{unit.vector}/{unit.number}")


def largest(magnitudes: NDArray[Any], k: int) -> Indices:
    """Places of the ``k`` largest, increasing; what is not a number counts as largest."""
    rest = magnitudes.size - k
    if rest == 0:
        return np.arange(k)
    chosen = np.argpartition(magnitudes, rest)[rest:]
    chosen.sort()
    return chosen


@functools.lru_cache(maxsize=64)
def random_places(k: int, length: int, seed: str) -> Indices:
    """``k`` of ``length`` places, increasing, each set equally likely; a server needs them once per worker."""
    # Raw bits are the same in every version of numpy, Generator.choice is not.
    keys = generator("randomk", seed).bit_generator.random_raw(length)
    places = largest(keys, k)
    places.flags.writeable = False
    return places
