"""sync mode: gradients leave as the backward pass produces them.

A hook on each parameter copies its gradient when it is complete, and a unit of the vectors leaves when the last
parameter in it has come. The session's step sends the rest. What the shards sum is what they would have summed had all
of it left after the backward pass, so the result has the same bits.

A gradient that changes after it left is sent again, and from then on the session streams no more: its loop does
something with gradients that cannot be foreseen.
"""

from __future__ import annotations

import bisect
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from cadenza.plane.link import Link, Stream
from cadenza.plane.messages import Notice
from cadenza.plane.units import Unit
from cadenza.training.flat import FlatModel, HostVectors, as_stored
from cadenza.training.inventory import Item

WATCHED_ROUNDS = 2
"""Rounds in which gradients are compared with what left, value by value: an edit through ``.data`` leaves no other trace."""

CHANGED = (
    "gradients change after they were computed and before session.step (a second backward pass, or an edit), so they "
    "leave after the backward pass from now on; clip with session.step(loss, clip_norm=...), call backward of "
    "micro-batches inside session.accumulate(), or set sync.overlap to off"
)

ACCUMULATED = (
    "micro-batches run backward outside session.accumulate(), so gradients leave after the backward pass; call backward "
    "inside that block for all but the last one"
)


class Streaming:
    """Hooks on the parameters of a session, until :meth:`close`.

    Args:
        flat: the model.
        work: where gradients are copied to, and sent from.
        link: cuts the vectors into units.
        stream: begins a round's stream, or returns the one that is open.
        allowed: whether the backward pass under way is one whose gradients the next step will average as they are.
    """

    def __init__(
        self,
        flat: FlatModel,
        work: HostVectors,
        link: Link,
        stream: Callable[[], Stream],
        allowed: Callable[[], bool],
    ) -> None:
        self.accumulating = False
        """Whether the loop is inside session.accumulate(): the gradients are not complete yet."""
        self._flat = flat
        self._link = link
        self._stream = stream
        self._allowed = allowed
        self._places = [work.place(item) for item in flat.trainable]
        self._work = work
        self._units = {item.vector: link.units(item.vector) for item in flat.trainable}
        self._touched = [touched(self._units[item.vector], item) for item in flat.trainable]
        self._parameters_in = _counted(flat.trainable, self._touched)
        self._missing: dict[str, dict[int, int]] = {}
        """Of each unit that is not complete: how many parameters have not come."""
        self._left: dict[int, tuple[Tensor, int]] = {}
        """By parameter: the gradient that was copied, and how often it had been changed in place until then."""
        self._backward = False
        """Whether a backward pass has come by since the latest step, outside of session.accumulate()."""
        self._watched = 0
        # A device's gradients are accumulated on a thread of its own.
        self._lock = threading.Lock()
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(partial(self._came, index))
            for index, parameter in enumerate(flat.parameters)
            if not parameter.is_complex()
        ]
        self._forget()

    # --- in the backward pass ---

    def _came(self, index: int, parameter: Tensor) -> None:
        if self.accumulating:
            return
        with self._lock:
            self._backward = True
            gradient = parameter.grad
            if gradient is None or index in self._left or not self._handles or not self._allowed():
                return
            if gradient.layout is torch.strided:
                self._take(index, gradient)

    def _take(self, index: int, gradient: Tensor) -> None:
        item = self._flat.trainable[index]
        self._left[index] = (gradient, gradient._version)
        self._flat.copies.to_host(self._places[index], as_stored(item, gradient))
        stream = self._stream()
        missing = self._missing[item.vector]
        complete = []
        for number in self._touched[index]:
            missing[number] -= 1
            if not missing[number]:
                complete.append(number)
        if complete:
            ready = self._flat.copies.mark()
            for number in complete:
                stream.send(item.vector, number, ready)

    # --- in the session's step ---

    def complete(self) -> bytes:
        """Bring all gradients that have not left, or have changed since, into the vectors and on their way.

        Returns:
            The presence mask, as :meth:`cadenza.training.flat.FlatModel.gather_gradients` does.
        """
        self._backward = False
        self._flat.copies.wait()
        changed = self._changed()
        present = self._flat.gather_gradients(self._work, known=self._left)
        if changed:
            self._send_again(changed)
            self._stop(CHANGED, "warning")
        if self._left:
            self._watched += 1
            self._forget()
        return present

    def micro_batch(self) -> None:
        """The loop counts a micro-batch, whose gradients are not to be averaged yet."""
        if self._backward:
            self._stop(ACCUMULATED, "info")

    def close(self) -> None:
        """Leave the parameters alone."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _forget(self) -> None:
        self._left = {}
        self._missing = {vector: dict(counts) for vector, counts in self._parameters_in.items()}

    def _stop(self, text: str, severity: str) -> None:
        if not self._handles:
            return
        self.close()
        self._link.notice(Notice("streaming_off", text, severity, {"worker": self._link.worker}))

    # --- gradients that have changed ---

    def _changed(self) -> list[int]:
        watches = self._watched < WATCHED_ROUNDS
        return [
            index
            for index, (gradient, version) in self._left.items()
            if self._flat.trainable[index].tensor.grad is not gradient
            or gradient._version != version
            or (watches and not self._as_sent(index, gradient))
        ]

    def _as_sent(self, index: int, gradient: Tensor) -> bool:
        values = as_stored(self._flat.trainable[index], gradient).to("cpu")
        return torch.allclose(values, self._places[index], rtol=0, atol=0, equal_nan=True)

    @torch.no_grad()
    def _send_again(self, changed: Iterable[int]) -> None:
        """The values of units that are on their way are replaced by the sender, once the earlier ones are out."""
        late: defaultdict[tuple[str, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for index in changed:
            item = self._flat.trainable[index]
            values = self._current(item)
            for number in self._touched[index]:
                unit = self._units[item.vector][number]
                start, stop = max(unit.start, item.offset), min(unit.stop, item.offset + item.length)
                target = self._work.flat[item.vector][start:stop]
                source = values[start - item.offset : stop - item.offset]
                if self._missing[item.vector][number]:
                    target.copy_(source)
                else:
                    late[item.vector, number].append((target, source))
        stream = self._stream()
        for (vector, number), pieces in late.items():
            stream.send(vector, number, partial(_replace, pieces))

    def _current(self, item: Item) -> Tensor:
        """The parameter's gradient as it is now, flat, in host memory; zeros where there is none."""
        gradient = item.tensor.grad
        if gradient is None:
            return torch.zeros(item.length, dtype=self._work.flat[item.vector].dtype)
        dense = gradient.to_dense() if gradient.is_sparse else gradient.detach()
        return dense.to("cpu").contiguous().reshape(-1)


def touched(units: list[Unit], item: Item) -> range:
    """Numbers of the units that hold some of the item's values."""
    if not item.length:
        return range(0)
    first = bisect.bisect_right(units, item.offset, key=lambda unit: unit.start) - 1
    return range(first, bisect.bisect_left(units, item.offset + item.length, key=lambda unit: unit.start))


def _counted(items: Collection[Item], ranges: Iterable[range]) -> dict[str, dict[int, int]]:
    counts: dict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for item, numbers in zip(items, ranges, strict=True):
        for number in numbers:
            counts[item.vector][number] += 1
    return {vector: dict(numbers) for vector, numbers in counts.items()}


def _replace(pieces: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pieces:
        target.copy_(source)
