"""The demonstration as a user runs it: the command line, a service of its own, a job over REST, the model back."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.timeout(240)
def test_the_demonstration_trains_and_hands_the_model_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("CADENZA_")},
        "CADENZA_HOME": str(tmp_path / "home"),
        "CADENZA_API_URL": "http://127.0.0.1:9",  # The discard port: nobody answers, so the demo starts a service.
    }
    command = [str(Path(sys.executable).parent / "cadenza"), "demo", "--json"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["state"] == "SUCCEEDED"
    assert told["accuracy"] >= 0.97
    assert told["rounds"] > 10
    assert told["seconds"] > 0
    assert told["wire_bytes"] > 2 * told["rounds"] * Path(told["model"]).stat().st_size
    monkeypatch.syspath_prepend(str(EXAMPLES))
    digits = importlib.import_module("digits")
    model = digits.build()
    model.load_state_dict(load_file(told["model"]), strict=True)
    figures = digits.evaluate(model, digits.load()[1], torch.device("cpu"))
    assert figures["accuracy"] == pytest.approx(told["accuracy"], abs=1e-6)
    assert figures["test_loss"] == pytest.approx(told["test_loss"], rel=1e-4)
