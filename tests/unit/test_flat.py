"""A model's tensors in flat vectors and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cadenza.training.device import Copies, DirectCopies, LateCopies
from cadenza.training.flat import FlatModel, as_array
from cadenza.training.inventory import normalised
from tests.unit.awkward import KINDS, WIDTH, Kind, groups, same, state_of

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def flat_of(model: nn.Module, **options: Any) -> FlatModel:
    return FlatModel(model, groups(model), **options)


# --- there and back ---


@kinds
@pytest.mark.parametrize("copies", [DirectCopies, LateCopies])
def test_every_kind_of_model_goes_there_and_back_to_the_bit(kind: Kind, copies: type[Copies]) -> None:
    model, other = kind.model(seed=1), kind.model(seed=2)
    flat, other_flat = flat_of(model, copies=copies()), flat_of(other, copies=copies())
    assert flat.layout == other_flat.layout
    vectors = flat.vectors(flat.layout.every())
    flat.gather(vectors)
    other_flat.scatter(vectors)
    assert same(state_of(other), state_of(model))


@kinds
def test_no_tensor_is_replaced_or_laid_out_anew(kind: Kind) -> None:
    model = kind.model()
    flat = flat_of(model)
    tensors = list(model.state_dict(keep_vars=True).values())
    before = [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]
    vectors = flat.vectors(flat.layout.every())
    flat.gather(vectors)
    flat.scatter(vectors)
    after = list(model.state_dict(keep_vars=True).values())
    assert all(one is other for one, other in zip(tensors, after, strict=True))
    assert [(tensor.data_ptr(), tensor.stride()) for tensor in after] == before


@kinds
@pytest.mark.parametrize("copies", [DirectCopies, LateCopies])
def test_gradients_go_there_and_back_to_the_bit(kind: Kind, copies: type[Copies]) -> None:
    model = kind.model()
    flat = flat_of(model, copies=copies())
    kind.loss(model, seed=3).backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in flat.parameters]
    vectors = flat.vectors(flat.layout.travelling())
    present = flat.gather_gradients(vectors)
    for parameter in flat.parameters[::2]:
        parameter.grad = None  # comes into being again
    for parameter in flat.parameters[1::2]:
        if parameter.grad is not None:
            parameter.grad.zero_()  # is written to
    flat.scatter_gradients(vectors, present)
    for parameter, gradient in zip(flat.parameters, gradients, strict=True):
        if gradient is None:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient)


def test_vectors_hold_the_tensors_in_the_order_of_their_indices() -> None:
    model = KINDS["strided"].model()
    flat = flat_of(model)
    vectors = flat.vectors(flat.layout.travelling())
    flat.gather(vectors)
    expected = torch.cat([model.transposed.reshape(-1), model.spaced.reshape(-1)])  # type: ignore[operator]
    assert torch.equal(vectors.flat["parameters.float32"], expected)
    assert np.array_equal(vectors.arrays["parameters.float32"], expected.detach().numpy())


def test_a_missing_gradient_is_zeros_and_a_clear_bit() -> None:
    model = KINDS["unused"].model()
    flat = flat_of(model)
    vectors = flat.vectors(flat.layout.travelling())
    vectors.flat["parameters.float32"].fill_(7.0)
    KINDS["unused"].loss(model, seed=1).backward()
    assert flat.layout.trainable == ("used.weight", "used.bias", "unused.weight", "unused.bias")
    assert flat.gather_gradients(vectors) == b"\x03"
    half = WIDTH * WIDTH + WIDTH
    assert vectors.flat["parameters.float32"][half:].eq(0).all()


def test_the_presence_mask_counts_bits_from_the_lowest() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(10)])
    flat = FlatModel(model, torch.optim.SGD(model.parameters()))
    for index in (0, 9):
        flat.parameters[index].grad = torch.ones(1)
    vectors = flat.vectors(flat.layout.travelling())
    assert flat.gather_gradients(vectors) == bytes([0b1, 0b10])
    flat.scatter_gradients(vectors, bytes([0b110, 0]))
    assert [index for index, p in enumerate(flat.parameters) if p.grad is not None] == [1, 2]


def test_a_repeated_gradient_can_take_a_mean_that_is_not() -> None:
    model = nn.Linear(3, 2, bias=False)
    flat = flat_of(model)
    model.weight.grad = torch.ones(1, 1).expand(2, 3)
    vectors = flat.vectors(flat.layout.travelling())
    mean = torch.arange(6, dtype=torch.float32)
    vectors.flat["parameters.float32"].copy_(mean)
    flat.scatter_gradients(vectors, b"\x01")
    assert torch.equal(model.weight.grad.reshape(-1), mean)


def test_bfloat16_is_two_bytes_in_numpy() -> None:
    array = as_array(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert array.dtype == ml_dtypes.bfloat16
    assert array.nbytes == 4
    assert array.tolist() == [1.5, -2.0]


# --- what travels ---


def vectors_of(model: nn.Module, **options: Any) -> dict[str, int]:
    return {vector.name: vector.length for vector in flat_of(model, **options).layout.vectors}


def test_tied_weights_travel_once_under_both_names() -> None:
    layout = flat_of(KINDS["tied"].model()).layout
    assert layout.aliases == (("second.weight", "first.weight"),)
    assert [tensor.name for tensor in layout.tensors] == ["first.weight", "first.bias", "second.bias"]


def test_frozen_parameters_are_static() -> None:
    layout = flat_of(KINDS["frozen"].model()).layout
    assert layout.trainable == ("head.weight", "head.bias")
    assert {t.name for t in layout.tensors if t.vector == "static.uint8"} == {"fixed.weight", "fixed.bias"}


def test_a_trainable_parameter_outside_the_optimizer_is_static_and_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    flat = FlatModel(model, torch.optim.SGD(model[0].parameters()))
    assert flat.untrained == ("1.weight", "1.bias")
    assert flat.layout.trainable == ("0.weight", "0.bias")


def test_floating_buffers_are_averaged_or_stay_and_integers_always_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert vectors_of(model) == {"parameters.float32": 15, "buffers.float32": 6, "static.uint8": 8}
    assert vectors_of(model, buffers="local") == {"parameters.float32": 15, "static.uint8": 40}


def test_buffers_that_are_not_in_the_state_dict_do_not_travel() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scratch", torch.zeros(9), persistent=False)
    assert vectors_of(model) == {"parameters.float32": 6}


def test_complex_numbers_are_pairs_of_their_vector() -> None:
    layout = flat_of(KINDS["complex"].model()).layout
    assert [(vector.name, vector.length) for vector in layout.vectors] == [
        ("parameters.float32", 2 * WIDTH * WIDTH)
    ]
    assert layout.tensors[0].dtype == "complex64"


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.float8_e4m3fn, torch.complex128, torch.float64]
)
def test_static_tensors_of_any_type_survive_whatever_lies_before_them(dtype: torch.dtype) -> None:
    values = torch.tensor([1, 0, 1]).to(dtype)
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for each, buffer in ((model, values), (other, torch.zeros_like(values))):
        each.register_buffer("byte", torch.zeros(1, dtype=torch.uint8))
        each.register_buffer("values", buffer)
    flat, other_flat = flat_of(model, buffers="local"), flat_of(other, buffers="local")
    vectors = flat.vectors(["static.uint8"])
    flat.gather(vectors)
    other_flat.scatter(vectors)
    assert torch.equal(other.values.view(torch.uint8), values.view(torch.uint8))  # type: ignore[operator]


def test_a_buffer_that_the_module_assigns_anew_is_followed() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("average", torch.zeros(3))
    flat = flat_of(model)
    model.average = torch.ones(3)
    vectors = flat.vectors(["buffers.float32"])
    flat.gather(vectors)
    assert vectors.flat["buffers.float32"].tolist() == [1, 1, 1]
    model.average = torch.ones(4)
    with pytest.raises(ValueError, match=r"average was torch.float32 \[3\].* is torch.float32 \[4\] now"):
        flat.gather(vectors)


def test_names_are_those_of_the_users_own_module() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expected = flat_of(plain).layout
    wrapped: Any = nn.DataParallel(torch.compile(plain, backend="eager"))
    assert flat_of(wrapped).layout == expected
    plain[1] = torch.compile(plain[1], backend="eager")  # type: ignore[assignment]
    assert flat_of(plain).layout == expected
    assert normalised("a._orig_mod.module.weight") == "a.module.weight"


# --- what is refused ---


def test_a_parameter_of_another_model_is_refused_by_its_place() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": other.parameters()}], lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer's group 1, of shape \[3, 3\]"):
        FlatModel(model, optimizer)


def with_buffer(buffer: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", buffer)
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), "1.weight has no shape yet"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
            "1.weight is on the meta device",
        ),
        (lambda: with_buffer(torch.eye(2).to_sparse()), "odd is sparse"),
        (
            lambda: with_buffer(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
            "odd is quantised",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_tensors_that_cannot_travel_are_refused_by_name(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        flat_of(make())


def test_training_in_float8_is_refused_by_name() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="weight is trained in float8_e4m3fn"):
        FlatModel(model, torch.optim.SGD(model.parameters()))


def test_a_gradient_that_is_sparse_otherwise_than_by_rows_is_refused_by_name() -> None:
    model = nn.Linear(4, 2, bias=False)
    flat = flat_of(model)
    model.weight.grad = torch.eye(2, 4).to_sparse()
    with pytest.raises(
        ValueError, match=r"the gradient of weight has layout sparse_coo .*not sparse by rows"
    ):
        flat.gather_gradients(flat.vectors(flat.layout.travelling()))


def test_an_unknown_policy_for_buffers_is_refused() -> None:
    with pytest.raises(ValueError, match="buffers is 'first'"):
        flat_of(nn.Linear(2, 2), buffers="first")


def test_nothing_to_train_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="nothing to train"):
        FlatModel(model.requires_grad_(False), optimizer)


def test_what_begins_to_train_later_is_refused() -> None:
    model = KINDS["frozen"].model()
    flat = flat_of(model)
    flat.check_unchanged()
    model.fixed.requires_grad_(True)
    with pytest.raises(ValueError, match=r"fixed.weight requires gradients since cadenza.join"):
        flat.check_unchanged()


def test_a_parameter_group_that_is_added_later_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight])
    flat = FlatModel(model, optimizer)
    optimizer.add_param_group({"params": [model.bias]})
    with pytest.raises(ValueError, match="the optimizer has other parameters since"):
        flat.check_unchanged()
