"""A model as flat vectors in host memory, gathered from and scattered into its own tensors in place.

The model's tensors are never replaced: ``param.data`` keeps its memory, strides and device, so that compiled
graphs, optimizers and memory formats keep what they hold.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        self._trainable = [item for item in inventory.items if item.role == "parameters"]
        self._resting = [item for item in inventory.items if item.role == "static"]
        self._optimizer = optimizer
        self._optimized = _optimized_count(optimizer)
        tensors = [item.tensor for item in inventory.items]
        self._pinned = on_cuda(tensors)
        self._copies = copies or copies_for(tensors)
        self.device = describe(self._trainable[0].tensor)
        """Where the first trainable parameter is, for people."""
        self.parameters: list[Tensor] = [item.tensor for item in self._trainable]
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
            self._copies.to_host(into.place(item), _values(item, item.tensor))
        self._copies.wait()

    @torch.no_grad()
    def scatter(
        self, source: HostVectors, roles: tuple[Role, ...] = ("parameters", "buffers", "static")
    ) -> None:
        """Copy the vectors' values into the model's tensors, in place."""
        for item in self._lying_in(source, roles):
            target, values = _writable(_values(item, item.tensor), source.place(item))
            self._copies.to_device(target, values)
        self._copies.wait()

    @torch.no_grad()
    def gather_gradients(self, into: HostVectors) -> bytes:
        """Copy every trainable parameter's gradient into the parameter's place, zeros where it has none.

        Returns:
            The presence mask: bit i (little-endian within bytes) says that the i-th parameter has a gradient.

        Raises:
            ValueError: a gradient is sparse.
        """
        present = np.zeros(len(self._trainable), np.bool_)
        for index, item in enumerate(self._trainable):
            gradient = item.tensor.grad
            if gradient is None:
                into.place(item).zero_()
                continue
            _check_dense(item, gradient)
            present[index] = True
            self._copies.to_host(into.place(item), _values(item, gradient))
        self._copies.wait()
        return np.packbits(present, bitorder="little").tobytes()

    @torch.no_grad()
    def scatter_gradients(self, source: HostVectors, present: bytes) -> None:
        """Make the vectors' values the parameters' gradients, in place; those whose bit is not set get none."""
        bits = np.unpackbits(np.frombuffer(present, np.uint8), count=len(self._trainable), bitorder="little")
        for item, has_gradient in zip(self._trainable, bits, strict=True):
            parameter = item.tensor
            if not has_gradient:
                parameter.grad = None
                continue
            if parameter.grad is None or _repeated(parameter.grad):
                parameter.grad = torch.empty_like(parameter)
            self._copies.to_device(_values(item, parameter.grad), source.place(item))
        self._copies.wait()

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


def _values(item: Item, tensor: Tensor) -> Tensor:
    """A view of the tensor as it lies in its vector: complex numbers as pairs, but for static ones, which are bytes."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if item.role != "static" and tensor.is_complex() else tensor


def _repeated(tensor: Tensor) -> bool:
    """Whether the tensor was expanded, so that several of its elements are one place in memory."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _writable(target: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Both without the repetitions of an expanded target, which torch refuses to write to."""
    if not _repeated(target):
        return target, values
    for dimension, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:
            target, values = target.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    return target, values


def _check_dense(item: Item, gradient: Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"the gradient of {item.name} is sparse, and gradients are averaged dense; build its layer with sparse=False"
        )


def _optimized_count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
