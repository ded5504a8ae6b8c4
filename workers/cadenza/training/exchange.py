"""A worker's side of the rounds: numbered requests, and what the latest answer said."""

from __future__ import annotations

import time

from cadenza.plane.layout import Layout
from cadenza.plane.link import Arrays, Link
from cadenza.plane.messages import Answer, Joined, Note, Request, RequestKind
from cadenza.training.tally import Total

NOTHING = Total(steps=0, samples=0, loss=None, spans=())

NO_VALUES: Arrays = {}


class Exchanger:
    """Sends requests and keeps the latest note."""

    def __init__(self, link: Link, layout: Layout, joined: Joined) -> None:
        self.note = Note(version=0, round=0, steps=0, local_steps=joined.local_steps)
        self.seconds = 0.0
        """How long the latest exchange took."""
        self._link = link
        self._travelling = layout.travelling()
        self._seq = 0

    def update(self, values: Arrays, into: Arrays, total: Total, present: bytes = b"") -> Answer:
        """Contribute ``values``; the answer is written into ``into``."""
        return self._send("update", self._travelling, values, into, total, present=present)

    def abstain(self, reason: str, into: Arrays, total: Total) -> Answer:
        """Take part in a round without a contribution; the answer is written into ``into``."""
        return self._send("abstain", (), NO_VALUES, into, total, reason=reason)

    def fetch(self, into: Arrays) -> Answer:
        """Ask for what was committed since the latest answer, of the vectors in ``into``."""
        return self._send("fetch", tuple(into), NO_VALUES, into, NOTHING)

    def fetch_first(self, into: Arrays) -> Answer:
        """Ask for the committed values of the vectors in ``into``, by a worker that has none."""
        return self._send("fetch", tuple(into), NO_VALUES, into, NOTHING, base_version=-1)

    def _send(
        self,
        kind: RequestKind,
        vectors: tuple[str, ...],
        values: Arrays,
        into: Arrays,
        total: Total,
        *,
        present: bytes = b"",
        reason: str = "",
        base_version: int | None = None,
    ) -> Answer:
        self._seq += 1
        request = Request(
            kind=kind,
            seq=self._seq,
            base_version=self.note.version if base_version is None else base_version,
            vectors=vectors,
            samples=total.samples,
            steps=total.steps,
            loss=total.loss,
            present=present,
            spans=total.spans,
            reason=reason,
        )
        begun_at = time.perf_counter()
        answer = self._link.begin(request, values, into).result()
        self.seconds = time.perf_counter() - begun_at
        self.note = answer.note
        return answer
