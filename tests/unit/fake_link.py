"""A job of one worker behind a link: merges what it is sent as shards would, and keeps everything for the test."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cadenza.plane.layout import Layout
from cadenza.plane.link import Arrays, Timings
from cadenza.plane.messages import Answer, Content, Exhausted, Joined, Lease, Leased, Note, Notice, Request

Array = NDArray[Any]


class FakeLink:
    """Answers ``weights``, in sync mode ``gradient``, unless the test has put something else into ``contents``."""

    worker = 0

    def __init__(
        self, mode: str = "local", *, local_steps: int = 1, epochs: int = 1, publish: bool = True
    ) -> None:
        self.timings = Timings()
        self.push_bytes = self.pull_bytes = self.raw_push_bytes = self.raw_pull_bytes = 0
        self.mode = mode
        self.local_steps = local_steps
        self.epochs = epochs
        self.publishes = publish
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
        return Joined(self.publishes, self.mode, self.local_steps, self.epochs, 1, (), "fp32", 10.0)

    def publish(self, vectors: tuple[str, ...], values: Arrays) -> None:
        self.calls.append("publish")
        self.published_vectors.append(vectors)
        self.state |= {name: values[name].copy() for name in vectors}

    def ready(self) -> None:
        self.calls.append("ready")

    def exchange(self, request: Request, values: Arrays, into: Arrays) -> Answer:
        self.calls.append(request.kind)
        self.requests.append(request)
        self.sent.append({name: array.copy() for name, array in values.items()})
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
