"""A worker beside a real coordinator and shards, without Ray: how each way to end is told."""

from __future__ import annotations

import random
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import cadenza
from cadenza.plane.connection import Connection
from cadenza.plane.layout import Layout, Tensor, Vector
from cadenza.plane.messages import Request
from cadenza.process.worker import Worker, WorkerJob
from cadenza.training import context
from cadenza_service.snapshot import JobSnapshot
from tests.harness import LocalCluster, job_spec

LAYOUT = Layout(
    (Vector("parameters", "float32", 4),), (Tensor("w", "float32", (4,), "parameters.float32", 0),), ("w",)
)


def train(steps: int, *, finish: bool = True) -> None:
    """What a session does on the wire, for one worker: each step adds 1 to every weight."""
    link = context.current()
    assert link is not None
    link.join(LAYOUT, node="here", device="cpu")
    weights = {"parameters.float32": np.zeros(4, np.float32)}
    link.publish(LAYOUT.every(), weights)
    link.ready()
    version = 0
    for step in range(steps):
        update = {"parameters.float32": np.ones(4, np.float32)}
        request = Request("update", step + 1, version, LAYOUT.travelling(), samples=1, steps=1, loss=0.5)
        version = link.begin(request, update, weights).result().note.version
        link.telemetry(steps=step + 1, samples=step + 1, compute_seconds=0.0, apply_seconds=None)
    if finish and link.finish():
        link.published()


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(job_spec(), workers=1) as cluster:
        yield cluster


@pytest.fixture
def process() -> Iterator[None]:
    """Puts back what a worker changes in its process."""
    threads, path = torch.get_num_threads(), list(sys.path)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    sys.path[:] = path
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def run(cluster: LocalCluster, entrypoint: str, **changes: Any) -> tuple[str, JobSnapshot]:
    """How the worker says it ended, and what the coordinator knows then."""
    values: dict[str, Any] = {
        "worker": 0,
        "incarnation": 1,
        "entrypoint": entrypoint,
        "config": {"lr": 0.5},
        "seed": 7,
        "cpus": 2.5,
        "gpus": 0,
        "packaged": False,
        "coordinator": cluster.coordinator.address,
        "key": cluster.key,
        "connect_timeout_s": 10.0,
    }
    ended = threading.Event()
    disconnected = cluster.coordinator.disconnected

    def told(connection: Connection, error: Exception | None) -> None:
        disconnected(connection, error)
        ended.set()

    with patch.object(cluster.coordinator, "disconnected", told):
        how = Worker().run(WorkerJob(**(values | changes)))
        assert ended.wait(10), "the coordinator never saw the worker's connection end"
    return how, cluster.snapshot()


pytestmark = pytest.mark.usefixtures("process")


def good(config: dict[str, Any]) -> None:
    print(f"lr is {config['lr']}")
    train(3)


def leaves_with_zero(config: dict[str, Any]) -> None:
    train(1)
    sys.exit(0)


def raises(config: dict[str, Any]) -> None:
    train(5, finish=False)
    raise ValueError("no more data")


def raises_between_rounds(config: dict[str, Any]) -> None:
    model = torch.nn.Linear(2, 1)
    with cadenza.join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
        for _ in range(11):
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            session.step(loss, samples=1)
        raise ValueError("at step 11")


def exits(config: dict[str, Any]) -> None:
    sys.exit("gave up")


def never_joins(config: dict[str, Any]) -> None:
    pass


def never_finishes(config: dict[str, Any]) -> None:
    train(2, finish=False)


def shows_its_process(config: dict[str, Any]) -> None:
    print(random.random(), np.random.random(), torch.rand(()).item(), torch.get_num_threads())
    train(1)


def test_a_job_runs_to_its_end_and_its_lines_arrive(cluster: LocalCluster) -> None:
    how, snapshot = run(cluster, f"{__name__}:good")
    assert (how, snapshot.phase) == ("returned", "completed")
    assert [(line.worker, line.stream, line.text) for line in snapshot.logs] == [(0, "stdout", "lr is 0.5")]
    np.testing.assert_array_equal(cluster.state()["parameters.float32"], np.full(4, 3, np.float32))


def test_exit_code_zero_is_a_return(cluster: LocalCluster) -> None:
    how, snapshot = run(cluster, f"{__name__}:leaves_with_zero")
    assert (how, snapshot.phase) == ("returned", "completed")


def test_the_users_error_comes_with_worker_step_traceback_and_log(cluster: LocalCluster) -> None:
    how, snapshot = run(cluster, f"{__name__}:raises")
    failure = snapshot.failure
    assert failure is not None
    assert (how, failure.kind, failure.worker, failure.step) == ("user_error", "user_error", 0, 5)
    assert failure.message == "worker 0, step 5: ValueError: no more data"
    assert failure.traceback is not None
    first_frame = failure.traceback.splitlines()[1]
    assert "test_worker.py" in first_frame
    assert "in raises" in first_frame
    assert [line.text for line in snapshot.logs][-1] == "ValueError: no more data"
    assert {line.stream for line in snapshot.logs} == {"stderr"}


def test_steps_since_the_latest_round_are_told_with_an_error(cluster: LocalCluster) -> None:
    _, snapshot = run(cluster, f"{__name__}:raises_between_rounds")
    assert snapshot.failure is not None
    assert snapshot.failure.step == 11  # Rounds come at every eighth.


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        ("exits", "user_error", "SystemExit: gave up"),
        ("never_joins", "never_joined", "returned without joining"),
        ("never_finishes", "never_finished", "its session was still open"),
        ("no_such", "entrypoint", "has no function 'no_such'"),
    ],
)
def test_other_ways_to_fail_say_what_to_do(
    cluster: LocalCluster, function: str, kind: str, text: str
) -> None:
    how, snapshot = run(cluster, f"{__name__}:{function}")
    assert how == kind
    assert snapshot.failure is not None
    assert snapshot.failure.kind == kind
    assert text in snapshot.failure.message
    assert snapshot.failure.remedy


def test_the_process_gets_its_seed_and_its_share_of_cores(cluster: LocalCluster) -> None:
    _, snapshot = run(cluster, f"{__name__}:shows_its_process", seed=2**63 - 1)
    random.seed(2**63 - 1)
    np.random.seed((2**63 - 1) % 2**32)
    torch.manual_seed(2**63 - 1)
    expected = f"{random.random()} {np.random.random()} {torch.rand(()).item()} 2"
    assert snapshot.logs[0].text == expected


def test_the_jobs_own_code_comes_first_and_is_told_by_its_own_paths(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "colorsys.py").write_text("def train(config):\n    raise RuntimeError('ours')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    _, snapshot = run(cluster, "colorsys:train", packaged=True)
    monkeypatch.delitem(sys.modules, "colorsys")
    assert snapshot.failure is not None
    assert snapshot.failure.traceback is not None
    assert 'File "colorsys.py", line 2, in train' in snapshot.failure.traceback


def test_a_second_run_changes_nothing(cluster: LocalCluster) -> None:
    worker = Worker()
    assert worker.end() is None
    worker._end = "user_error"
    assert worker.run(None) == "user_error"  # type: ignore[arg-type]


def test_an_unreachable_coordinator_is_an_error_at_once(cluster: LocalCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = listener.getsockname()
    with pytest.raises(ConnectionError, match="the coordinator at"):
        run(cluster, f"{__name__}:good", coordinator=nobody)
