"""The parts of shaped networks that need no network: names, rates, what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from benchmarks.netlab import Network
from benchmarks.netlab.naming import NetworkName, start_of
from benchmarks.netlab.requirements import requirements
from benchmarks.netlab.shaping import bits_per_second, bucket, transfer_s
from hypothesis import given
from hypothesis import strategies as st

NAMES = st.builds(NetworkName, *[st.integers(0, 2**31)] * 3)


@given(NAMES, st.sampled_from(["w1", "switch", "a-b"]))
def test_a_name_is_read_back_from_all_that_bears_it(name: NetworkName, node: str) -> None:
    assert NetworkName.of(name.namespace(node)) == name
    assert NetworkName.of(str(name)) == name


@pytest.mark.parametrize(
    "other", ["", "cdz", "cdz1x2-w1", "cdz1t2x3w1", "nl-w1", "xcdz1t2x3-w1", "cdzat2x3-w1"]
)
def test_what_is_not_ours_is_not_taken_for_it(other: str) -> None:
    assert NetworkName.of(other) is None


@given(NAMES)
def test_subnets_are_private_and_follow_one_another(name: NetworkName) -> None:
    ten, second, third = map(int, name.subnet.split("."))
    assert (ten, 64 <= second <= 255, 0 <= third <= 255) == (10, True, True)
    assert NetworkName(name.pid, name.start, name.number + 1).subnet != name.subnet


def test_an_owner_lives_while_its_process_does_and_nobody_else_with_its_number_is_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        start = start_of(process.pid)
        assert start is not None
        assert NetworkName(process.pid, start, 0).owner_lives
        assert not NetworkName(process.pid, start - 1, 0).owner_lives
        process.kill()
        os.waitid(
            os.P_PID, process.pid, os.WEXITED | os.WNOWAIT
        )  # It has ended; its exit status is still unread.
        assert not NetworkName(process.pid, start, 0).owner_lives
    assert not NetworkName(process.pid, start, 0).owner_lives


@pytest.mark.parametrize(
    ("rate", "bits"), [("100mbit", 10**8), ("1gbit", 10**9), ("1.5mbit", 1_500_000), ("64kbit", 64_000)]
)
def test_rates_are_read(rate: str, bits: int) -> None:
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "100", "0mbit", "-1mbit", "100 mbit", "100Mbit", "infmbit", "100mbits"])
def test_other_rates_are_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="kbit, mbit or gbit"):
        bits_per_second(rate)


def test_a_bucket_holds_a_segment_on_fast_links_and_the_queue_two_of_them_on_all() -> None:
    assert bucket("20mbit").arguments() == ["tbf", "rate", "20000000bit", "burst", "16384", "limit", "147456"]
    assert bucket("100mbit").burst_bytes > 65_536
    assert bucket("10gbit").burst_bytes == 10**10 / 8 / 250
    assert all(bucket(rate).queue_bytes >= 131_072 for rate in ("1mbit", "20mbit", "1gbit"))


def test_the_least_time_of_a_transfer() -> None:
    assert transfer_s(5_153_792, "20mbit") == pytest.approx(2.156, abs=0.001)


@pytest.mark.parametrize(
    "nodes", [(), ("w1", "w1"), ("Head",), ("switch",), ("a" * 13,), ("1a",), ("a b",), ("../a",)]
)
def test_names_that_cannot_be_are_refused(nodes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="nodes"):
        Network(nodes)


def test_a_wrong_rate_is_refused_before_anything_is_made() -> None:
    with pytest.raises(ValueError, match="'fast'"):
        Network(rate="fast")


def test_outside_its_block_a_network_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="with"):
        Network().address("head")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in (requirements.__wrapped__() or "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda command: None if command == "tc" else "/bin/x")
    assert "'tc'" in (requirements.__wrapped__() or "")
