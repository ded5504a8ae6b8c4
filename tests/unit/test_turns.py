"""Transfers that wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cadenza.plane.connection import Frame
from cadenza.plane.messages import Done
from cadenza.plane.turns import Turns, rotation


def connection(*, closed: bool = False) -> Any:
    return SimpleNamespace(closed=closed)


def frames(count: int) -> list[Frame]:
    return [Frame(Done()) for _ in range(count)]


@pytest.mark.parametrize(
    ("first", "order"), [(0, "abc"), (1, "bca"), (2, "cab"), (4, "bca")], ids=["0", "1", "2", "4"]
)
def test_rotation(first: int, order: str) -> None:
    assert "".join(rotation("abc", first)) == order


def test_nothing_to_rotate() -> None:
    assert rotation([], 3) == []


def test_every_link_carries_one_transfer_at_a_time() -> None:
    # Worker k's i-th transfer goes to shard (k + 1 + i) mod n: no two workers to one shard at once.
    orders = [rotation(range(5), worker + 1) for worker in range(5)]
    for step in range(5):
        assert len({order[step] for order in orders}) == 5


def test_a_transfer_begins_once_all_of_the_one_before_was_handed_over() -> None:
    turns = Turns()
    first, second = turns.chain(connection(), frames(2)), turns.chain(connection(), frames(1))
    begun = threading.Event()

    def take() -> None:
        next(second)
        begun.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    next(first)
    assert not begun.is_set()
    assert len(list(first)) == 1
    assert begun.wait(5)
    thread.join(5)


def test_a_transfer_that_breaks_off_lets_the_next_one_go() -> None:
    def broken() -> Iterator[Frame]:
        yield Frame(Done())
        raise ValueError("no more")

    turns = Turns()
    first, second = turns.chain(connection(), broken()), turns.chain(connection(), frames(1))
    with pytest.raises(ValueError, match="no more"):
        list(first)
    assert len(list(second)) == 1


def test_a_connection_that_ended_before_its_turn_holds_nobody_up() -> None:
    turns = Turns()
    turns.chain(connection(closed=True), frames(1))
    assert len(list(turns.chain(connection(), frames(1)))) == 1
