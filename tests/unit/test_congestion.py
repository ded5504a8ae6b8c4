"""Plans for slow links and fan-in, sockets that follow them, and the pace that finds a link's rate."""

from __future__ import annotations

import logging
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.plane import congestion
from cadenza.plane.congestion import (
    FIRST_RATE_BYTES_PER_S,
    CongestionControlError,
    TransportPlan,
    plan_for,
)
from cadenza.plane.pacing import CEILING_ROUNDS, PacedRound, PaceState, first_pace, next_pace
from cadenza.plane.sockets import receive_exactly

KB = 1024
MBIT = 0.956e6 / 8
"""Payload bytes/s of a link of 1 Mbit/s."""
ALL = ("cubic", "reno", "bbr")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the options are Linux's")


@pytest.mark.parametrize(
    ("setting", "allowed", "chosen"),
    [
        ("auto", ALL, "cubic"),
        ("auto", ("bbr", "reno"), "reno"),
        ("auto", ("bbr",), "bbr"),
        ("reno", ALL, "reno"),
        ("bbr", ALL, "bbr"),
    ],
)
def test_the_first_that_may_be_chosen_is(setting: str, allowed: tuple[str, ...], chosen: str) -> None:
    assert plan_for(setting, allowed, 1, None, None).congestion_control == chosen


def test_what_may_not_be_chosen_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        CongestionControlError, match=r"=cubic: .* choose reno, bbr only; set one of these or auto"
    ):
        plan_for("cubic", ("reno", "bbr"), 1, None, None)
    with pytest.raises(CongestionControlError, match="none only"):
        plan_for("auto", (), 1, None, None)
    with pytest.raises(ValueError, match="vegas"):
        plan_for("vegas", ALL, 1, None, None)


rates = st.none() | st.floats(1e3, 1e10)
rtts = st.none() | st.floats(0, 2)


@given(fan_in=st.integers(1, 500), rate=rates, rtt_s=rtts)
def test_bbr_is_never_unpaced_and_all_who_share_stay_below_the_rate(
    fan_in: int, rate: float | None, rtt_s: float | None
) -> None:
    plan = plan_for("bbr", ALL, fan_in, rate, rtt_s)
    assert plan.pacing_bytes_per_s is not None
    assert plan.pacing_bytes_per_s * fan_in <= max(fan_in, rate or FIRST_RATE_BYTES_PER_S)


@given(fan_in=st.integers(1, 500), rate=rates, rtt_s=rtts, setting=st.sampled_from(["auto", *ALL]))
def test_buffers_and_runs_keep_their_bounds(
    fan_in: int, rate: float | None, rtt_s: float | None, setting: str
) -> None:
    plan = plan_for(setting, ALL, fan_in, rate, rtt_s)
    assert 16 * KB <= plan.run_bytes <= 64 * KB
    assert (plan.send_buffer_bytes is None) == (rate is None or rtt_s is None)
    if plan.send_buffer_bytes is not None and rate is not None and rtt_s is not None:
        assert 16 * KB <= plan.send_buffer_bytes <= 4096 * KB
        if plan.send_buffer_bytes < 4096 * KB:
            assert plan.send_buffer_bytes * fan_in >= rate * rtt_s, "the link would run dry"


@pytest.mark.parametrize(
    ("fan_in", "mbit", "rtt_s", "plan"),
    [
        (8, 20, 1e-4, ("cubic", 295_762, 16 * KB, 16 * KB)),
        (8, 100, 1e-4, ("cubic", 1_478_812, 16 * KB, 16 * KB)),
        (2, 100, 1e-4, ("cubic", None, 128 * KB, 48 * KB)),
        (1, 20, 1e-4, ("cubic", None, 128 * KB, 16 * KB)),
        (1, 100, 0.05, ("cubic", None, 686_936, 64 * KB)),
    ],
)
def test_plans_of_links_that_were_measured(
    fan_in: int, mbit: int, rtt_s: float, plan: tuple[str, int | None, int, int]
) -> None:
    found = plan_for("auto", ALL, fan_in, mbit * MBIT, rtt_s)
    assert found == TransportPlan(
        congestion_control=plan[0], pacing_bytes_per_s=plan[1], send_buffer_bytes=plan[2], run_bytes=plan[3]
    )


def test_within_a_host_nothing_is_limited_and_nothing_has_to_be_allowed() -> None:
    assert plan_for("cubic", (), 8, 1e6, 0.1, local=True) == TransportPlan(
        congestion_control=None, pacing_bytes_per_s=None, send_buffer_bytes=None, run_bytes=1024 * KB
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0, None, None), "fan_in 0"), ((1, 0.0, None), "rate_bytes_per_s 0"), ((1, None, -1.0), "rtt_s -1")],
)
def test_what_cannot_be_is_refused(arguments: tuple[int, float | None, float | None], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plan_for("auto", ALL, *arguments)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        yield ours, theirs


def pacing_of(sock: socket.socket) -> int:
    value: int = struct.unpack("=I", sock.getsockopt(socket.SOL_SOCKET, 47, 4))[0]
    return value


@linux
def test_a_socket_follows_its_plan_and_a_newer_one(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    chosen = congestion.choosable()[-1]
    congestion.tune(ours, plan_for(chosen, [chosen], 8, 20 * MBIT, 0.0))
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode() == chosen
    assert pacing_of(ours) == 295_762
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * 16 * KB  # The kernel doubles it.
    congestion.tune(ours, plan_for(chosen, [chosen], 1, 40e9, 0.0))
    assert pacing_of(ours) == (2**32 - 2 if chosen == "bbr" else 2**32 - 1)
    ours.sendall(b"still there")
    assert theirs.recv(20) == b"still there"


@linux
def test_pacing_holds_a_sender_to_its_rate(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    plan = TransportPlan(
        congestion_control=None, pacing_bytes_per_s=2_000_000, send_buffer_bytes=16 * KB, run_bytes=16 * KB
    )
    congestion.tune(ours, plan)
    theirs.settimeout(10.0)
    sender = threading.Thread(target=ours.sendall, args=(bytes(1_000_000),), daemon=True)
    sender.start()
    receive_exactly(theirs, 700_000)  # Linux does not pace a connection's first ten segments, here of 64 KB.
    begun = time.monotonic()
    receive_exactly(theirs, 300_000)
    taken_s = time.monotonic() - begun
    assert taken_s > 0.1  # 0.15 s at the pace; unpaced 0.001 s.
    sender.join(10.0)


@linux
def test_only_what_the_kernel_lets_us_have_is_choosable() -> None:
    found = congestion.choosable()
    assert found
    assert list(found) == [name for name in ALL if name in found]
    for name in found:
        with socket.socket() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def test_a_refusal_means_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Guarded(socket.socket):
        def setsockopt(self, level: int, option: int, value: bytes) -> None:  # type: ignore[override]
            if value == b"cubic":
                raise PermissionError(1, "Operation not permitted")
            if value == b"bbr":
                raise FileNotFoundError(2, "No such file or directory")

    class Available:
        def read_text(self) -> str:
            return "reno bbr cubic\n"

    monkeypatch.setattr(socket, "socket", Guarded)
    monkeypatch.setattr(congestion, "AVAILABLE", Available())
    assert congestion.choosable.__wrapped__() == ("reno",)


def test_a_system_without_linux_s_list_has_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(congestion, "AVAILABLE", Path("/nowhere/at/all"))
    assert congestion.choosable.__wrapped__() == ()


def test_loopback_is_local(pair: tuple[socket.socket, socket.socket]) -> None:
    assert congestion.is_local(pair[0])


@linux
def test_the_choice_is_logged_once(
    pair: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    congestion._tell.cache_clear()
    plan = plan_for("auto", congestion.choosable(), 8, 20 * MBIT, 0.0)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            congestion.tune(pair[0], plan)
    assert [record.message for record in caplog.records] == [
        f"connections to other hosts use {plan.congestion_control}, paced"
    ]


QUEUE_BYTES = 128_000
ROUND_BYTES = 8_000_000


def fluid(state: PaceState, capacity: float, waits: float = 0.0) -> PacedRound:
    """A round of 8 MB over a link with a short queue: what comes too fast first queues, then is lost."""
    pace = 0.99 * state.rate_bytes_per_s
    excess = max(0.0, 1 - capacity / pace) * ROUND_BYTES
    lost = max(0.0, excess - QUEUE_BYTES) / ROUND_BYTES
    sending_s = ROUND_BYTES / min(pace, capacity * (1 - min(0.3, 4 * lost)))
    return PacedRound(
        delivered_bytes_per_s=ROUND_BYTES / (sending_s + waits),
        queueing_delay_s=min(excess, QUEUE_BYTES) / capacity,
        retransmitted_share=lost,
    )


def run(state: PaceState, capacity: float, rounds: int, waits: float = 0.0) -> tuple[PaceState, list[float]]:
    """The state after so many rounds, and what each delivered over the link's rate."""
    shares = []
    for _ in range(rounds):
        seen = fluid(state, capacity, waits)
        shares.append(seen.delivered_bytes_per_s / capacity)
        state = next_pace(state, seen)
    return state, shares


@pytest.mark.parametrize("mbit", [5, 20, 100])
@pytest.mark.parametrize("first", [0.3, 0.75, 1.0, 1.6])
def test_the_pace_finds_the_links_rate_and_stays_there(mbit: int, first: float) -> None:
    capacity = mbit * MBIT
    state, _ = run(first_pace(first * capacity), capacity, 20)
    _, shares = run(state, capacity, 64)
    assert min(shares) > 0.7
    assert sum(shares) / len(shares) > 0.95
    assert sorted(shares)[6] > 0.92, "overloaded rounds must be few"


def test_a_link_that_becomes_slower_is_followed_within_a_few_rounds() -> None:
    state, _ = run(first_pace(100 * MBIT), 100 * MBIT, 10)
    state, shares = run(state, 20 * MBIT, 16)
    assert state.rate_bytes_per_s < 1.1 * 20 * MBIT
    assert sum(shares[-8:]) / 8 > 0.9


def test_a_link_that_becomes_faster_is_followed_in_a_few_rounds() -> None:
    state, _ = run(first_pace(20 * MBIT), 20 * MBIT, 10)
    state, shares = run(state, 100 * MBIT, CEILING_ROUNDS + 25)
    assert sum(shares[-8:]) / 8 > 0.9


def test_workers_that_compute_do_not_slow_the_pace_down() -> None:
    state, _ = run(first_pace(20 * MBIT), 20 * MBIT, 10)
    after, _ = run(state, 20 * MBIT, 50, waits=5.0)
    assert after.rate_bytes_per_s == state.rate_bytes_per_s


@given(
    rate=st.floats(1e3, 1e10), delivered=st.floats(1.0, 1e10), delay_s=st.floats(0, 10), lost=st.floats(0, 1)
)
def test_the_pace_stays_a_rate_whatever_comes(
    rate: float, delivered: float, delay_s: float, lost: float
) -> None:
    seen = PacedRound(delivered_bytes_per_s=delivered, queueing_delay_s=delay_s, retransmitted_share=lost)
    state = first_pace(rate)
    for _ in range(5):
        state = next_pace(state, seen)
        assert 0 < state.rate_bytes_per_s <= rate * 1.125**5 * 1.001


def test_a_pace_needs_a_rate() -> None:
    with pytest.raises(ValueError, match="delivered_bytes_per_s 0"):
        first_pace(0.0)
