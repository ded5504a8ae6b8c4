"""What a worker tells of itself while it trains: steps, samples, and where its time goes."""

from __future__ import annotations

import time

from cadenza.plane.link import Link

TOLD_EVERY_S = 1.0
"""Between two exchanges: a worker that takes long local steps still shows that it lives."""


class Meter:
    """Counts, and passes the figures on."""

    def __init__(self, link: Link) -> None:
        self.steps = 0
        """Optimizer steps since the worker joined."""
        self._link = link
        self._samples = 0
        self._compute_seconds = 0.0
        self._computing_since = self._told_at = time.perf_counter()

    def step(self, samples: int) -> None:
        """One more optimizer step. Called at every step, so it does next to nothing."""
        self.steps += 1
        self._samples += samples
        now = time.perf_counter()
        if now - self._told_at > TOLD_EVERY_S:
            self.tell(None)

    def pause(self) -> float:
        """Something else than computing begins; returns the time, by ``time.perf_counter``."""
        now = time.perf_counter()
        self._compute_seconds += now - self._computing_since
        self._computing_since = now
        return now

    def resume(self) -> None:
        """Computing goes on."""
        self._computing_since = time.perf_counter()

    def excluded(self, since: float) -> float:
        """Seconds that have passed since, none of them computing; computing goes on."""
        self.resume()
        return self._computing_since - since

    def tell(self, apply_seconds: float | None) -> None:
        """Pass the figures on; ``apply_seconds`` is what an exchange took beyond the network, if there was one."""
        self._told_at = self.pause()
        self._link.telemetry(
            steps=self.steps,
            samples=self._samples,
            compute_seconds=self._compute_seconds,
            apply_seconds=apply_seconds,
        )
