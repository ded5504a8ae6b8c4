"""What of a model travels, under which name, and where it lies in the flat vectors.

A tensor's identity is its normalised name: without ``module.`` of a data-parallel wrapper and ``_orig_mod.`` of
``torch.compile``. Tied tensors have several names and are listed once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from cadenza.plane import layout
from cadenza.plane.layout import Layout, Role, Vector

BufferPolicy = Literal["average", "local"]

FLOATING: dict[torch.dtype, tuple[str, int]] = {
    torch.float64: ("float64", 1),
    torch.float32: ("float32", 1),
    torch.float16: ("float16", 1),
    torch.bfloat16: ("bfloat16", 1),
    torch.complex64: ("float32", 2),
    torch.complex128: ("float64", 2),
}
"""Types that can be averaged: their vector's element type, and how many elements one value takes."""

STATIC_ALIGNMENT_BYTES = 16
"""No element type is wider, so every static tensor can be viewed in its own type inside the vector of bytes."""

ROLES: tuple[Role, ...] = ("parameters", "buffers", "static")


@dataclass(frozen=True)
class Item:
    """One tensor of the state dict and its place."""

    name: str
    owner: nn.Module
    key: str
    """The tensor's name in its owner."""
    role: Role
    vector: str
    offset: int
    """In elements of the vector."""
    length: int
    """In elements of the vector."""
    shape: torch.Size
    dtype: torch.dtype

    @property
    def tensor(self) -> torch.Tensor:
        """The model's tensor as it is now: modules may assign new tensors to their buffers.

        Raises:
            ValueError: it is gone, or has another shape or type than when the session was joined.
        """
        tensor: torch.Tensor | None = self.owner._parameters.get(self.key)
        if tensor is None:
            tensor = self.owner._buffers.get(self.key)
        if tensor is None or tensor.shape != self.shape or tensor.dtype != self.dtype:
            now = "gone" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(
                f"{self.name} was {self.dtype} {list(self.shape)} when the session was joined and is {now} now; "
                "give the model its final form before cadenza.join"
            )
        return tensor


@dataclass(frozen=True)
class Inventory:
    """All of a model's tensors, in the layout's order."""

    items: tuple[Item, ...]
    layout: Layout
    untrained: tuple[str, ...]
    """Parameters that require gradients but that the optimizer does not have."""


def take_inventory(model: nn.Module, optimizer: Optimizer, buffers: BufferPolicy) -> Inventory:
    """List what the model holds.

    Args:
        model: parameters may be on any devices.
        optimizer: holds the parameters that travel in every update.
        buffers: what becomes of floating-point buffers.

    Raises:
        ValueError: a tensor is of a kind that cannot travel, the optimizer holds a parameter that the model does
            not have, or nothing is to be trained.
    """
    if buffers not in ("average", "local"):
        raise ValueError(f"buffers is {buffers!r}; give 'average' or 'local'")
    found = list(_named_tensors(unwrapped(model)))
    trained = _trained(optimizer, found)
    placing = _Placing()
    untrained = []
    for name, owner, key, tensor in found:
        _check_kind(name, tensor)
        role = _role(name, tensor, trained, buffers)
        if placing.add(name, owner, key, tensor, role) and _requires_optimizer(tensor, trained):
            untrained.append(name)
    if not any(item.role == "parameters" for item in placing.items):
        raise ValueError(
            "the optimizer holds no parameter that requires gradients: there is nothing to train"
        )
    return Inventory(tuple(placing.items), placing.layout(), tuple(untrained))


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside data-parallel and compiling wrappers."""
    while True:
        inner = model._modules.get("_orig_mod")
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def normalised(name: str) -> str:
    """A tensor's name without what ``torch.compile`` of an inner module adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


_Found = tuple[str, nn.Module, str, torch.Tensor]


def _named_tensors(model: nn.Module) -> Iterator[_Found]:
    """All parameters, then all persistent buffers, under every name they have."""
    modules = list(model.named_modules(remove_duplicate=False))
    for prefix, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield _joined(prefix, key), module, key, parameter
    for prefix, module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield _joined(prefix, key), module, key, buffer


def _joined(prefix: str, key: str) -> str:
    return normalised(f"{prefix}.{key}" if prefix else key)


def _trained(optimizer: Optimizer, found: list[_Found]) -> set[int]:
    """The identities of the optimizer's parameters, all of which must be the model's."""
    own = {id(tensor) for _, _, _, tensor in found}
    trained = set()
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise ValueError(
                    f"parameter {position} of the optimizer's group {number}, of shape {list(parameter.shape)}, does "
                    "not belong to the model; build the optimizer from the parameters of the model that you join, "
                    "after the model is complete"
                )
            trained.add(id(parameter))
    return trained


def _check_kind(name: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"{name} has no shape yet; run one batch through the model before cadenza.join")
    if tensor.is_meta:
        raise ValueError(
            f"{name} is on the meta device and has no values; materialise the model before cadenza.join"
        )
    kind = "sparse" if tensor.layout is not torch.strided else "quantised" if tensor.is_quantized else ""
    if type(tensor.data) is not torch.Tensor:
        kind = f"a {type(tensor.data).__name__}"
    if kind:
        raise ValueError(f"{name} is {kind}; only plain dense tensors can be synchronised")


def _requires_optimizer(tensor: torch.Tensor, trained: set[int]) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad and id(tensor) not in trained


def _role(name: str, tensor: torch.Tensor, trained: set[int], buffers: BufferPolicy) -> Role:
    if not isinstance(tensor, nn.Parameter):
        return "buffers" if buffers == "average" and tensor.dtype in FLOATING else "static"
    if not tensor.requires_grad or id(tensor) not in trained:
        return "static"
    if tensor.dtype not in FLOATING:
        types = ", ".join(_type_name(dtype) for dtype in FLOATING)
        raise ValueError(
            f"{name} is trained in {_type_name(tensor.dtype)}, which cannot be averaged; use one of {types}"
        )
    return "parameters"


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Placing:
    """Puts tensors into vectors, one after another."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._names: dict[str, int] = {}
        """Identity of the tensor by name."""
        self._placed: dict[int, str] = {}
        """First name by identity."""
        self._aliases: list[tuple[str, str]] = []
        self._lengths: defaultdict[tuple[Role, str], int] = defaultdict(int)

    def add(self, name: str, owner: nn.Module, key: str, tensor: torch.Tensor, role: Role) -> bool:
        """Place the tensor; whether it was not placed before under another name."""
        if self._names.setdefault(name, id(tensor)) != id(tensor):
            raise ValueError(f"two different tensors of the model are called {name}; rename one")
        if id(tensor) in self._placed:
            if self._placed[id(tensor)] != name:
                self._aliases.append((name, self._placed[id(tensor)]))
            return False
        self._placed[id(tensor)] = name
        self.items.append(self._item(name, owner, key, tensor, role))
        return True

    def layout(self) -> Layout:
        lengths = sorted(self._lengths.items(), key=lambda entry: (ROLES.index(entry[0][0]), entry[0][1]))
        return Layout(
            vectors=tuple(Vector(role, dtype, length) for (role, dtype), length in lengths),
            tensors=tuple(
                layout.Tensor(item.name, _type_name(item.dtype), tuple(item.shape), item.vector, item.offset)
                for item in self.items
            ),
            trainable=tuple(item.name for item in self.items if item.role == "parameters"),
            aliases=tuple(self._aliases),
        )

    def _item(self, name: str, owner: nn.Module, key: str, tensor: torch.Tensor, role: Role) -> Item:
        dtype, per_value = ("uint8", tensor.element_size()) if role == "static" else FLOATING[tensor.dtype]
        offset = self._lengths[role, dtype]
        if role == "static":
            offset = math.ceil(offset / STATIC_ALIGNMENT_BYTES) * STATIC_ALIGNMENT_BYTES
        length = tensor.numel() * per_value
        self._lengths[role, dtype] = offset + length
        return Item(name, owner, key, role, f"{role}.{dtype}", offset, length, tensor.shape, tensor.dtype)
