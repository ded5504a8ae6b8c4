"""A model file holds every tensor of the layout, whatever its type and shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file

from cadenza.plane.layout import Layout, Tensor, Vector
from cadenza_service.orchestration.model_file import write_model


def layout_of(*tensors: Tensor, vectors: dict[str, int], aliases: tuple[tuple[str, str], ...] = ()) -> Layout:
    found = []
    for name, length in vectors.items():
        role, dtype = name.split(".")
        found.append(Vector(role, dtype, length))  # type: ignore[arg-type]
    return Layout(tuple(found), tensors, trainable=(), aliases=aliases)


def test_every_tensor_comes_back_as_it_was(tmp_path: Path) -> None:
    static = np.concatenate(
        [
            np.frombuffer(array.tobytes(), np.uint8)
            for array in (np.array([True]), np.array([5, -6], np.int64), np.array([1 + 2j], np.complex64))
        ]
    )
    vectors: dict[str, NDArray[Any]] = {
        "parameters.float32": np.arange(7, dtype=np.float32),
        "parameters.bfloat16": np.array([0.5, 2], ml_dtypes.bfloat16),
        "buffers.float64": np.array([1e-300]),
        "static.uint8": static,
    }
    layout = layout_of(
        Tensor("w", "float32", (2, 3), "parameters.float32", 0),
        Tensor("scale", "float32", (), "parameters.float32", 6),
        Tensor("none", "float32", (0, 4), "parameters.float32", 7),
        Tensor("half", "bfloat16", (2,), "parameters.bfloat16", 0),
        Tensor("mean", "float64", (1,), "buffers.float64", 0),
        Tensor("flag", "bool", (1,), "static.uint8", 0),
        Tensor("count", "int64", (2,), "static.uint8", 1),
        Tensor("phase", "complex64", (1,), "static.uint8", 17),
        vectors={name: len(vector) for name, vector in vectors.items()},
        aliases=(("tied", "w"),),
    )
    path = tmp_path / "model.safetensors"
    write_model(path, layout, vectors, {"job": "digits-abc", "round": "3"})
    loaded = load_file(path)
    assert loaded.keys() == {"w", "tied", "scale", "none", "half", "mean", "flag", "count", "phase"}
    torch.testing.assert_close(loaded["w"], torch.arange(6.0).reshape(2, 3))
    torch.testing.assert_close(loaded["tied"], loaded["w"])
    torch.testing.assert_close(loaded["scale"], torch.tensor(6.0))
    assert loaded["none"].shape == (0, 4)
    torch.testing.assert_close(loaded["half"], torch.tensor([0.5, 2], dtype=torch.bfloat16))
    torch.testing.assert_close(loaded["mean"], torch.tensor([1e-300], dtype=torch.float64))
    torch.testing.assert_close(loaded["flag"], torch.tensor([True]))
    torch.testing.assert_close(loaded["count"], torch.tensor([5, -6]))
    torch.testing.assert_close(loaded["phase"], torch.tensor([1 + 2j], dtype=torch.complex64))
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt", "job": "digits-abc", "round": "3"}


def test_complex128_is_saved_as_pairs(tmp_path: Path) -> None:
    layout = layout_of(
        Tensor("z", "complex128", (1,), "parameters.float64", 0), vectors={"parameters.float64": 2}
    )
    write_model(tmp_path / "m", layout, {"parameters.float64": np.array([3.0, 4.0])}, {})
    torch.testing.assert_close(
        load_file(tmp_path / "m")["z"], torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (
            Tensor("w", "float32", (3,), "parameters.float32", 0),
            "'w' ends at byte 12 of parameters.float32, which has 8",
        ),
        (Tensor("w", "float32", (1,), "parameters.float64", 0), "'w' lies in vector 'parameters.float64'"),
        (Tensor("w", "quint8", (1,), "parameters.float32", 0), "'w' has type quint8"),
    ],
)
def test_what_cannot_be_written_is_named(tensor: Tensor, text: str, tmp_path: Path) -> None:
    layout = layout_of(tensor, vectors={"parameters.float32": 2})
    with pytest.raises(ValueError, match=text):
        write_model(tmp_path / "m", layout, {"parameters.float32": np.zeros(2, np.float32)}, {})
