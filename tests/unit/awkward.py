"""Models of every awkward kind, each with inputs on which it trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6

_generator = threading.Lock()
"""Modules draw their weights from torch's one global generator, which the workers of a test share."""


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class Frozen(nn.Module):
    """A layer that does not train, before one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fixed(x)))  # type: ignore[no-any-return]


class Unused(nn.Module):
    """A layer that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


class Strided(nn.Module):
    """Parameters that do not lie in memory in the order of their indices, and an expanded buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.spaced = nn.Parameter(torch.randn(WIDTH, 2)[:, 0])
        self.register_buffer("expanded", torch.randn(1, WIDTH).expand(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.transposed + self.spaced


class Shapes(nn.Module):
    """0-dimensional and empty parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.empty.sum()  # type: ignore[no-any-return]


class Complex(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.rotation).abs()


class Mixed(nn.Module):
    """Two element types."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.high = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.low(x.bfloat16()).float())  # type: ignore[no-any-return]


class Integers(nn.Module):
    """Buffers that are never averaged, beside one that is, and one that is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("none", torch.empty(0, dtype=torch.int32))
        self.register_buffer("scale16", torch.ones(3, dtype=torch.float16))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def convolution() -> nn.Module:
    """channels_last weights and BatchNorm's buffers."""
    model = nn.Sequential(
        nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, WIDTH)
    )
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model


def compiled() -> nn.Module:
    """A module inside torch.compile's wrapper."""
    model = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), backend="eager")
    assert isinstance(model, nn.Module)
    return model


@dataclass(frozen=True)
class Kind:
    """How to build a model, and how wide its input is."""

    build: Callable[[], nn.Module]
    width: int = WIDTH
    dtype: torch.dtype = torch.float32

    def model(self, seed: int = 0) -> nn.Module:
        """The model with weights that follow from ``seed``."""
        with _generator, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def batch(self, seed: int, size: int = 4) -> tuple[Tensor, Tensor]:
        """Inputs [size, width] and targets [size, WIDTH]."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, self.width, generator=generator)
        return x.to(self.dtype), torch.randn(size, WIDTH, generator=generator)

    def loss(self, model: nn.Module, seed: int, size: int = 4) -> Tensor:
        x, y = self.batch(seed, size)
        return F.mse_loss(model(x).float(), y)


KINDS: dict[str, Kind] = {
    "tied": Kind(Tied),
    "frozen": Kind(Frozen),
    "unused": Kind(Unused),
    "strided": Kind(Strided),
    "shapes": Kind(Shapes),
    "complex": Kind(Complex),
    "mixed": Kind(Mixed),
    "bf16": Kind(lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), dtype=torch.bfloat16),
    "convolution": Kind(convolution, width=48),
    "compiled": Kind(compiled),
    "integers": Kind(Integers),
}


def groups(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """SGD with momentum in several parameter groups: trainable ones with and without weight decay."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(
        [{"params": trainable[:1], "weight_decay": 0.01}, {"params": trainable[1:], "lr": lr / 2}]
        if len(trainable) > 1
        else trainable,
        lr=lr,
        momentum=0.9,
    )


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict, without the names that compiling adds."""
    return {name.replace("_orig_mod.", ""): value.clone() for name, value in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Equal to the bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
