"""The examples: their data, models and specs, and that they learn alone, without a job; and the session benchmark."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from benchmarks import session as benchmark
from torch import Tensor, nn

from cadenza.spec import JobSpec

EXAMPLES = Path(__file__).parents[2] / "examples"
SPECS = sorted(EXAMPLES.glob("*.yaml"))
CPU = torch.device("cpu")


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports an example as a job does: its folder is on sys.path, and it is a top-level module."""
    monkeypatch.syspath_prepend(EXAMPLES)
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)


@pytest.fixture
def digits(imported: Any) -> Any:
    return imported("digits")


@pytest.fixture
def charlm(imported: Any) -> Any:
    return imported("charlm")


# --- digits ------------------------------------------------------------------------------------------


def test_digits_are_split_once_and_for_all(digits: Any) -> None:
    training, held_out = digits.load()
    again, _ = digits.load()
    assert (len(training), len(held_out)) == (1437, 360)
    assert training.tensors[0].shape == (1437, 1, 8, 8)
    assert (training.tensors[0].min(), training.tensors[0].max()) == (0, 1)
    assert torch.equal(training.tensors[1], again.tensors[1])


def test_no_held_out_digit_is_trained_on_and_each_is_as_frequent(digits: Any) -> None:
    training, held_out = digits.load()
    seen = {image.numpy().tobytes() for image in training.tensors[0]}
    assert not [image for image in held_out.tensors[0] if image.numpy().tobytes() in seen]
    counts = held_out.tensors[1].bincount(minlength=10)
    assert counts.min() >= 35
    assert counts.max() <= 37


def test_digits_accuracy_counts_the_right_answers(digits: Any) -> None:
    class AlwaysThree(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.eye(10)[3].expand(len(images), 10)

    _, held_out = digits.load()
    threes = int((held_out.tensors[1] == 3).sum())
    assert digits.evaluate(AlwaysThree(), held_out, CPU)["accuracy"] == pytest.approx(threes / 360)


def test_digits_learn_alone_and_the_seed_decides_everything(
    digits: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert (first := reported(digits, {"epochs": 2, "seed": 1}, caplog)) == reported(
        digits, {"epochs": 2, "seed": 1}, caplog
    )
    assert first != reported(digits, {"epochs": 2, "seed": 2}, caplog)
    assert len(first) == 2  # after each epoch; the second is the end
    assert float(first[-1].split("accuracy ")[1].split(",")[0]) > 0.85


def reported(example: Any, config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a run outside a job reports, as it is logged."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="cadenza"):
        example.train(config)
    return [record.getMessage() for record in caplog.records]


# --- charlm ------------------------------------------------------------------------------------------


def test_charlm_windows_are_followed_by_their_next_characters(charlm: Any) -> None:
    windows = charlm.Windows(torch.arange(200), stride=30)
    assert len(windows) == 5  # at 0, 30, 60, 90 and 120; a sixth would need characters up to 214
    for index in range(len(windows)):
        inputs, targets = windows[index]
        assert inputs.tolist() == list(range(30 * index, 30 * index + 64))
        assert targets.tolist() == [code + 1 for code in inputs.tolist()]


@pytest.mark.parametrize(("length", "windows"), [(0, 0), (64, 0), (65, 1), (128, 1), (129, 2)])
def test_charlm_counts_only_full_windows(charlm: Any, length: int, windows: int) -> None:
    assert len(charlm.Windows(torch.zeros(length, dtype=torch.int64), stride=64)) == windows


def test_charlm_holds_out_a_tail_that_shares_no_paragraph_with_training(charlm: Any) -> None:
    text = "quoted\n\n" + "early\n\n" * 20 + "late\n\nquoted"
    head, tail = charlm._split(text)
    assert text.endswith(tail)
    assert "late\n\nquoted" in tail
    assert "quoted" not in head
    assert head.count("early") == 19  # the twentieth is cut in two


def test_charlm_text_is_the_language_reference(charlm: Any) -> None:
    head, tail, vocabulary = charlm.load()
    assert len(head) > 350_000
    assert 0.09 < len(tail) / (len(head) + len(tail)) < 0.12
    assert head.dtype == tail.dtype == torch.int64
    assert int(torch.cat([head, tail]).max()) == vocabulary - 1


def test_charlm_evaluates_the_same_even_windows_every_time(charlm: Any) -> None:
    tail = torch.randint(0, 50, (20_000,), generator=torch.Generator().manual_seed(0))
    batches = charlm.held_out_batches(tail, CPU)
    assert [inputs.shape for inputs, _ in batches] == [(32, 64)] * 8
    for (inputs, targets), (same_inputs, same_targets) in zip(
        batches, charlm.held_out_batches(tail, CPU), strict=True
    ):
        assert torch.equal(inputs, same_inputs)
        assert torch.equal(targets, same_targets)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_charlm_model_has_about_one_and_a_third_million_parameters(charlm: Any) -> None:
    model = charlm.CharacterModel(vocabulary=103)
    assert 1_200_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_400_000


@torch.no_grad()
def test_charlm_never_looks_ahead(charlm: Any) -> None:
    torch.manual_seed(0)
    model = charlm.CharacterModel(vocabulary=50)
    codes = torch.randint(0, 50, (1, 64))
    changed = codes.clone()
    changed[0, 40:] = (codes[0, 40:] + 1) % 50
    before, after = model(codes), model(changed)
    assert torch.allclose(before[0, :40], after[0, :40], atol=1e-6)
    assert not torch.allclose(before[0, 40:], after[0, 40:], atol=1e-3)


def test_charlm_starts_at_the_loss_of_a_guess(charlm: Any) -> None:
    torch.manual_seed(0)
    tail = torch.randint(0, 50, (2_000,))
    loss = charlm.evaluate(charlm.CharacterModel(vocabulary=50), charlm.held_out_batches(tail, CPU))
    assert loss == pytest.approx(torch.tensor(50.0).log().item(), abs=0.2)


def test_charlm_learns_alone(
    charlm: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, tail, vocabulary = charlm.load()
    monkeypatch.setattr(charlm, "load", lambda: (head[:10_000], tail, vocabulary))
    monkeypatch.setattr(charlm, "DEPTH", 1)
    reports = reported(charlm, {"lr": 2e-3}, caplog)
    untrained = torch.tensor(float(vocabulary)).log().item()
    assert float(reports[-1].split("eval_loss ")[1]) < untrained - 1


# --- specs -------------------------------------------------------------------------------------------


def spec(path: Path, **sync: Any) -> JobSpec:
    document = yaml.safe_load(path.read_text())
    return JobSpec.model_validate(document | {"sync": document.get("sync", {}) | sync})


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_each_spec_is_valid_and_names_a_function_of_its_folder(path: Path, imported: Any) -> None:
    checked = spec(path)
    module, _, function = checked.entrypoint.partition(":")
    assert checked.runtime_env.working_dir == "."
    assert Path(imported(module).__file__).parent == EXAMPLES
    assert callable(getattr(imported(module), function))


@pytest.mark.parametrize("mode", ["sync", "local", "ssp", "async"])
def test_charlm_takes_every_mode_by_one_setting(mode: str) -> None:
    assert spec(EXAMPLES / "charlm.yaml", mode=mode).sync.mode == mode


def test_the_demo_has_two_workers_and_two_shards_in_local_mode() -> None:
    demo = spec(EXAMPLES / "demo.yaml")
    assert (demo.workers.min, demo.servers.count, demo.sync.mode) == (2, 2, "local")


# --- the session benchmark ---------------------------------------------------------------------------


def test_the_benchmark_finds_a_cost_that_is_there() -> None:
    def costly(loss: Tensor) -> None:
        until = time.perf_counter() + 300e-6
        while time.perf_counter() < until:
            pass

    loop = (benchmark.tiny_model(), lambda loss: None)
    samples = benchmark.alternate(loop, (loop[0], costly), pairs=6)
    assert len(samples) == 6
    assert benchmark.summarise("tiny", loop[0], samples).overhead_us > 150


def test_the_benchmark_is_not_moved_by_an_interrupted_block() -> None:
    samples = [benchmark.Sample(plain_us=100, session_us=110)] * 9 + [benchmark.Sample(100, 50_000)]
    result = benchmark.summarise("deep", benchmark.deep_model(), samples)
    assert (result.overhead_us, result.plain_us, result.session_us) == (10, 100, 110)
    assert (result.tensors, result.parameters) == (60, 30 * (32 * 32 + 32))
