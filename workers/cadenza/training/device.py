"""The seam between a model's memory and the host's: copies that may complete late, and the wait for them.

Whoever copies must call :meth:`Copies.wait` before anyone reads what was copied or changes what it was copied
from. On the CPU a forgotten wait goes unnoticed, so :class:`LateCopies` makes it fail there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor


class Copies(Protocol):
    """Copies between tensors of equal shape; all of them are complete only after :meth:`wait`."""

    def to_host(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy ``source``, on whatever device, to ``target`` in host memory."""

    def to_device(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy ``source`` in host memory to ``target``, on whatever device."""

    def wait(self) -> None:
        """Return when every copy begun so far is complete, for the host and for work queued on the devices from now on."""

    def mark(self) -> Callable[[], None] | None:
        """What waits, on any thread, until every copy begun so far is complete for the host; none if they are."""


class DirectCopies:
    """Copies at once: for the CPU, and for devices without streams of their own."""

    def to_host(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def to_device(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def wait(self) -> None:
        return

    def mark(self) -> None:
        return


class StreamCopies:
    """Copies of CUDA tensors on a side stream per device; those of CPU tensors at once."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def to_host(self, target: Tensor, source: Tensor) -> None:
        self._copy(target, source, source.device)

    def to_device(self, target: Tensor, source: Tensor) -> None:
        self._copy(target, source, target.device)

    def wait(self) -> None:
        # The host waits too: it reads the vectors next, or receives the next answer into them.
        for stream in self._streams.values():
            stream.synchronize()

    def mark(self) -> Callable[[], None] | None:
        events = [stream.record_event() for stream in self._streams.values()]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait if events else None

    def _copy(self, target: Tensor, source: Tensor, device: torch.device) -> None:
        if device.type != "cuda":
            target.copy_(source)
            return
        stream = self._stream(device)
        # Before every copy: what is copied, or the memory that is copied to, may belong to kernels queued just now.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class LateCopies:
    """A fake device on the CPU: copies read their source only when they are waited for."""

    def __init__(self) -> None:
        self._begun: list[tuple[Tensor, Tensor]] = []

    def to_host(self, target: Tensor, source: Tensor) -> None:
        self._begun.append((target, source))

    def to_device(self, target: Tensor, source: Tensor) -> None:
        self._begun.append((target, source))

    def wait(self) -> None:
        begun, self._begun = self._begun, []
        for target, source in begun:
            target.copy_(source)

    def mark(self) -> Callable[[], None]:
        return self.wait


def copies_for(tensors: Iterable[Tensor]) -> Copies:
    """What suits the devices that ``tensors`` are on."""
    return StreamCopies() if on_cuda(tensors) else DirectCopies()


def on_cuda(tensors: Iterable[Tensor]) -> bool:
    """Whether any of ``tensors`` is on a CUDA device."""
    return any(tensor.device.type == "cuda" for tensor in tensors)


def describe(tensor: Tensor) -> str:
    """The tensor's device for people: ``cpu``, or ``cuda:0 (name of the card)``."""
    if tensor.device.type != "cuda":
        return str(tensor.device)
    return f"{tensor.device} ({torch.cuda.get_device_name(tensor.device)})"
