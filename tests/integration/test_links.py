"""Rounds over links that slow down or break in the middle of a transfer, and workers that are killed there."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack

import pytest
from benchmarks.netlab import Network
from benchmarks.sync.rig import Crew, Servers

from tests.integration.netlab import MakeNetwork

PROGRAM = "tests.integration.link_programs:KnownValues"
RATE = "20mbit"
LENGTH = 150_000
LONG = 4 * LENGTH
"""For what has to happen before half of it has left."""

SHARD_BYTES = LENGTH * 4 // 2
"""What each of two shards holds."""

ROUND_BYTES = 2 * SHARD_BYTES
"""What a worker's node sends in a round: its update to the other shard, its shard's answer to the other worker."""

FIRST_STATE_BYTES = 2 * SHARD_BYTES
"""What the first worker's node sends before the first round; the other's, next to nothing."""

POLL_S = 0.02
WAIT_S = 20.0


@pytest.fixture
def network(make_network: MakeNetwork) -> Network:
    return make_network(("head", "w1", "w2", "w3"), rate=RATE)


class Running:
    """A job of local mode whose workers are in their rounds, with a shard beside each of the first two."""

    def __init__(
        self, network: Network, *nodes: str, length: int, rounds: int, round_timeout_s: float = 60.0
    ) -> None:
        self._ends = ExitStack()
        with ExitStack() as ends:
            servers = ends.enter_context(
                Servers(
                    network,
                    {"mode": "local", "local_steps": 1},
                    workers=len(nodes),
                    shards=nodes[:2],
                    coordinator="head",
                    round_timeout_s=round_timeout_s,
                )
            )
            crew = ends.enter_context(Crew(network, nodes))
            crew.open("values", PROGRAM, servers, length=length)
            crew.begin("values", "push", rounds=rounds)
            self.workers = crew.workers
            self._ends = ends.pop_all()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()


def wait_sent(network: Network, node: str, size_bytes: int) -> None:
    """Until so much has left a node in all, which only its counters can tell."""
    deadline_s = time.monotonic() + WAIT_S
    while (sent := network.counters(node).sent_bytes) < size_bytes:
        assert time.monotonic() < deadline_s, f"{node} sent {sent} bytes of {size_bytes} in {WAIT_S} s"
        time.sleep(POLL_S)


def test_a_link_that_slows_down_in_the_middle_of_a_round(network: Network) -> None:
    with Running(network, "w1", "w2", length=LENGTH, rounds=3) as running:
        wait_sent(network, "w1", FIRST_STATE_BYTES + ROUND_BYTES // 4)
        network.set_rate("w1", "1mbit")
        time.sleep(2.0)  # As long as the link is bad.
        network.set_rate("w1", RATE)
        results = [worker.take() for worker in running.workers]
    assert [result["right"] for result in results] == [True, True], results
    assert all(len(result["seconds"]) == 3 for result in results), results
    assert max(results[0]["seconds"]) > 1.5, results


def test_a_link_that_is_cut_in_the_middle_of_a_round_and_healed(network: Network) -> None:
    with Running(network, "w1", "w2", length=LENGTH, rounds=3) as running:
        wait_sent(network, "w1", FIRST_STATE_BYTES + ROUND_BYTES // 4)
        network.cut("w1")
        time.sleep(2.0)  # As long as the link is cut.
        network.heal("w1")
        results = [worker.take() for worker in running.workers]
    assert [result["right"] for result in results] == [True, True], results
    assert all(len(result["seconds"]) == 3 for result in results), results
    assert max(results[0]["seconds"]) > 2.0, results


def test_a_worker_that_is_cut_off_for_good_is_named(network: Network) -> None:
    """The third worker has no shard beside it: the others' contributions arrive, and they wait for it alone."""
    with Running(network, "w1", "w2", "w3", length=LENGTH, rounds=1000, round_timeout_s=3.0) as running:
        wait_sent(network, "w3", 2 * SHARD_BYTES // 4)
        network.cut("w3")
        others = [worker.take() for worker in running.workers[:2]]
        network.heal("w3")
        cut_off = running.workers[2].take()
    for result in others:
        assert result["right"]
        assert "waited 3 s for worker 2" in result["error"], result
        assert 2.5 < result["after_s"] < 6.0, result
    assert cut_off["right"]
    # It hears why as soon as it can hear anything.
    assert "waited 3 s for worker 2" in cut_off["error"], cut_off


def test_a_node_with_a_shard_that_is_cut_off_for_good_is_named(network: Network) -> None:
    """Nobody's contribution can arrive as a whole: the round has its deadline all the same."""
    with Running(network, "w1", "w2", length=LONG, rounds=1000, round_timeout_s=3.0) as running:
        wait_sent(network, "w1", (FIRST_STATE_BYTES + ROUND_BYTES // 8) * LONG // LENGTH)
        network.cut("w2")
        result = running.workers[0].take()
        network.heal("w2")
        cut_off = running.workers[1].take()
    assert result["right"]
    assert "worker 0 (not yet on parameter server 1)" in result["error"], result
    assert result["after_s"] < 6.0, result
    assert cut_off["right"]
    assert "waited 3 s for worker 1" in cut_off["error"], cut_off


def test_a_worker_that_is_killed_in_the_middle_of_its_update_is_named_at_once(network: Network) -> None:
    with Running(network, "w1", "w2", "w3", length=LENGTH, rounds=1000) as running:
        wait_sent(network, "w3", 2 * SHARD_BYTES // 4)
        os.kill(running.workers[2].pid, signal.SIGKILL)
        killed_at = time.monotonic()
        results = [worker.take() for worker in running.workers[:2]]
        took_s = time.monotonic() - killed_at
    for result in results:
        assert result["right"]
        assert "worker 2 was lost" in result["error"], result
    assert took_s < 2.0
