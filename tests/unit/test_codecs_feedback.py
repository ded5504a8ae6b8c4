"""What a codec leaves out is sent later: error feedback, momentum correction, and a sender's whole memory."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cadenza.plane.codecs import Compressor, Turn, codec_named, compress
from cadenza.plane.units import Unit

VECTOR = "parameters.float32"
LATE = 100_000
"""A round after DGC's warm-up."""


def unit_of(length: int, number: int = 0, dtype: str = "float32") -> Unit:
    start = number * length
    return Unit(f"parameters.{dtype}", number, start, start + length, ((0, 12, length // 12),))


def sent(
    sender: Compressor, values: NDArray[Any], unit: Unit, round: int = LATE
) -> tuple[bytes, NDArray[Any]]:
    """The bytes, and the values that a receiver makes of them."""
    out = memoryview(bytearray(sender.size_bytes(unit, round)))
    sender.encode(values, unit, round, out)
    received = np.empty(unit.length, np.float64)
    codec_named(sender.codec.name).decode(out, unit, Turn(1, round, 0), received)
    return bytes(out), received


def sender_of(name: str, length: int = 600, vector: str = VECTOR) -> Compressor:
    return Compressor(name, {vector: length}, seed=1, worker=0)


def owed(sender: Compressor, vector: str = VECTOR) -> NDArray[Any]:
    return np.asarray(sender.state_dict()[f"residual/{vector}"])


def values_of(length: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=length).astype(np.float32)


# --- compress --------------------------------------------------------------------------------------


def test_what_was_left_out_is_sent_next() -> None:
    codec, unit, turn = codec_named("topk:0.25"), unit_of(4), Turn(0, 0, 0)
    out, residual = memoryview(bytearray(6)), np.array([0, 0, 1, 0], np.float32)
    received = np.empty(4, np.float32)
    steps = []
    for _ in range(2):
        compress(codec, np.array([3, 2, 0, -1], np.float32), residual, unit, turn, out, residual)
        codec.decode(out, unit, turn, received)
        steps.append((received.tolist(), residual.tolist()))
    assert steps == [([3, 0, 0, 0], [0, 2, 1, -1]), ([0, 4, 0, 0], [3, 0, 1, -2])]


@pytest.mark.parametrize(
    "name", ["int8", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "e3m0", "sign", "topk:0.1", "powersgd:2"]
)
def test_nothing_is_lost_over_many_rounds(name: str) -> None:
    sender, unit = sender_of(name), unit_of(600)
    inputs, received = np.zeros(600), np.zeros(600)
    for round in range(20):
        values = values_of(600, round)
        inputs += values
        received += sent(sender, values, unit, round)[1]
    assert abs(owed(sender)).max() > 0
    assert abs(received + owed(sender) - inputs).max() < 1e-4


@pytest.mark.parametrize("name", ["int8", "e3m0", "topk:0.1", "sign", "fp32", "randomk:0.1"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_leaves_the_residual_as_it_was(name: str, bad: float) -> None:
    codec, unit, turn = codec_named(name), unit_of(1_500), Turn(0, 0, 0)
    values, residual = values_of(1_500, 1), values_of(1_500, 2)
    values[7] = bad
    before, out = residual.copy(), memoryview(bytearray(codec.size_bytes(unit, 0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compress(codec, values, residual, unit, turn, out, residual)
    assert np.isfinite(residual).all()
    assert residual[7] == before[7]


def test_without_a_residual_nothing_is_kept() -> None:
    codec, unit, turn = codec_named("int8"), unit_of(600), Turn(0, 0, 0)
    direct, through = (memoryview(bytearray(codec.size_bytes(unit, 0))) for _ in range(2))
    codec.encode(values_of(600, 1), unit, turn, direct)
    compress(codec, values_of(600, 1), None, unit, turn, through, None)
    assert direct == through


# --- the test problems -----------------------------------------------------------------------------


def distance(name: str, feedback: bool, eta: float, steps: int) -> float:
    """‖x - x*‖ / ‖x*‖ after gradient descent on K = 8 quadratics with different minimisers, d = 200."""
    workers, d = 8, 200
    random = np.random.default_rng(0)
    curvature, minimisers = np.logspace(-1, 0, d), 3 * random.normal(size=(workers, d))
    best = minimisers.mean(axis=0)
    codec, unit = codec_named(name), unit_of(d)
    out = memoryview(bytearray(codec.size_bytes(unit, 0)))
    residuals, received, x = np.zeros((workers, d), np.float32), np.empty(d), np.zeros(d)
    for step in range(steps):
        updates, total = (eta * curvature * (x - minimisers)).astype(np.float32), np.zeros(d)
        for worker in range(workers):
            kept = residuals[worker] if feedback else None
            compress(codec, updates[worker], kept, unit, Turn(0, step, worker), out, kept)
            codec.decode(out, unit, Turn(0, step, worker), received)
            total += received
        x -= total / workers
    return float(np.linalg.norm(x - best) / np.linalg.norm(best))


@pytest.mark.parametrize("name", ["topk:0.05", "sign"])
def test_different_workers_converge_with_feedback_and_not_without(name: str) -> None:
    coarse = distance(name, True, 0.1, 300)
    assert distance(name, False, 0.1, 300) > 0.5
    assert coarse < 0.2
    assert distance(name, True, 0.02, 1_200) < coarse / 3


def error_with_momentum(name: str, spread: float, noise: float, eta: float, steps: int) -> float:
    """Mean of ‖x - x*‖² / ‖x*‖² over the last quarter, K = 4 workers; the server has momentum unless the codec is DGC."""
    workers, d = 4, 100
    random = np.random.default_rng(0)
    minimisers = random.normal(size=d) + spread * random.normal(size=(workers, d))
    best, unit = minimisers.mean(axis=0), unit_of(d)
    senders = [Compressor(name, {VECTOR: d}, seed=1, worker=worker) for worker in range(workers)]
    x, momentum, errors = np.zeros(d), np.zeros(d), []
    for step in range(steps):
        noises = noise * random.normal(size=(workers, d))
        gradients = (x - minimisers + noises).astype(np.float32)
        received = [sent(s, g, unit, LATE + step)[1] for s, g in zip(senders, gradients, strict=True)]
        mean = np.mean(received, axis=0)
        momentum = mean if name.startswith("dgc") else 0.9 * momentum + mean
        x = x - eta * momentum
        errors.append(float(((x - best) ** 2).sum() / (best**2).sum()))
    return float(np.mean(errors[-steps // 4 :]))


def test_momentum_correction_reaches_the_optimum_faster_than_momentum_of_sparse_sums() -> None:
    corrected = error_with_momentum("dgc:0.05", spread=0, noise=0, eta=0.02, steps=500)
    assert corrected < 1e-8
    assert corrected < error_with_momentum("topk:0.05", spread=0, noise=0, eta=0.02, steps=500) / 100


def test_momentum_correction_is_stable_where_momentum_of_sparse_sums_is_not() -> None:
    assert error_with_momentum("dgc:0.05", spread=0.3, noise=1, eta=0.05, steps=300) < 0.2
    assert error_with_momentum("topk:0.05", spread=0.3, noise=1, eta=0.05, steps=300) > 10


# --- DGC -------------------------------------------------------------------------------------------


def test_dgc_accumulates_momentum_and_forgets_what_it_sent() -> None:
    sender, unit = sender_of("dgc:0.25", 4), unit_of(4)
    gradient = np.array([4, 2, 1, 0], np.float32)
    assert sent(sender, gradient, unit)[1].tolist() == [4, 0, 0, 0]
    state = sender.state_dict()
    assert np.asarray(state[f"momentum/{VECTOR}"]).tolist() == [0, 2, 1, 0]
    assert owed(sender).tolist() == [0, 2, 1, 0]
    # u = 0.9 · 2 + 2 and v = 2 + u for the second value; the first began anew.
    assert sent(sender, gradient, unit)[1] == pytest.approx([0, 5.8, 0, 0])
    assert owed(sender) == pytest.approx([4, 0, 2.9, 0])


def test_a_servers_dgc_is_topk_with_feedback() -> None:
    server = Compressor("dgc:0.25", {VECTOR: 4}, seed=1, worker=-1)
    gradient, unit = np.array([4, 2, 1, 0], np.float32), unit_of(4)
    assert [sent(server, gradient, unit)[1].tolist() for _ in range(2)] == [[4, 0, 0, 0], [4, 0, 0, 0]]
    assert owed(server).tolist() == [0, 4, 2, 0]
    assert "momentum/" + VECTOR not in server.state_dict()


def test_dgc_warms_up() -> None:
    codec, unit = codec_named("dgc:0.001"), unit_of(10_000)
    kept = [codec.size_bytes(unit, round) // 6 for round in (0, 99, 100, 200, 300, 400, 10**9)]
    assert kept == [2_500, 2_500, 625, 157, 40, 10, 10]


def test_dgc_remembers_nothing_of_what_is_not_finite() -> None:
    sender, unit = sender_of("dgc:0.1"), unit_of(600)
    sent(sender, values_of(600, 1), unit)
    before, bad = sender.state_dict(), values_of(600, 2)
    bad[9] = np.nan
    assert np.isnan(sent(sender, bad, unit)[1]).any()
    after = sender.state_dict()
    assert all(np.array_equal(before[key], after[key]) for key in before)


# --- Compressor ------------------------------------------------------------------------------------

MEMORY = ["int8", "topk:0.05", "sign", "dgc:0.05", "powersgd:2", "qsgd:4", "randomk:0.1", "fp32"]


@pytest.mark.parametrize("name", MEMORY)
def test_a_loaded_state_sends_the_same_bytes(name: str) -> None:
    first, unit = sender_of(name), unit_of(600)
    for round in range(3):
        sent(first, values_of(600, round), unit, round)
    second = sender_of("int8")
    second.load_state_dict(first.state_dict())
    for round in range(3, 6):
        assert (
            sent(first, values_of(600, round), unit, round)[0]
            == sent(second, values_of(600, round), unit, round)[0]
        )
    assert second.codec.name == name


def test_a_state_is_a_copy() -> None:
    sender, unit = sender_of("topk:0.05"), unit_of(600)
    sent(sender, values_of(600, 1), unit)
    state, other = sender.state_dict(), sender_of("topk:0.05")
    before = np.array(state[f"residual/{VECTOR}"])
    other.load_state_dict(state)
    for one in (sender, other):
        sent(one, values_of(600, 2), unit)
    assert np.array_equal(state[f"residual/{VECTOR}"], before)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        (f"residual/{VECTOR}", np.zeros(5, np.float32), r"shape \(5,\) .* 600 elements of float32"),
        (f"residual/{VECTOR}", np.zeros(600), "type float64"),
        ("residual/parameters.float16", np.zeros(600, np.float32), "state of another model"),
        ("gradient", np.zeros(600), "'gradient'.*another release"),
        ("codec", "int7", "codec 'int7' is not known"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(key: str, value: Any, what: str) -> None:
    sender = sender_of("topk:0.05")
    sent(sender, values_of(600, 1), unit_of(600))
    before = sender.state_dict()
    with pytest.raises(ValueError, match=what):
        sender.load_state_dict({**sender_of("int8").state_dict(), key: value})
    assert np.array_equal(owed(sender), before[f"residual/{VECTOR}"])
    assert sender.codec.name == "topk:0.05"


@pytest.mark.parametrize("last", ["fp32", "randomk:1.0"])
def test_what_is_owed_survives_every_switch(last: str) -> None:
    sender, unit = sender_of("topk:0.05"), unit_of(600)
    inputs, received = np.zeros(600), np.zeros(600)
    for round, name in enumerate(["topk:0.05", "int8", "sign", "powersgd:2", "topk:0.01", last, last]):
        sender.switch(name)
        values = values_of(600, round)
        inputs += values
        received += sent(sender, values, unit, round)[1]
        assert abs(received + owed(sender) - inputs).max() < 1e-4
    assert not owed(sender).any()


def test_an_exact_codec_sends_the_values_alone_once_nothing_is_owed() -> None:
    sender, unit = sender_of("topk:0.05"), unit_of(600)
    sent(sender, values_of(600, 1), unit)
    sender.switch("fp32")
    sent(sender, values_of(600, 2), unit)
    assert sent(sender, values_of(600, 3), unit)[0] == values_of(600, 3).tobytes()


def test_a_switch_from_dgc_sends_its_velocity_and_ends_its_momentum() -> None:
    sender, unit = sender_of("dgc:0.05"), unit_of(600)
    sent(sender, values_of(600, 1), unit)
    debt = owed(sender)
    sender.switch("fp32")
    assert "momentum/" + VECTOR not in sender.state_dict()
    assert np.array_equal(sent(sender, np.zeros(600, np.float32), unit)[1], debt)


def test_powersgd_gets_better_from_round_to_round() -> None:
    """The warm start is subspace iteration: the error nears that of the best approximation of this rank."""
    random = np.random.default_rng(3)
    matrix = (random.normal(size=(12, 50)) * np.logspace(0, -1, 12)[:, np.newaxis]).astype(np.float32)
    best = np.sqrt((np.linalg.svd(matrix)[1][2:] ** 2).sum())
    sender, errors = sender_of("powersgd:2"), []
    for round in range(25):
        sender.load_state_dict({**sender.state_dict(), f"residual/{VECTOR}": np.zeros(600, np.float32)})
        errors.append(np.linalg.norm(sent(sender, matrix.ravel(), unit_of(600), round)[1] - matrix.ravel()))
    assert errors[0] > 1.03 * best
    assert errors[-1] < 1.01 * best


def test_units_may_be_encoded_by_different_threads() -> None:
    def bytes_of(threads: int) -> list[bytes]:
        sender = sender_of("topk:0.05", 40 * 600)
        with ThreadPoolExecutor(threads) as pool:
            return [
                data
                for round in range(3)
                for data in pool.map(
                    lambda number: sent(sender, values_of(600, number), unit_of(600, number))[0], range(40)
                )
            ]

    assert bytes_of(4) == bytes_of(1)


def test_vectors_of_doubles_owe_doubles() -> None:
    vector, unit = "parameters.float64", unit_of(600, dtype="float64")
    sender, values = sender_of("topk:0.05", vector=vector), np.random.default_rng(0).normal(size=600)
    received = sent(sender, values, unit)[1]
    assert owed(sender, vector).dtype == np.float64
    assert np.array_equal(received + owed(sender, vector), values)


def test_a_codec_that_needs_no_memory_takes_none() -> None:
    for name in ("fp32", "qsgd", "terngrad", "randomk"):
        assert sender_of(name).state_dict() == {"codec": codec_named(name).name}
