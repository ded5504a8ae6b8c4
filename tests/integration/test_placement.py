"""Where the processes of real jobs lie, on a Ray cluster of three nodes on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray._private import state
from ray.cluster_utils import Cluster

from cadenza.spec import JobSpec
from cadenza_service.jobs.lifecycle import JobState
from cadenza_service.orchestration import cluster
from cadenza_service.orchestration.actors import Attempt
from cadenza_service.orchestration.calls import Calls
from cadenza_service.orchestration.crew import Crew
from cadenza_service.orchestration.instructions import ActorRefused, ActorStarted, Event
from cadenza_service.orchestration.resources import RATE_LABEL, ROLE_LABEL, Placement
from tests.integration.code import TRAIN
from tests.integration.support import TIMEOUT_S, Service

pytestmark = pytest.mark.ray

CODE = {"regression.py": TRAIN}
TWO = {"min": 2, "cpus": 1}
LOST = "0" * 56
"""A node id of Ray's form that no node has any more."""


class Three(Service):
    """A service on the head, which is a labelled server node without CPUs, and two nodes of one CPU each."""

    def _start_ray(self, folder: str) -> None:
        labels = {ROLE_LABEL: "server", RATE_LABEL: "1000"}
        head = {"num_cpus": 0, "labels": labels, "include_dashboard": False, "temp_dir": folder}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.head = self._cluster.head_node.node_id
        self.others = {self._add() for _ in range(2)}
        ray.init(self._cluster.address, log_to_driver=False, logging_level="ERROR")

    def _add(self) -> str:
        return str(self._cluster.add_node(num_cpus=1).node_id)

    def close(self) -> None:
        """End what was started."""
        super().close()
        self._cluster.shutdown()

    def lying(self, job_id: str, kind: str) -> list[str]:
        """The node ids of a running job's actors of a kind, as Ray has them."""
        parts = sorted(part for part in self.parts(job_id) if part.startswith(f"{kind}:"))
        return [_node_of(cluster.find(job_id, part)) for part in parts]


def _node_of(actor: Any) -> str:
    return str(state.actors(actor._actor_id.hex())["Address"]["NodeID"])


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    with pytest.MonkeyPatch.context() as patch:
        # Ray asks for a token unless it is told not to.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        service = Three(
            tmp_path_factory.mktemp("home"), start_timeout_s=60, join_timeout_s=60, round_timeout_s=60
        )
        yield service
        service.close()


def test_nodes_are_read_with_their_labels(three: Three) -> None:
    found = {node.id: (node.total.cpus, node.server, node.rate_mbit_s) for node in cluster.nodes()}
    assert found == {three.head: (0.0, True, 1000.0)} | dict.fromkeys(three.others, (1.0, False, None))


@pytest.mark.parametrize("asked", ["spread", "dedicated"])
def test_shards_lie_where_the_job_asks(three: Three, asked: str) -> None:
    job = three.submit(
        CODE,
        entrypoint="regression:train",
        workers=TWO,
        servers={"placement": asked},
        config={"pause_s": 0.02},
    )
    three.wait(job.id, JobState.RUNNING)
    workers, shards = three.lying(job.id, "worker"), three.lying(job.id, "shard")
    assert set(workers) == three.others
    assert sorted(shards) == (sorted(workers) if asked == "spread" else [three.head])
    (placed,) = [event for event in three.store.events(job.id) if event.kind == "placed"]
    assert (placed.data["asked"], placed.data["chosen"]) == (asked, asked)
    assert (placed.data["workers"], placed.data["shards"]) == (workers, shards)
    assert placed.message.startswith(f"{asked}: 2 workers on 2 of 3 nodes")
    job = three.wait(job.id, JobState.SUCCEEDED)
    assert job.progress.samples == job.progress.total_samples == 512
    three.assert_nothing_left(job.id)


def test_dedicated_shards_without_room_name_what_is_missing(three: Three) -> None:
    servers = {"placement": "dedicated", "cpus": 1}
    job = three.submit(CODE, entrypoint="regression:train", workers={"min": 1, "cpus": 1}, servers=servers)
    job = three.wait(job.id, JobState.UNSCHEDULABLE)
    assert job.reason is not None
    assert "not on the 1 node labelled cadenza.io/role=server; missing room there" in job.reason.message
    three.store.cancel(job.id)
    three.wait(job.id, JobState.CANCELLED)


def test_a_lost_node_refuses_its_actors_at_once(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the decision and the start: nothing pends for a node that will not come back."""
    # In a namespace of its own, where the controller does not look for actors of unknown jobs.
    monkeypatch.setattr("cadenza_service.orchestration.actors.NAMESPACE", "test_placement")
    (here, _) = three.others
    calls = Calls()
    crew = Crew(_attempt(three, Placement("spread", (here, LOST), (LOST,))), calls)
    crew.start(1, 2)
    events: list[Event] = []
    deadline_s = time.monotonic() + TIMEOUT_S
    while len({event.part for event in events if isinstance(event, ActorStarted | ActorRefused)}) < 4:
        assert time.monotonic() < deadline_s, events
        events += calls.wait(0.1)
    refused = {event.part for event in events if isinstance(event, ActorRefused)}
    started = {event.part for event in events if isinstance(event, ActorStarted)}
    assert (refused, started) == ({"shard:0", "worker:1"}, {"coordinator", "worker:0"})
    for part in started:
        ray.kill(ray.get_actor(cluster.actor_name("lost", part), namespace="test_placement"))


def _attempt(service: Service, placement: Placement) -> Attempt:
    return Attempt(
        job_id="lost",
        epoch=1,
        key=b"k" * 32,
        spec=JobSpec(name="lost", entrypoint="regression:train"),
        placement=placement,
        storage=str(service.settings.storage_path),
        start_timeout_s=60,
        join_timeout_s=60,
        round_timeout_s=60,
    )
