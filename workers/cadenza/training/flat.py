"""A model as flat vectors in host memory, gathered from and scattered into its own tensors in place.

The model's tensors are never replaced: ``param.data`` keeps its memory, strides and device, so that compiled
graphs, optimizers and memory formats keep what they hold.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.plane.layout import Role, Vector
from cadenza.training.device import Copies, copies_for, describe, on_cuda
from cadenza.training.inventory import BufferPolicy, Item, take_inventory
from cadenza.training.sparse import Rows, check_kind, declared_sparse, read_rows, write_rows

TORCH_TYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}
"""Element types of vectors."""


class HostVectors:
    """One set of flat vectors in host memory. Torch and numpy see the same bytes."""

    def __init__(self, vectors: Iterable[Vector], *, pinned: bool) -> None:
        self.flat: dict[str, Tensor] = {
            vector.name: torch.zeros(vector.length, dtype=TORCH_TYPES[vector.dtype], pin_memory=pinned)
            for vector in vectors
        }
        self.arrays: dict[str, NDArray[Any]] = {name: as_array(flat) for name, flat in self.flat.items()}

    def place(self, item: Item) -> Tensor:
        """A view of the item's values, of its shape; complex values have a last dimension of 2 (real, imaginary)."""
        part = self.flat[item.vector][item.offset : item.offset + item.length]
        if item.role == "static":
            return part.view(item.dtype).view(item.shape)
        return part.view((*item.shape, 2) if item.dtype.is_complex else item.shape)


class FlatModel:
    """Copies between a model and :class:`HostVectors`.

    Args:
        model: the user's model, wrapped or not.
        optimizer: whose parameters travel in every update.
        buffers: ``average`` or ``local``.
        copies: how to copy; by default what suits the model's devices.

    Raises:
        ValueError: the model cannot travel; see :func:`cadenza.training.inventory.take_inventory`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        buffers: BufferPolicy = "average",
        copies: Copies | None = None,
    ) -> None:
        inventory = take_inventory(model, optimizer, buffers)
        self.layout = inventory.layout
        self.untrained = inventory.untrained
        self._items = inventory.items
        self.trainable = tuple(item for item in inventory.items if item.role == "parameters")
        """In the order of the presence mask's bits."""
        self.rows: list[Rows] = []
        """Of the gradients gathered last, those that were sparse."""
        self._sparse = [declared_sparse(item) for item in self.trainable]
        """Whether each trainable parameter's gradient is sparse: as its latest own one was."""
        self._resting = [item for item in inventory.items if item.role == "static"]
        self._optimizer = optimizer
        self._optimized = _optimized_count(optimizer)
        tensors = [item.tensor for item in inventory.items]
        self._pinned = on_cuda(tensors)
        self.copies = copies or copies_for(tensors)
        self.device = describe(self.trainable[0].tensor)
        """Where the first trainable parameter is, for people."""
        self.parameters: list[Tensor] = [item.tensor for item in self.trainable]
        """The trainable parameters, in the order of the presence mask's bits."""

    def vectors(self, names: Iterable[str]) -> HostVectors:
        """New host memory for the named vectors, all zero."""
        return HostVectors(self.layout.named(names), pinned=self._pinned)

    @torch.no_grad()
    def gather(
        self, into: HostVectors, roles: tuple[Role, ...] = ("parameters", "buffers", "static")
    ) -> None:
        """Copy the model's tensors into their places, as far as ``into`` has the vector and ``roles`` name it."""
        for item in self._lying_in(into, roles):
            self.copies.to_host(into.place(item), as_stored(item, item.tensor))
        self.copies.wait()

    @torch.no_grad()
    def scatter(
        self, source: HostVectors, roles: tuple[Role, ...] = ("parameters", "buffers", "static")
    ) -> None:
        """Copy the vectors' values into the model's tensors, in place."""
        for item in self._lying_in(source, roles):
            target, values = _writable(as_stored(item, item.tensor), source.place(item))
            self.copies.to_device(target, values)
        self.copies.wait()

    @torch.no_grad()
    def gather_gradients(self, into: HostVectors, known: Container[int] = ()) -> bytes:
        """Copy every trainable parameter's gradient into the parameter's place, zeros where it has none.

        Args:
            into: where to.
            known: parameters whose gradients are in their places already, by number.

        Returns:
            The presence mask: bit i (little-endian within bytes) says that the i-th parameter has a gradient.

        Raises:
            ValueError: a gradient is sparse otherwise than by rows.
        """
        present = np.zeros(len(self.trainable), np.bool_)
        self.rows = []
        for index, item in enumerate(self.trainable):
            gradient = item.tensor.grad
            present[index] = gradient is not None
            if gradient is not None:
                check_kind(item, gradient)
                self._sparse[index] = gradient.is_sparse
            if index not in known:
                self._gather_gradient(item, gradient, into.place(item))
        self.copies.wait()
        return np.packbits(present, bitorder="little").tobytes()

    def _gather_gradient(self, item: Item, gradient: Tensor | None, place: Tensor) -> None:
        if gradient is None:
            place.zero_()
        elif gradient.is_sparse:
            self.rows.append(write_rows(item, gradient, place))
        else:
            self.copies.to_host(place, as_stored(item, gradient))

    @torch.no_grad()
    def scatter_gradients(self, source: HostVectors, present: bytes) -> None:
        """Make the vectors' values the parameters' gradients; those whose bit is not set get none.

        In place, but for gradients that are sparse.
        """
        bits = np.unpackbits(np.frombuffer(present, np.uint8), count=len(self.trainable), bitorder="little")
        for item, has_gradient, sparse in zip(self.trainable, bits, self._sparse, strict=True):
            parameter = item.tensor
            if not has_gradient:
                parameter.grad = None
                continue
            if sparse:
                parameter.grad = read_rows(item, source.place(item), parameter.device)
                continue
            if parameter.grad is None or not _writable_whole(parameter.grad):
                parameter.grad = torch.empty_like(parameter)
            self.copies.to_device(as_stored(item, parameter.grad), source.place(item))
        self.copies.wait()

    def take_gradients(self) -> list[Tensor | None]:
        """The parameters' gradients, which have none afterwards."""
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def put_gradients(self, gradients: list[Tensor | None]) -> None:
        """Give the parameters the gradients that :meth:`take_gradients` took."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def check_unchanged(self) -> None:
        """Raise ValueError if something trains now that did not when the session was joined: it would never travel."""
        names = [
            item.name
            for item in self._resting
            if item.tensor.requires_grad and item.name not in self.untrained
        ]
        if names or _optimized_count(self._optimizer) != self._optimized:
            what = f"{names[0]} requires gradients" if names else "the optimizer has other parameters"
            raise ValueError(
                f"{what} since cadenza.join, and would not be synchronised; let everything that will ever train "
                "require gradients, and be in the optimizer, before cadenza.join"
            )

    def _lying_in(self, vectors: HostVectors, roles: tuple[Role, ...]) -> list[Item]:
        return [item for item in self._items if item.vector in vectors.flat and item.role in roles]


def as_array(flat: Tensor) -> NDArray[Any]:
    """A numpy view of a one-dimensional host tensor; bfloat16 through ml_dtypes."""
    if flat.dtype is torch.bfloat16:
        return flat.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return flat.numpy()


def as_stored(item: Item, tensor: Tensor) -> Tensor:
    """A view of the tensor as it lies in its vector: complex numbers as pairs, but for static ones, which are bytes."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if item.role != "static" and tensor.is_complex() else tensor


def _repeated(tensor: Tensor) -> bool:
    """Whether the tensor was expanded, so that several of its elements are one place in memory."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _writable_whole(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and not _repeated(gradient)


def _writable(target: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Both without the repetitions of an expanded target, which torch refuses to write to."""
    if not _repeated(target):
        return target, values
    for dimension, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:
            target, values = target.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    return target, values


def _optimized_count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
