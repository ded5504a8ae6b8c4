"""Gradients of which most rows are zero (``nn.Embedding(sparse=True)``), in the dense vectors that travel.

A gradient's rows are written into its place among zeros, and the units that stay mostly zero travel packed. The mean
is given back as a sparse tensor of the rows that are not zero: a row whose mean gradient is exactly zero is absent,
whether anybody had it or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cadenza.plane.units import Unit
from cadenza.training.inventory import Item

PACKED_BELOW = 0.5
"""Share of values that are not zero. A packed value is as long as its value and its index, so half are worth it."""


class Rows(NamedTuple):
    """The rows of one parameter that have a gradient."""

    item: Item
    numbers: NDArray[np.int64]
    """Ascending."""


def declared_sparse(item: Item) -> bool:
    """Whether the parameter belongs to a layer whose gradients are sparse."""
    return isinstance(item.owner, nn.Embedding | nn.EmbeddingBag) and item.owner.sparse


def check_kind(item: Item, gradient: Tensor) -> None:
    """Raises ValueError for a gradient that is neither dense nor sparse by rows."""
    if gradient.layout is torch.strided:
        return
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        kind = str(gradient.layout).removeprefix("torch.")
        raise ValueError(
            f"the gradient of {item.name} has layout {kind} and is not sparse by rows, as that of "
            "Embedding(sparse=True) is; make its layer's gradients dense (sparse=False) to average them"
        )


def write_rows(item: Item, gradient: Tensor, place: Tensor) -> Rows:
    """Make ``place`` (host memory, the parameter's shape) the sparse gradient's values, and return which rows it has."""
    gradient = gradient.coalesce()
    numbers = gradient.indices()[0].cpu()
    values = gradient.values()
    place.zero_()
    place[numbers] = (torch.view_as_real(values) if values.is_complex() else values).to(place.device)
    return Rows(item, numbers.numpy())


def read_rows(item: Item, place: Tensor, device: torch.device) -> Tensor:
    """The values in ``place`` as a coalesced sparse gradient on ``device``, which shares no memory with it."""
    numbers = place.flatten(1).any(1).nonzero()[:, 0]
    values = place[numbers]
    if item.dtype.is_complex:
        values = torch.view_as_complex(values)
    return torch.sparse_coo_tensor(
        numbers[None].to(device), values.to(device), item.shape, is_coalesced=True, check_invariants=False
    )


def mostly_zero(units: Sequence[Unit], rows: Iterable[Rows]) -> list[int]:
    """Numbers of those ``units`` of a vector of which few enough values are not zero, if ``rows`` has all of them.

    Values of parameters that are not in ``rows`` count as not zero.
    """
    starts = np.array([unit.start for unit in units])
    stops = np.array([unit.stop for unit in units])
    filled = stops - starts
    for part in rows:
        filled -= _zeros_before(part, stops) - _zeros_before(part, starts)
    chosen = filled < PACKED_BELOW * (stops - starts)
    return [unit.number for unit, packed in zip(units, chosen, strict=True) if packed]


def _zeros_before(part: Rows, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of the parameter's values before each of the vector's ``positions`` lie in rows without a gradient."""
    item, numbers = part
    inside = np.clip(positions - item.offset, 0, item.length)
    columns = max(item.length // max(item.shape[0], 1), 1)
    row, rest = np.divmod(inside, columns)
    before = np.searchsorted(numbers, row)
    begun = np.isin(row, numbers)
    zeros: NDArray[np.int64] = inside - before * columns - np.where(begun, rest, 0)
    return zeros
