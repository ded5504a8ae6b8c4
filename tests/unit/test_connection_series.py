"""Frames that are made as they are sent: their order, their thread, their buffers, and what ends them."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from cadenza.plane.connection import Buffer, Connection, Frame, Pending
from cadenza.plane.messages import Done, Message, Publish, Read, State
from cadenza.plane.wire import Identity, Role

SOON_S = 5.0
STATE = State(0, 0)


class Keeper:
    """The other end: keeps what comes, may be held up, and answers Read."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.bodies: list[bytes] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.ended = threading.Event()
        self.error: Exception | None = None
        self._arrived = threading.Condition()
        self._buffer = bytearray()

    def body(self, connection: Connection, message: Message, length: int) -> Sequence[Buffer]:
        self.go_on.wait(SOON_S)
        self._buffer = bytearray(length)
        return [memoryview(self._buffer)]

    def handle(self, connection: Connection, call: int, message: Message) -> None:
        if isinstance(message, Read):
            connection.reply(call, STATE)
            return
        with self._arrived:
            self.messages.append(message)
            self.bodies.append(bytes(self._buffer))
            self._arrived.notify_all()
        self._buffer = bytearray()

    def closed(self, connection: Connection, error: Exception | None) -> None:
        self.error = error
        self.ended.set()

    def wait_for(self, count: int) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.messages) >= count, SOON_S)


class Pair:
    """Two connections on one pair of sockets; ``here`` sends the series."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        identity = Identity(Role.WORKER)
        self.at_home, self.keeper = Keeper(), Keeper()
        self.here = Connection(ours, "there", identity, self.at_home).start()
        self.there = Connection(theirs, "here", identity, self.keeper).start()

    def close(self) -> None:
        for end in (self.here, self.there):
            end.close()
            end.join(SOON_S)
        self.keeper.go_on.set()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()
    assert not [thread for thread in threading.enumerate() if thread.name.endswith((" here", " there"))]


def frame(number: int, size: int = 0) -> Frame:
    return Frame(Publish((str(number),)), [memoryview(bytes([number % 256]) * size)] if size else ())


def names(keeper: Keeper) -> list[str]:
    return [message.vectors[0] for message in keeper.messages if isinstance(message, Publish)]


def test_frames_are_made_on_the_senders_thread_each_after_the_one_before_it_left(pair: Pair) -> None:
    made: list[tuple[str, int]] = []

    def series() -> Iterator[Frame]:
        for number in range(5):
            made.append((threading.current_thread().name, pair.here.sent_bytes))
            yield frame(number, 1_000)

    pair.here.stream(series())
    assert pair.here.flush(SOON_S)
    assert {thread for thread, _ in made} == {"send to there"}
    sent = [count for _, count in made]
    steps = [after - before for before, after in itertools.pairwise(sent)]
    assert sent[0] == 0
    assert all(step > 1_000 for step in steps)
    pair.keeper.wait_for(5)
    assert pair.keeper.bodies == [bytes([number]) * 1_000 for number in range(5)]


def test_what_is_queued_leaves_in_order_and_nothing_is_made_before_its_turn(pair: Pair) -> None:
    ready, begun = threading.Event(), threading.Event()
    later: list[int] = []

    def waiting() -> Iterator[Frame]:
        yield frame(1)
        begun.set()
        assert ready.wait(SOON_S)
        yield frame(2)

    def after() -> Iterator[Frame]:
        later.append(1)
        yield frame(4)

    pair.here.send(Publish(("0",)))
    pair.here.stream(waiting())
    pair.here.send(Publish(("3",)))
    pair.here.stream(after())
    pair.here.stream(iter([]))
    pair.here.send(Publish(("5",)))
    assert begun.wait(SOON_S)
    pair.keeper.wait_for(2)
    assert not later
    assert not pair.here.flush(0.01)
    ready.set()
    pair.keeper.wait_for(6)
    assert names(pair.keeper) == ["0", "1", "2", "3", "4", "5"]


def test_a_series_that_waits_does_not_keep_anything_from_being_received(pair: Pair) -> None:
    ready = threading.Event()

    def waiting() -> Iterator[Frame]:
        assert ready.wait(SOON_S)
        yield frame(0)

    pair.here.stream(waiting())
    pair.there.send(Publish(("hello",)))
    pair.at_home.wait_for(1)
    ready.set()
    pair.keeper.wait_for(1)


def test_a_buffer_may_be_used_again_once_the_next_frame_is_asked_for(pair: Pair) -> None:
    scratch = bytearray(200_000)

    def series() -> Iterator[Frame]:
        for number in range(20):
            scratch[:] = bytes([number]) * len(scratch)
            yield Frame(Publish((str(number),)), [memoryview(scratch)])

    pair.keeper.go_on.clear()  # The receiver is behind, so that the sender has to wait in the middle of a frame.
    pair.here.stream(series())
    assert not pair.here.flush(0.02)
    pair.keeper.go_on.set()
    pair.keeper.wait_for(20)
    assert pair.keeper.bodies == [bytes([number]) * len(scratch) for number in range(20)]


def test_a_pending_call_is_sent_when_the_last_frame_of_its_series_is(pair: Pair) -> None:
    ready = threading.Event()
    pending = Pending("there")

    def series() -> Iterator[Frame]:
        yield frame(0)
        assert ready.wait(SOON_S)
        yield frame(1)

    pair.here.stream(series(), pending)
    pair.keeper.wait_for(1)
    assert pending.sent_at == 0
    ready.set()
    assert pair.here.flush(SOON_S)
    assert pending.sent_at > 0


def test_a_frame_of_a_series_can_answer_a_call(pair: Pair) -> None:
    pair.here.stream([Frame(Done(), answers=99)])
    assert pair.keeper.ended.wait(SOON_S)
    assert "answers call 99, which is not open" in str(pair.keeper.error)


def test_finish_and_flush_wait_for_the_series_before_them(pair: Pair) -> None:
    pair.here.stream(frame(number, 100_000) for number in range(20))
    assert pair.here.flush(SOON_S)
    assert pair.here.sent_bytes > 20 * 100_000
    pair.here.stream(frame(number, 100_000) for number in range(20, 40))
    pair.here.finish()
    pair.here.stream(frame(number) for number in range(99, 100))
    assert pair.keeper.ended.wait(SOON_S)
    assert names(pair.keeper) == [str(number) for number in range(40)]


def test_an_exception_in_a_series_ends_the_connection_and_is_logged(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    unreached = threading.Event()

    def broken() -> Iterator[Frame]:
        yield frame(0)
        raise ZeroDivisionError("the third unit")

    def never() -> Iterator[Frame]:
        unreached.set()
        yield frame(1)

    waiting = pair.here.call(Publish(("x",)))
    with caplog.at_level(logging.ERROR):
        pair.here.stream(broken())
        pair.here.stream(never())
        with pytest.raises(ConnectionError, match=r"making a frame for there failed: ZeroDivisionError"):
            waiting.result(SOON_S)
        assert pair.keeper.ended.wait(SOON_S)
        pair.here.join(SOON_S)
    assert "the third unit" in caplog.text
    assert "ZeroDivisionError" in str(pair.at_home.error)
    assert not unreached.is_set()
    assert not pair.here.flush(SOON_S)


@pytest.mark.parametrize("end", ["here", "there"])
def test_a_connection_that_ends_in_the_middle_of_a_series_asks_for_no_more_of_it(
    pair: Pair, end: str
) -> None:
    made: list[int] = []
    closed = threading.Event()

    def series() -> Iterator[Frame]:
        try:
            for number in range(10_000):
                made.append(number)
                yield frame(number, 500_000)
        finally:
            closed.set()

    pair.keeper.go_on.clear()
    pair.here.stream(series())
    assert not pair.here.flush(0.02)
    getattr(pair, end).close()
    pair.keeper.go_on.set()
    pair.here.join(SOON_S)
    assert closed.wait(SOON_S)
    assert len(made) < 100
    pair.here.stream(series())
    assert len(made) < 100


def test_calls_beside_a_series_are_answered(pair: Pair) -> None:
    pair.here.stream(frame(number, 10_000) for number in range(50))
    call = pair.here.call(Read(()))
    pair.here.stream(frame(number, 10_000) for number in range(50))
    assert call.result(SOON_S) == STATE
    pair.keeper.wait_for(100)
