"""A job of one worker behind a link: merges what it is sent as shards would, and keeps everything for the test.

By default answers are there at once; with ``late`` they land when the test says so, or when somebody waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.layout import Cut, Layout
from cadenza.plane.link import Arrays, Timings
from cadenza.plane.messages import (
    Answer,
    Content,
    Exhausted,
    Joined,
    Lease,
    Leased,
    Note,
    Notice,
    Overlap,
    Request,
)
from cadenza.plane.units import Unit

Array = NDArray[Any]

UNIT = 4
"""Elements of a unit: even small models have several."""


class FakeFlight:
    """An answer that lands when :meth:`land` is called."""

    def __init__(self, link: FakeLink, request: Request, values: Arrays, into: Arrays) -> None:
        self._link, self._request, self._values, self._into = link, request, values, into
        self._watched = {**{f"values {name}": array for name, array in values.items()}, **into}
        self._before = {name: array.copy() for name, array in self._watched.items()}
        self._sent = {name: array.copy() for name, array in values.items()}
        self._answer: Answer | None = None

    def land(self) -> None:
        """The shards answer now."""
        if self._answer is not None:
            return
        for name, array in self._watched.items():
            same = np.array_equal(array.view(np.uint8), self._before[name].view(np.uint8))
            assert same, f"{name} was changed while its request was under way"
        self._answer = self._link.answered(self._request, self._sent, self._into)

    def landed(self) -> bool:
        return self._answer is not None

    def result(self) -> Answer:
        self._link.waits += not self.landed()
        self.land()
        assert self._answer is not None
        return self._answer


class FakeStream:
    """Keeps each unit's values as they were when its turn to be sent had come, which is one call later."""

    def __init__(self, link: FakeLink, seq: int, values: Arrays, into: Arrays) -> None:
        self._link, self._seq, self._values, self._into = link, seq, values, into
        self._left: dict[str, Array] = {name: np.full_like(array, 77) for name, array in values.items()}
        self._due: deque[tuple[Unit, Callable[[], None] | None, bytes]] = deque()
        self._gone: set[Unit] = set()
        self.closed = False

    def send(self, vector: str, number: int, ready: Callable[[], None] | None = None) -> None:
        assert not self.closed
        unit = self._link.units(vector)[number]
        self._link.streamed.append((vector, number))
        self._due.append((unit, ready, self._now(unit).tobytes()))
        if len(self._due) > 1:
            self._leave()

    def close(self, request: Request) -> FakeFlight:
        assert not self.closed
        assert request.seq == self._seq
        self.closed = True
        while self._due:
            self._leave()
        for name in self._values:
            for unit in self._link.units(name):
                if unit not in self._gone:
                    self._take(unit)
        return self._link.depart(request, self._left, self._into)

    def _leave(self) -> None:
        unit, ready, before = self._due.popleft()
        if ready is not None:
            ready()
        else:
            assert self._now(unit).tobytes() == before, f"{unit} was changed while it was on its way"
        self._take(unit)

    def _now(self, unit: Unit) -> Array:
        return self._values[unit.vector][unit.start : unit.stop]

    def _take(self, unit: Unit) -> None:
        self._gone.add(unit)
        self._left[unit.vector][unit.start : unit.stop] = self._now(unit)


class FakeLink:
    """Answers ``weights``, in sync mode ``gradient``, unless the test has put something else into ``contents``."""

    worker = 0

    def __init__(
        self,
        mode: str = "local",
        *,
        local_steps: int = 1,
        epochs: int = 1,
        publish: bool = True,
        overlap: Overlap = "off",
        mix: float | None = None,
    ) -> None:
        self.timings = Timings()
        self.push_bytes = self.pull_bytes = self.raw_push_bytes = self.raw_pull_bytes = 0
        self.mode = mode
        self.local_steps = local_steps
        self.epochs = epochs
        self.publishes = publish
        self.overlap = overlap
        self.mix = mix
        self.late = False
        """Answers to updates land only when somebody waits for them, or the test calls ``flights[-1].land()``."""
        self.waits = 0
        """How often somebody waited for an answer that was not there."""
        self.flights: list[FakeFlight] = []
        self.streamed: list[tuple[str, int]] = []
        """Vector and number of each unit that left before its request."""
        self.packed: list[tuple[str, tuple[int, ...]]] = []
        """Units that were said to be mostly zero."""
        self.state: dict[str, Array] = {}
        """The committed values by vector."""
        self.requests: list[Request] = []
        self.sent: list[dict[str, Array]] = []
        self.published_vectors: list[tuple[str, ...]] = []
        self.calls: list[str] = []
        self.notices: list[Notice] = []
        self.reports: list[tuple[dict[str, float], int]] = []
        self.told: list[tuple[int, int]] = []
        """Steps and samples of each telemetry."""
        self.notes: deque[dict[str, Any]] = deque()
        """Fields of the next answers' notes."""
        self.contents: deque[Content] = deque()
        self.missed: list[tuple[bytes, dict[str, Array]]] = []
        """sync: what a fetch replays: presence and mean gradients of each round."""
        self.runs: deque[Leased] = deque()
        self.last = True
        self.version = 0
        self.steps = 0
        self.layout: Layout | None = None

    def join(self, layout: Layout, *, node: str, device: str) -> Joined:
        self.layout = layout
        return Joined(self.publishes, self.mode, self.local_steps, self.epochs, 1, (), "fp32", 10.0, overlap=self.overlap, mix=self.mix)  # fmt: skip

    def publish(self, vectors: tuple[str, ...], values: Arrays) -> None:
        self.calls.append("publish")
        self.published_vectors.append(vectors)
        self.state |= {name: values[name].copy() for name in vectors}

    def ready(self) -> None:
        self.calls.append("ready")

    def units(self, vector: str) -> list[Unit]:
        assert self.layout is not None
        return self.layout.units(Cut(shards=1, unit=UNIT), vector)

    def sparse(self, vector: str, numbers: Iterable[int]) -> None:
        self.packed.append((vector, tuple(numbers)))

    def begin(self, request: Request, values: Arrays, into: Arrays) -> FakeFlight:
        return self.depart(request, values, into)

    def stream(self, seq: int, base_version: int, values: Arrays, into: Arrays) -> FakeStream:
        assert base_version == self.version
        return FakeStream(self, seq, values, into)

    def depart(self, request: Request, values: Arrays, into: Arrays) -> FakeFlight:
        self.calls.append(request.kind)
        self.requests.append(request)
        self.sent.append({name: array.copy() for name, array in values.items()})
        flight = FakeFlight(self, request, values, into)
        self.flights.append(flight)
        if not self.late or request.kind != "update":
            flight.land()
        return flight

    def answered(self, request: Request, values: Arrays, into: Arrays) -> Answer:
        """Carry the request out and answer it."""
        content = self.contents.popleft() if self.contents else self._content(request)
        if request.kind == "update" and content != "unchanged":
            self.version += 1
            self.steps += request.steps
        fields = self.notes.popleft() if self.notes else {}
        if content in ("weights", "gradient"):
            self._answer(request, values, into, merge=not fields.get("dropped"))
        note = Note(**({"version": self.version, "round": len(self.requests), "steps": self.steps, "local_steps": self.local_steps} | fields))  # fmt: skip
        present = {"gradient": (request.present,), "gradients": tuple(mask for mask, _ in self.missed)}
        return Answer(content, note, tuple(into), present=present.get(content, ()))

    def replayed(self, vector: str) -> Array:
        return np.stack([values[vector] for _, values in self.missed])

    def lease(self, request: Lease) -> Leased | Exhausted:
        return self.runs.popleft() if self.runs else Exhausted("all epochs are handed out")

    def evaluating(self) -> None:
        self.calls.append("evaluating")

    def report(self, metrics: dict[str, float], steps: int) -> None:
        self.calls.append("report")
        self.reports.append((metrics, steps))

    def notice(self, notice: Notice) -> None:
        self.notices.append(notice)

    def telemetry(
        self, *, steps: int, samples: int, compute_seconds: float, apply_seconds: float | None
    ) -> None:
        assert compute_seconds >= 0
        assert apply_seconds is None or apply_seconds >= 0
        self.told.append((steps, samples))

    def finish(self) -> bool:
        self.calls.append("finish")
        return self.last

    def published(self) -> None:
        self.calls.append("published")

    def _content(self, request: Request) -> Content:
        if request.kind == "fetch":
            return "weights" if request.base_version != self.version else "unchanged"
        return "gradient" if self.mode == "sync" else "weights"

    def _answer(self, request: Request, values: Arrays, into: Arrays, *, merge: bool) -> None:
        for name, target in into.items():
            if self.mode == "sync" and name.startswith("parameters.") and request.kind != "fetch":
                target[:] = values[name]
                continue
            if request.kind == "update" and merge:
                self.state[name] = self.state[name] + values[name]
            target[:] = self.state[name]
