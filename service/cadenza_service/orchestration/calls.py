"""Ray calls in flight, each with what to make of its answer; and events from other threads."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError, RuntimeEnvSetupError

from cadenza_service.orchestration.instructions import Event

OnValue = Callable[[Any], Event | None]
OnError = Callable[[Exception], Event | None]

FETCH_TIMEOUT_S = 10.0
"""For the answer of a call that has ended; answers are small."""

_WHY_LIMIT = 500
"""Characters of Ray's own words; it likes to tell a lot."""

_IDENTITY = ("class_name:", "actor_id:", "pid:", "name:", "namespace:", "ip:")
"""Lines in which Ray says which actor it speaks of, which our own texts do better."""

_DIED = "The actor died unexpectedly before finishing this task. The actor is dead because"
_CREATION = "raised in its creation task"


@dataclass(frozen=True)
class _Call:
    on_value: OnValue
    on_error: OnError
    deadline_s: float


class Calls:
    """What the supervisor waits for."""

    def __init__(self) -> None:
        self._calls: dict[Any, _Call] = {}
        self._told: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def add(
        self, reference: Any, on_value: OnValue, on_error: OnError, timeout_s: float = float("inf")
    ) -> None:
        """Watch a call. A timeout is an error like any other, though the call itself may go on."""
        self._calls[reference] = _Call(on_value, on_error, time.monotonic() + timeout_s)

    def tell(self, event: Event) -> None:
        """Hand in an event. Thread-safe."""
        self._told.put(event)

    def wait(self, timeout_s: float) -> list[Event]:
        """What the calls that end within ``timeout_s`` seconds mean; returns with the first of them."""
        events = [self._end(reference, self._calls.pop(reference)) for reference in self._ended(timeout_s)]
        events += self._overdue()
        while not self._told.empty():
            events.append(self._told.get())
        return [event for event in events if event is not None]

    def _ended(self, timeout_s: float) -> list[Any]:
        if not self._calls:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=timeout_s)
        if not ready:
            return []
        # One ends the wait, and all others that have ended are taken with it.
        return list(ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)[0])

    def _end(self, reference: Any, call: _Call) -> Event | None:
        try:
            value = ray.get(reference, timeout=FETCH_TIMEOUT_S)
        except RayError as error:
            return call.on_error(error)
        return call.on_value(value)

    def _overdue(self) -> list[Event | None]:
        now = time.monotonic()
        late = [reference for reference, call in self._calls.items() if now >= call.deadline_s]
        return [
            self._calls.pop(reference).on_error(GetTimeoutError("no answer in time")) for reference in late
        ]


def is_final(error: Exception) -> bool:
    """Whether the actor is gone for good or its method raised; false where it may only be out of reach."""
    return isinstance(error, ActorDiedError | RayTaskError | RuntimeEnvSetupError)


def why(error: Exception) -> str:
    """The error in a sentence, without Ray's identification of the actor."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    lines = [line.strip() for line in str(error).splitlines()]
    if isinstance(error, RuntimeEnvSetupError) or _CREATION in str(error):
        return _last_error(lines)[:_WHY_LIMIT]
    text = " ".join(line for line in lines if line and not line.startswith(_IDENTITY))
    return text.removeprefix(_DIED).strip().partition(" Some common causes include")[0][:_WHY_LIMIT]


def _last_error(lines: list[str]) -> str:
    """What a traceback or an installer says at its end."""
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or [line for line in lines if line])[-1]
