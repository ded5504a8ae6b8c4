"""The data plane where its parts meet: codecs with evaluation, tentative answers with fetches, and awkward models."""

from __future__ import annotations

import socket
import struct

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cadenza.plane.codecs import Compressor, Turn
from cadenza.plane.connection import Connection, NoRequests
from cadenza.plane.layout import as_bytes
from cadenza.plane.messages import Done, Key, Part, Publish, Request, Tentative
from cadenza.plane.network import NetworkLink
from cadenza.plane.units import Unit
from cadenza.plane.wire import Identity, Role
from cadenza.training.session import Session
from cadenza_service.servers.shard_core import ShardCore
from tests.harness import LocalCluster, job_spec
from tests.unit.shards import (
    PARAMETERS,
    Peer,
    carry_out,
    contribute,
    core_of,
    decision,
    layout_of,
    merge,
    replies,
    values_of,
)

LENGTH = 4096


def alone(codec: str, rounds: int) -> tuple[ShardCore, Peer]:
    """Async mode: one worker, which began with zeros, has got ``rounds`` answers from a server that has other weights."""
    core = core_of(layout_of(LENGTH, 0, 0), "async", codec=codec)
    peer = Peer(core, 0)
    values = np.random.default_rng(1).normal(size=LENGTH).astype(np.float32)
    core.publish(1, Publish((PARAMETERS,)), [as_bytes(values)])
    for number in range(1, rounds + 1):
        peer.push(number, {PARAMETERS: np.zeros_like(values)}, turn=number)
        key = Key(0, 1, number)
        work = carry_out(
            core,
            decision(number, number, parts=(Part(key, 1.0, 1.0),), replies=replies(key, version=number)),
        )
        peer.pull(work.outgoing[0])
    return core, peer


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "e3m0", "qsgd:4", "terngrad", "topk:0.1", "sign"])
def test_what_a_worker_holds_comes_nearer_to_the_committed_weights(codec: str) -> None:
    """An answer in ssp or async says what its worker lacks: in a codec that adds much noise that would grow and grow."""
    core, peer = alone(codec, rounds=12)
    (committed,) = core.read((PARAMETERS,))
    right = np.frombuffer(committed, np.float32)
    missing = np.linalg.norm(peer.into[PARAMETERS] - right) / np.linalg.norm(right)
    assert missing < 0.7


def test_a_worker_that_fetches_gets_the_committed_weights_though_it_knows_their_version() -> None:
    """It holds them as far as its codec has said them, and may be about to evaluate them."""
    core, peer = alone("topk:0.1", rounds=2)
    peer.fetch(3, base_version=2)
    key = Key(0, 1, 3)
    work = carry_out(core, decision(3, 2, round=2, replies=replies(key, version=2)))
    peer.pull(work.outgoing[0])
    (committed,) = core.read((PARAMETERS,))
    assert np.array_equal(peer.into[PARAMETERS], np.frombuffer(committed, np.float32))


def test_a_fetch_while_a_round_is_tentatively_answered_leaves_the_answers_alone() -> None:
    """Of the answers that are on their way no byte may change, whatever the decision turns out to be."""
    core = core_of(layout_of(4, 0, 0), unit=1, groups=2)
    for worker, value in ((0, 2.0), (1, 4.0)):
        contribute(core, worker, 1, {PARAMETERS: np.full(4, value, np.float32)})
    early = core.tentative(Tentative(1, 1, 0, merge(0.5, 0.5)))
    early.run()
    frames = [
        frame
        for outgoing in early.outgoing
        for frame in (outgoing.values.frames() if outgoing.values else ())
    ]
    core.request(2, 1, Request("fetch", 1, -1, (PARAMETERS,)))
    carry_out(core, decision(2, 0, round=0, replies=replies(Key(2, 1, 1), version=0)))
    contribute(core, 2, 2, {PARAMETERS: np.full(4, 9.0, np.float32)})
    third = Part(Key(2, 1, 2), 1 / 3, 1 / 3)
    parts = (*(Part(part.key, 1 / 3, 1 / 3) for part in merge(0.5, 0.5)), third)
    keys = [part.key for part in parts]
    carry_out(core, decision(3, 1, round=1, parts=parts, replies=replies(*keys)))
    sent = [value for frame in frames for value in values_of(frame.bodies)]
    assert sent == [3.0] * 4
    (committed,) = core.read((PARAMETERS,))
    assert values_of([committed]) == pytest.approx([5.0] * 4)


def evaluated(worker: int, link: NetworkLink) -> list[Tensor]:
    """The weights that each evaluation of a worker was of."""
    torch.manual_seed(worker)
    model = nn.Linear(32, 32)
    data = TensorDataset(torch.randn(128, 32), torch.randn(128, 32))
    seen: list[Tensor] = []

    def evaluate_if_due(session: Session) -> None:
        if session.evaluation_due():
            seen.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())

    with Session(model, torch.optim.SGD(model.parameters(), lr=0.1), link=link) as session:
        for x, y in session.batches(data, batch_size=4, epochs=2):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            session.step(loss)
            evaluate_if_due(session)
        evaluate_if_due(session)
    return seen


@pytest.mark.parametrize(("mode", "workers"), [("async", 1), ("async", 2), ("ssp", 2), ("local", 2)])
def test_the_last_evaluation_is_of_the_weights_that_the_shards_hold(mode: str, workers: int) -> None:
    sync = {"mode": mode, "local_steps": 4, "codec": "topk:0.05"}
    spec = job_spec(sync=sync, evaluation={"every_samples": 64})
    with LocalCluster(spec, workers=workers) as cluster:
        seen = cluster.run(evaluated)
        committed = torch.tensor(cluster.state()[PARAMETERS])
    assert any(torch.equal(weights[-1], committed) for weights in seen if weights)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_round_of_which_nothing_is_merged_brings_everyone_back(codec: str, streamed: bool) -> None:
    def body(worker: int, link: NetworkLink) -> list[float]:
        into = {PARAMETERS: np.zeros(8, np.float32)}
        if link.join(layout_of(8, 0, 0), node="test", device="cpu").publish:
            link.publish((PARAMETERS,), into)
            link.ready()
        else:
            link.begin(Request("fetch", 1, -1, (PARAMETERS,)), {}, into).result()
        bad = {PARAMETERS: np.full(8, np.nan, np.float32)}
        request = Request("update", 2, 0, (PARAMETERS,), samples=1, steps=1)
        flight = link.stream(2, 0, bad, into).close(request) if streamed else link.begin(request, bad, into)
        note = flight.result().note
        assert (note.version, note.round, note.dropped) == (0, 1, "non_finite")
        assert not into[PARAMETERS].any()
        good = Request("update", 3, 0, (PARAMETERS,), samples=1, steps=1)
        link.begin(good, {PARAMETERS: np.ones(8, np.float32)}, into).result()
        if link.finish():
            link.published()
        return [float(value) for value in into[PARAMETERS]]

    with LocalCluster(job_spec(sync={"mode": "local", "codec": codec}), workers=2) as cluster:
        assert cluster.run(body) == [pytest.approx([1.0] * 8, abs=0.01)] * 2


def test_a_peer_that_is_gone_before_its_connection_is_used_ends_it_in_order() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        sock, _ = listener.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()  # With a reset.
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        connection = Connection(sock, "the peer", Identity(Role.WORKER), NoRequests()).start()
        with pytest.raises(ConnectionError):
            connection.call(Done()).result(5.0)
        connection.close()
        connection.join(5.0)


def test_a_unit_that_is_encoded_again_in_its_round_is_owed_once() -> None:
    """As where a gradient changes after it left: the shard keeps the second values, and forgets the first."""
    compressor = Compressor("topk:0.1", {PARAMETERS: 100}, seed=1, worker=0, repeatable=True)
    unit = Unit(PARAMETERS, 0, 0, 100)
    first, second = (np.random.default_rng(seed).normal(size=100).astype(np.float32) for seed in (1, 2))
    data = memoryview(bytearray(compressor.size_bytes(unit, 1)))
    compressor.encode(first, unit, 1, data)
    compressor.encode(second, unit, 1, data)
    merged = np.zeros(100, np.float32)
    compressor.codec.decode(data, unit, Turn(1, 1, 0), merged)
    owed = compressor.state_dict()[f"residual/{PARAMETERS}"]
    assert isinstance(owed, np.ndarray)
    assert merged + owed == pytest.approx(second, abs=1e-6)
