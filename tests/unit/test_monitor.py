"""The link monitor and the causes of a slow sync, on synthetic samples in which one thing is wrong at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.plane.causes import Cause, Observed, SyncSplit, cause, held_up, split
from cadenza.plane.monitor import (
    BASE_RTT_WINDOW_S,
    REFERENCE_WINDOW_S,
    LeftOut,
    LinkFacts,
    LinkMonitor,
    LinkSample,
    congestion_score,
)
from cadenza.plane.tcp_info import TcpInfo

MB = 10**6
RATE = 2.4 * MB
"""Bytes/s of a link of 20 Mbit/s, about."""
BASE_RTT_S = 0.02
PARTS = SyncSplit(send_s=0.5, wait_s=0.05, serve_s=0.01, receive_s=0.4)


@dataclasses.dataclass
class Wire:
    """A connection whose counters are moved by hand, with a monitor beside it."""

    monitor: LinkMonitor = dataclasses.field(default_factory=LinkMonitor)
    now: float = 1000.0
    counters: dict[str, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(
            ("bytes_acked", "bytes_sent", "bytes_retrans", "total_retrans", "busy_us", "rwnd_limited_us"), 0
        )
    )
    missing: tuple[str, ...] = ()
    """Counters that this kernel does not have."""

    def sample(self, rtt_s: float, probe_s: float | None = None) -> LinkSample:
        known: dict[str, Any] = {name: self.counters.get(name) for name in TcpInfo.__struct_fields__}
        known |= {"state": 1, "rtt_us": int(rtt_s * 1e6), "rttvar_us": 0, "rcv_rtt_us": 0, "mss": 1448}
        known |= {"snd_cwnd": 10, "unacked": 0, "app_limited": False} | dict.fromkeys(self.missing)
        moved = self.counters["bytes_acked"] + 1000
        return LinkSample(at_s=self.now, tcp=TcpInfo(**known), moved_bytes=moved, probe_rtt_s=probe_s)

    def transfer(
        self,
        size: int = MB,
        rate: float = RATE,
        *,
        rtt_s: float = BASE_RTT_S + 0.005,
        retransmitted: float = 0.0,
        rwnd: float = 0.0,
        probe_s: float | None = None,
        every_s: float = 2.0,
    ) -> LinkFacts | None:
        """One transfer of ``size`` bytes; ``rtt_s`` at its end, ``rwnd`` its share limited by the receiver."""
        before = self.sample(BASE_RTT_S)
        again = int(size * retransmitted)
        busy_us = round(size / rate * 1e6)
        grown = {"bytes_acked": size, "bytes_sent": size + again, "bytes_retrans": again}
        grown |= {
            "total_retrans": -(-again // 1448),
            "busy_us": busy_us,
            "rwnd_limited_us": round(rwnd * busy_us),
        }
        for name, value in grown.items():
            self.counters[name] += value
        self.now += every_s
        return self.monitor.observe(before, self.sample(rtt_s, probe_s), self.now)

    def facts(self, size: int = MB, rate: float = RATE, **kind: Any) -> LinkFacts:
        facts = self.transfer(size, rate, **kind)
        assert facts is not None
        return facts


def test_a_quiet_link_shows_its_rate_and_no_congestion() -> None:
    wire = Wire()
    for _ in range(5):
        facts = wire.facts()
    assert facts.goodput_bytes_per_s == pytest.approx(RATE)
    assert (facts.bytes, facts.retransmits, facts.rwnd_limited_share) == (MB, 0, 0.0)
    assert (facts.base_rtt_s, facts.rtt_s) == (BASE_RTT_S, 0.025)
    assert facts.queueing_delay_s == pytest.approx(0.005)
    assert facts.congestion == pytest.approx(0.005 / 0.105)
    assert facts.probe_delay_s is None
    assert wire.monitor.congestion == facts.congestion


def test_a_link_that_was_always_slow_is_not_congested() -> None:
    wire = Wire()
    for _ in range(400):
        facts = wire.facts(rate=0.1 * MB)
    assert facts.congestion < 0.05
    assert cause(facts, None, PARTS).cause is Cause.NONE


def test_a_probe_tells_our_own_queue_from_that_of_others() -> None:
    ours, others = Wire(), Wire()
    for wire in (ours, others):
        wire.facts(probe_s=BASE_RTT_S)
    own = ours.facts(rtt_s=0.2, probe_s=BASE_RTT_S)
    assert own.queueing_delay_s == pytest.approx(0.18)
    assert (own.probe_delay_s, own.score) == (0.0, 0.0)
    assert others.facts(rtt_s=0.2, probe_s=BASE_RTT_S + 0.1).score == pytest.approx(0.5)
    assert Wire().facts(rtt_s=0.2).score == pytest.approx(0.18 / 0.28)


def test_the_idle_time_between_transfers_does_not_lower_the_goodput() -> None:
    wire = Wire()
    assert wire.facts(every_s=300.0).goodput_bytes_per_s == wire.facts(every_s=0.6).goodput_bytes_per_s


def test_the_base_rtt_is_forgotten_after_a_minute() -> None:
    wire = Wire()
    assert wire.facts().base_rtt_s == BASE_RTT_S
    before = wire.sample(0.08)
    wire.counters["bytes_acked"] += MB
    wire.counters["busy_us"] += 400_000
    just_in = wire.monitor.observe(before, wire.sample(0.08), wire.now + BASE_RTT_WINDOW_S)
    assert just_in is not None
    assert just_in.base_rtt_s == BASE_RTT_S
    before = wire.sample(0.08)
    wire.counters["bytes_acked"] += MB
    wire.counters["busy_us"] += 400_000
    too_late = wire.monitor.observe(before, wire.sample(0.08), wire.now + BASE_RTT_WINDOW_S + 0.1)
    assert too_late is not None
    assert (too_late.base_rtt_s, too_late.queueing_delay_s) == (0.08, 0.0)


def test_an_rtt_that_was_not_measured_yet_is_no_minimum() -> None:
    wire = Wire()
    before = wire.sample(0.0)
    wire.counters |= {"bytes_acked": MB, "busy_us": 400_000}
    facts = wire.monitor.observe(before, wire.sample(0.03), wire.now)
    assert facts is not None
    assert facts.base_rtt_s == 0.03


def test_after_ten_minutes_a_lower_rate_is_the_new_normal() -> None:
    wire = Wire()
    wire.facts()
    halved = [wire.facts(rate=RATE / 2, every_s=60.0) for _ in range(12)]
    assert halved[3].score == pytest.approx(0.5, rel=1e-5)
    assert halved[3].reference_bytes_per_s == pytest.approx(RATE)
    assert wire.now - 1002.0 > REFERENCE_WINDOW_S
    assert halved[-1].score == pytest.approx(0.005 / 0.105)


def test_congestion_follows_the_score_by_thirds_and_recovers() -> None:
    wire = Wire()
    first = wire.facts().congestion
    rising = [wire.facts(rate=RATE / 4).congestion for _ in range(8)]
    assert rising[0] == pytest.approx(first + 0.3 * (0.75 - first))
    assert rising == sorted(rising)
    assert rising[-1] > 0.7
    assert [wire.facts().congestion for _ in range(12)][-1] < 0.06


@given(st.floats(0, 100), st.floats(1, 1e10), st.floats(1, 1e10), st.floats(0, 1))
def test_the_score_is_between_0_and_1_and_grows_with_every_signal(
    queue_s: float, goodput: float, reference: float, share: float
) -> None:
    score = congestion_score(queue_s, goodput, reference, share)
    assert 0 <= score <= 1
    assert congestion_score(queue_s + 1, goodput, reference, share) >= score
    assert congestion_score(queue_s, goodput / 2, reference, share) >= score
    assert congestion_score(queue_s, goodput, reference, share + 0.01) >= score


@pytest.mark.parametrize(
    ("score", "value"),
    [(congestion_score(0.1, 1, 1, 0), 0.5), (congestion_score(0, 1, 4, 0), 0.75), (congestion_score(0, 1, 1, 0.03), 0.3)],
    ids=["a queue of 100 ms", "a quarter of the rate", "3 % sent again"],
)  # fmt: skip
def test_the_score_of_one_signal(score: float, value: float) -> None:
    assert score == pytest.approx(value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"size": 60_000, "rate": 1e5}, LeftOut.SMALL),
        ({"rate": 1e9}, LeftOut.BRIEF),
        ({"rwnd": 0.51}, LeftOut.RECEIVER),
    ],
)
def test_what_says_nothing_about_the_network_is_left_out_and_counted(
    kind: dict[str, Any], reason: LeftOut
) -> None:
    wire = Wire()
    calm = wire.facts().congestion
    assert wire.transfer(**kind) is None
    assert wire.monitor.latest is reason
    assert wire.monitor.left_out == {reason: 1}
    assert wire.monitor.congestion == calm


def test_half_limited_by_the_receiver_is_still_a_fact() -> None:
    assert Wire().facts(rwnd=0.49).rwnd_limited_share == pytest.approx(0.49, abs=1e-5)


@pytest.mark.parametrize("missing", ["bytes_acked", "busy_us", "rwnd_limited_us"])
def test_a_kernel_that_tells_too_little_gives_no_facts(missing: str) -> None:
    wire = Wire(missing=(missing,))
    assert wire.transfer() is None
    assert wire.monitor.latest is LeftOut.UNSUPPORTED


def test_where_bytes_sent_again_are_not_counted_segments_are() -> None:
    exact, by_segments = Wire(), Wire(missing=("bytes_sent", "bytes_retrans"))
    share = exact.facts(retransmitted=0.05).retransmitted_share
    assert share == pytest.approx(0.05 / 1.05, rel=1e-3)
    assert by_segments.facts(retransmitted=0.05).retransmitted_share == pytest.approx(share, rel=0.02)


def test_small_transfers_can_be_joined_by_keeping_the_first_sample() -> None:
    wire = Wire()
    first = wire.sample(BASE_RTT_S)
    for _ in range(3):
        assert wire.transfer(size=40_000, rate=1e6) is None
    facts = wire.monitor.observe(first, wire.sample(BASE_RTT_S), wire.now)
    assert facts is not None
    assert facts.goodput_bytes_per_s == pytest.approx(1e6)


def test_samples_in_the_wrong_order_are_refused() -> None:
    wire = Wire()
    before = wire.sample(BASE_RTT_S)
    wire.transfer()
    with pytest.raises(ValueError, match="the older first"):
        wire.monitor.observe(wire.sample(BASE_RTT_S), before, wire.now)


def test_facts_and_reasons_travel_as_plain_values() -> None:
    for observed in (Wire().facts(probe_s=0.02), LeftOut.RECEIVER, None):
        assert (
            msgspec.msgpack.decode(msgspec.msgpack.encode(observed), type=LinkFacts | LeftOut | None)
            == observed
        )


def known_link() -> Wire:
    """A link that was seen at its best, with a probe."""
    wire = Wire()
    wire.facts(probe_s=BASE_RTT_S)
    return wire


def only(**kind: Any) -> Observed:
    """What the monitor says of a transfer in which only ``kind`` is wrong, on a known link."""
    wire = known_link()
    wire.transfer(**{"probe_s": BASE_RTT_S, **kind})
    return wire.monitor.latest


OURS_QUEUED_S = 32_000 / (RATE / 4)
"""What our own 32 KB of send buffer wait in front of a link at a quarter of its rate."""


@pytest.mark.parametrize(
    ("name", "push", "answer", "parts"),
    [
        (Cause.NONE, only(), only(), PARTS),
        (Cause.SLOW_SHARD, only(rate=RATE / 4, rwnd=0.9), only(), PARTS),
        (Cause.SLOW_SHARD, only(), only(), SyncSplit(send_s=0.4, wait_s=0.05, serve_s=2.0, receive_s=0.4)),
        (Cause.SLOW_WORKER, only(), only(), SyncSplit(send_s=0.4, wait_s=2.0, serve_s=0.01, receive_s=0.4)),
        (Cause.SLOW_WORKER, only(), only(rate=RATE / 4, rwnd=0.9), PARTS),
        (Cause.NETWORK_CONGESTED, only(rate=RATE / 2, rtt_s=0.08, probe_s=BASE_RTT_S + 0.05), only(), PARTS),
        (Cause.NETWORK_CONGESTED, only(), only(retransmitted=0.02, rtt_s=0.08, probe_s=0.07), PARTS),
        (Cause.LOWER_RATE, only(rate=RATE / 4, rtt_s=BASE_RTT_S + OURS_QUEUED_S), only(), PARTS),
        (Cause.LOWER_RATE, only(), only(rate=RATE / 4, rtt_s=BASE_RTT_S + OURS_QUEUED_S), PARTS),
        (Cause.LOWER_RATE, only(rate=RATE / 4, rtt_s=0.2, retransmitted=0.1), only(), PARTS),
        (Cause.LOSS, only(rate=RATE / 3, retransmitted=0.02), only(), PARTS),
        (Cause.LOSS, only(), only(rate=RATE / 3, retransmitted=0.02), PARTS),
        (Cause.NONE, None, LeftOut.SMALL, PARTS),
    ],
)  # fmt: skip
def test_a_single_cause_is_named(name: Cause, push: Observed, answer: Observed, parts: SyncSplit) -> None:
    assert cause(push, answer, parts).cause is name


def test_the_reason_has_the_numbers() -> None:
    verdict = cause(only(rate=RATE / 4), None, PARTS)
    assert verdict.reason == "0.60 MB/s of 2.40 MB/s, without a queue of others"


def test_without_a_probe_a_competitor_looks_like_a_lower_rate() -> None:
    wire = Wire()
    wire.facts()
    assert cause(wire.facts(rate=RATE / 2, rtt_s=0.08), None, PARTS).cause is Cause.LOWER_RATE


def test_a_late_probe_alone_is_no_congestion() -> None:
    assert cause(only(probe_s=BASE_RTT_S + 0.05), None, PARTS).cause is Cause.NONE


def test_the_parts_of_a_sync_follow_each_other() -> None:
    parts = split(10.0, 10.5, 12.0, waited_s=0.75, served_s=0.125)
    assert parts == SyncSplit(send_s=0.5, wait_s=0.75, serve_s=0.125, receive_s=0.625)


@given(send_s=st.floats(0, 10), rest_s=st.floats(0, 10), waited_s=st.floats(0, 20), served_s=st.floats(0, 20))
def test_the_parts_add_up_whatever_the_shard_says(
    send_s: float, rest_s: float, waited_s: float, served_s: float
) -> None:
    parts = split(5.0, 5.0 + send_s, 5.0 + send_s + rest_s, waited_s, served_s)
    assert min(parts.send_s, parts.wait_s, parts.serve_s, parts.receive_s) >= 0
    assert parts.total_s == pytest.approx(send_s + rest_s, abs=1e-9)


@pytest.mark.parametrize("marks", [(2.0, 1.0, 3.0, 0, 0), (1.0, 2.0, 1.5, 0, 0), (1.0, 2.0, 3.0, -1, 0)])
def test_moments_out_of_order_are_refused(marks: tuple[float, float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be in order"):
        split(*marks)


def test_the_last_worker_held_the_others_up() -> None:
    assert held_up({0: 1.0, 1: 4.5, 2: 1.5}) == (1, 3.0)
    assert held_up({0: 1.0}) is None
