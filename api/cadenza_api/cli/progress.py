"""Shows a job's progress while it is followed: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from cadenza_api.cli.rendering import event_text, left_text, loss_text, progress_text, rate_text, samples_text
from cadenza_api.client.watching import Update
from cadenza_api.views import JobView

LINE_EVERY_S = 5.0
"""A log file shall show that the job goes on, and not be filled by it."""


class Display(Protocol):
    """Where the updates of a followed job are shown."""

    def show(self, update: Update) -> None:
        """Show what is new."""

    def tell(self, message: str) -> None:
        """Show a message between two updates."""


class Lines:
    """Each event as a line, and a line of progress every few seconds and at the end."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._next_at = clock()
        self._shown = 0

    def show(self, update: Update) -> None:
        for event in update.events:
            self.tell(event_text(event))
        samples = update.job.progress.samples
        if samples != self._shown and (update.job.ended or self._clock() >= self._next_at):
            self.tell(progress_text(update.job.progress))
            self._shown = samples
            self._next_at = self._clock() + LINE_EVERY_S

    def tell(self, message: str) -> None:
        print(message, file=self._stream, flush=True)


class Bar:
    """The events scroll by above a bar with samples, loss, rate and time left."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, facts="")

    def show(self, update: Update) -> None:
        for event in update.events:
            self.tell(event_text(event))
        progress = update.job.progress
        self._progress.update(
            self._task,
            description=update.job.state,
            completed=progress.samples,
            total=progress.total_samples,
            facts=_facts(update.job),
        )

    def tell(self, message: str) -> None:
        # As Text: square brackets in a message are its own, and no markup.
        self._progress.console.print(Text(message))


@contextmanager
def display(stream: TextIO) -> Iterator[Display]:
    """The display that suits ``stream``, for as long as a job is followed."""
    if not stream.isatty():
        yield Lines(stream)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[facts]}"),
    )
    with Progress(*columns, console=Console(file=stream)) as progress:
        yield Bar(progress)


def _facts(job: JobView) -> str:
    progress = job.progress
    parts = (samples_text(progress), loss_text(progress), rate_text(progress), left_text(progress))
    return "  ".join(part for part in parts if part)
