"""Matrices as products of two thin ones: PowerSGD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cadenza.plane.codecs.base import (
    F4,
    TINY,
    Fields,
    FieldTypes,
    Floats,
    Format,
    Singles,
    Turn,
    generator,
    single,
)
from cadenza.plane.codecs.scratch import scratch
from cadenza.plane.units import Unit


class _Matrix(NamedTuple):
    offset: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.offset + self.rows * self.columns

    def of(self, values: Floats) -> Floats:
        return values[self.offset : self.stop].reshape(self.rows, self.columns)


class PowerSgd(Format):
    """``powersgd:r``: each m×n matrix D of the unit as P Qᵀ, everything else in float32.

    P = orthonormalise(D Q), Q = Dᵀ P: one step of subspace iteration from a Q seeded at random by the job's seed and
    the unit. Exact where the rank of D is at most r. Vogels et al. 2019, arXiv 1905.13727.
    4r(m+n) bytes per matrix where that is less than 4mn, else 4mn; 4 bytes for each value outside the matrices.
    """

    def __init__(self, rank: int) -> None:
        self.name = f"powersgd:{rank}"
        self._rank = rank

    def fields(self, unit: Unit, round: int) -> FieldTypes:
        thin = self._matrices(unit)
        sizes = [side * self._rank for matrix in thin for side in (matrix.rows, matrix.columns)]
        return [(F4, size) for size in (*sizes, *(stop - start for start, stop in _others(unit, thin)))]

    def write(self, values: Floats, fields: Fields, unit: Unit, turn: Turn) -> None:
        v = single(values)
        thin = self._matrices(unit)
        for number, (matrix, left, right) in enumerate(self._factors(thin, fields)):
            self._write_matrix(matrix.of(v), left, right, self.start(matrix.columns, number, unit, turn))
            self.keep(right, number, unit)
        for (start, stop), field in zip(_others(unit, thin), fields[2 * len(thin) :], strict=True):
            field[:] = v[start:stop]

    def read(self, fields: Fields, unit: Unit, turn: Turn, out: Floats) -> None:
        thin = self._matrices(unit)
        for matrix, left, right in self._factors(thin, fields):
            matrix.of(out)[:] = left @ right.T
        for (start, stop), field in zip(_others(unit, thin), fields[2 * len(thin) :], strict=True):
            out[start:stop] = field

    def start(self, columns: int, number: int, unit: Unit, turn: Turn) -> Singles:
        """The Q to begin with for the ``number``-th matrix of ``unit``."""
        random = generator("powersgd", turn.seed, unit.vector, unit.number, number)
        return random.standard_normal((columns, self._rank), np.float32)

    def keep(self, right: Singles, number: int, unit: Unit) -> None:
        """Take note of the Q that was sent; nothing here."""

    def _write_matrix(self, matrix: Floats, left: Singles, right: Singles, start: Singles) -> None:
        scaled = np.abs(matrix, out=scratch("scaled", matrix.size).reshape(matrix.shape))
        peak = scaled.max()
        if not TINY <= peak < np.inf:
            left[:] = right[:] = 0 if peak < TINY else np.nan
            return
        # Only directions matter for P; at this scale D Q cannot overflow.
        np.multiply(matrix, 1 / peak, out=scaled)
        left[:] = np.linalg.qr(scaled @ start)[0]
        np.matmul(matrix.T, left, out=right)

    def _matrices(self, unit: Unit) -> list[_Matrix]:
        matrices = (_Matrix(*matrix) for matrix in unit.matrices)
        return [m for m in matrices if self._rank * (m.rows + m.columns) < m.rows * m.columns]

    def _factors(self, matrices: list[_Matrix], fields: Fields) -> Iterator[tuple[_Matrix, Singles, Singles]]:
        for number, matrix in enumerate(matrices):
            left, right = fields[2 * number], fields[2 * number + 1]
            yield (
                matrix,
                left.reshape(matrix.rows, self._rank),
                right.reshape(matrix.columns, self._rank),
            )


class WarmPowerSgd(PowerSgd):
    """The sending side of one worker: begins each round with the Q that the round before ended with.

    Not stateless, unlike other codecs; what it sends is read by ``PowerSgd``.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.kept: dict[str, Singles] = {}
        """Q by ``vector/first element/number of the matrix``."""

    def start(self, columns: int, number: int, unit: Unit, turn: Turn) -> Singles:
        kept = self.kept.get(_key(number, unit))
        if kept is None or kept.shape != (columns, self._rank):
            return super().start(columns, number, unit, turn)
        return kept

    def keep(self, right: Singles, number: int, unit: Unit) -> None:
        # A Q of zeros or of what is no number would lead nowhere.
        if np.isfinite(right).all() and right.any():
            self.kept[_key(number, unit)] = right / np.abs(right).max()


def _key(number: int, unit: Unit) -> str:
    return f"{unit.vector}/{unit.start}/{number}"


def _others(unit: Unit, matrices: list[_Matrix]) -> list[tuple[int, int]]:
    """The runs of values between ``matrices``."""
    edges = [0, *(edge for matrix in matrices for edge in (matrix.offset, matrix.stop)), unit.length]
    runs = zip(edges[::2], edges[1::2], strict=True)
    return [(start, stop) for start, stop in runs if stop > start]
