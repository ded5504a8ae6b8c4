"""A worker's side of the rounds: numbered requests, one under way at a time, and what the latest answer said."""

from __future__ import annotations

import time
from collections.abc import Callable

from cadenza.plane.layout import Layout
from cadenza.plane.link import Arrays, Flight, Link, Stream
from cadenza.plane.messages import Answer, Joined, Note, Request, RequestKind
from cadenza.training.tally import NOTHING, Total

NO_VALUES: Arrays = {}


class Exchanger:
    """Sends requests and keeps the latest note."""

    def __init__(self, link: Link, layout: Layout, joined: Joined) -> None:
        self.note = Note(version=0, round=0, steps=0, local_steps=joined.local_steps)
        self.seconds = 0.0
        """How long this thread spent on the latest exchange: sending, and waiting for what had not come yet."""
        self._link = link
        self._travelling = layout.travelling()
        self._seq = 0
        self._flight: Flight | None = None
        self._stream: Stream | None = None

    # --- one after another ---

    def update(self, values: Arrays, into: Arrays, total: Total, present: bytes = b"") -> Answer:
        """Contribute ``values`` and wait; the answer is written into ``into``."""
        self.send(values, into, total, present)
        return self.land()

    def abstain(self, reason: str, into: Arrays, total: Total) -> Answer:
        """Take part in a round without a contribution; the answer is written into ``into``."""
        self._begin(self._request("abstain", (), total, reason=reason), NO_VALUES, into)
        return self.land()

    def fetch(self, into: Arrays) -> Answer:
        """Ask for what was committed since the latest answer, of the vectors in ``into``."""
        self._begin(self._request("fetch", tuple(into), NOTHING), NO_VALUES, into)
        return self.land()

    def fetch_first(self, into: Arrays) -> Answer:
        """Ask for the committed values of the vectors in ``into``, by a worker that has none."""
        self._begin(self._request("fetch", tuple(into), NOTHING, base_version=-1), NO_VALUES, into)
        return self.land()

    # --- under way ---

    def send(self, values: Arrays, into: Arrays, total: Total, present: bytes = b"") -> None:
        """Contribute ``values``, whose units the open stream, if there is one, has sent in part; see :meth:`land`.

        Nobody may change ``values`` or use ``into`` before the answer has landed.
        """
        request = self._request("update", self._travelling, total, present=present)
        if self._stream is None:
            self._begin(request, values, into)
            return
        stream, self._stream = self._stream, None
        self._depart(lambda: stream.close(request))

    def stream(self, values: Arrays, into: Arrays) -> Stream:
        """Begin a contribution whose values are not all known yet; :meth:`send` completes it."""
        assert self._flight is None, "one exchange at a time"
        if self._stream is None:
            self._seq += 1
            self._stream = self._link.stream(self._seq, self.note.version, values, into)
        return self._stream

    def landed(self) -> bool:
        """Whether the answer to what is under way is there."""
        return self._flight is not None and self._flight.landed()

    def land(self) -> Answer:
        """Wait for the answer to what is under way.

        Raises:
            LinkError: the round failed.
        """
        assert self._flight is not None, "nothing is under way"
        begun_at = time.perf_counter()
        answer = self._flight.result()
        self.seconds += time.perf_counter() - begun_at
        self._flight = None
        self.note = answer.note
        return answer

    def _begin(self, request: Request, values: Arrays, into: Arrays) -> None:
        assert self._stream is None, "an open stream ends in an update"
        self._depart(lambda: self._link.begin(request, values, into))

    def _depart(self, send: Callable[[], Flight]) -> None:
        assert self._flight is None, "one exchange at a time"
        begun_at = time.perf_counter()
        self._flight = send()
        self.seconds = time.perf_counter() - begun_at

    def _request(
        self,
        kind: RequestKind,
        vectors: tuple[str, ...],
        total: Total,
        *,
        present: bytes = b"",
        reason: str = "",
        base_version: int | None = None,
    ) -> Request:
        if self._stream is None:
            self._seq += 1
        return Request(
            kind=kind,
            seq=self._seq,
            base_version=self.note.version if base_version is None else base_version,
            vectors=vectors,
            samples=total.samples,
            steps=total.steps,
            loss=total.loss,
            present=present,
            spans=total.spans,
            lost_samples=total.lost_samples,
            lost_spans=total.lost_spans,
            reason=reason,
        )
