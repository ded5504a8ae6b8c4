"""Reads server-sent events (the WHATWG HTML standard, section 9.2) from lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """One message of a stream. A comment, which servers send as a heartbeat, is a message without data."""

    event: str = "message"
    data: str = ""
    id: str | None = None

    @property
    def is_heartbeat(self) -> bool:
        return not self.data and self.event == "message"


def messages(lines: Iterable[str]) -> Iterator[Message]:
    """The messages in ``lines``, which come without their line ends.

    A message that the stream's end cuts off is dropped, as the standard asks: it will be sent again when the
    reader reconnects with the last id that it has seen whole.
    """
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if fields:
                yield Message(fields.get("event", "message"), fields.get("data", ""), fields.get("id"))
            fields = {}
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not name:
            yield Message()
        elif name == "data" and "data" in fields:
            fields["data"] += "\n" + value
        else:
            fields[name] = value
