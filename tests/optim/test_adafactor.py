"""Tests Adafactor against torch's: factors of every shape, threads, and bad input."""

import io
import math
from typing import Any

import pytest
import torch

from drivetrain import optim
from optim_cases import ADAFACTOR_PRECISIONS as PRECISIONS
from optim_cases import ADAFACTOR_SHAPES as SHAPES
from optim_cases import (
    TOLERANCES,
    assert_same,
    assert_same_bits_everywhere,
    copies,
    make_params,
    round_stored,
    set_grads,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "decay": {"lr": 0.3, "weight_decay": 0.1, "beta2_decay": -0.5},
    "maximize": {"maximize": True, "d": 2.0, "eps": (1e-8, 0.1)},
    "floor": {"eps": (0.5, 1e-3), "lr": 0.05},  # The floor is larger than many roots, so that it takes effect.
}
options_of = pytest.mark.parametrize("which", OPTIONS)


@options_of
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matches_torch_with_its_states(which: str, foreach: bool, dtype: torch.dtype, isa: str) -> None:
    params = make_params(dtype, SHAPES)
    torch_params = copies(params)
    ours = optim.Adafactor(params, **OPTIONS[which], foreach=foreach)
    theirs = torch.optim.Adafactor(torch_params, **OPTIONS[which], foreach=foreach)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
    for _ in range(4):
        set_grads(params, torch_params)
        ours.step()
        theirs.step()
    assert_same(params, torch_params, **tolerance)
    for param, torch_param in zip(params, torch_params, strict=True):
        state, torch_state = ours.state[param], theirs.state[torch_param]
        assert list(state) == list(torch_state)
        for name, value in torch_state.items():
            assert state[name].dtype == value.dtype
            assert state[name].shape == value.shape
            torch.testing.assert_close(state[name], value, **tolerance)


@options_of
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_matches_float64_with_stored_values_rounded(which: str, dtype: torch.dtype, isa: str) -> None:
    options = {"eps": (torch.finfo(dtype).eps, 1e-3), **OPTIONS[which]}
    params = make_params(dtype, [shape for shape in SHAPES if math.prod(shape) < 5000])
    expected = [p.detach().double().requires_grad_() for p in params]
    ours, reference = optim.Adafactor(params, **OPTIONS[which]), torch.optim.Adafactor(expected, **options)
    for _ in range(3):
        set_grads(params, expected)
        ours.step()
        reference.step()
        round_stored(reference, dtype)
    assert_same([p.double() for p in params], expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_threads_nor_instruction_sets_change_the_bits(precision: str, dtype: torch.dtype) -> None:
    assert_same_bits_everywhere(
        make_params(dtype, SHAPES), lambda params: optim.Adafactor(params, max_grad_norm=1.0, **PRECISIONS[precision])
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_storages_of_fewer_bits(precision: str) -> None:
    """A step loads float32 values, makes the float32 step and stores the results."""
    params = make_params(torch.bfloat16, [(30, 40), (64, 64), (300,), (2, 3, 4)])
    optimizer = optim.Adafactor(params, eps=(1e-6, 1e-3), **PRECISIONS[precision])
    for _ in range(3):
        wide = [optimizer.float32_value(p).requires_grad_() for p in params]
        reference = optim.Adafactor(wide, eps=(1e-6, 1e-3))
        set_grads(params)
        for param, other in zip(params, wide, strict=True):
            other.grad = param.grad.float()
            if param in optimizer.state:
                kept = {name: value.float().clone() for name, value in optimizer.state[param].items()}
                reference.state[other] = {name: kept[name] for name in kept if not name.startswith("param_")}
        optimizer.step()
        reference.step()
        for param, other in zip(params, wide, strict=True):
            now, expected = optimizer.float32_value(param), other.detach()
            steps = {"master_24": 2**-15, "kahan": 2**-14}.get(precision, 2**-7)
            assert ((now - expected).abs() <= expected.abs() * steps + 1e-8).all()
            for name, value in reference.state[other].items():
                mine = optimizer.state[param][name]
                torch.testing.assert_close(mine, value.to(mine.dtype), rtol=2**-7, atol=0)
    bits = PRECISIONS[precision].get("state_bits")
    wanted = {8: torch.float32, 16: torch.bfloat16, 32: torch.float32, None: torch.bfloat16}[bits]
    for param in params:
        names = optimizer.state[param].keys() & {"row_var", "col_var", "variance"}
        assert all(optimizer.state[param][name].dtype == wanted for name in names)


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "holes", "gradient_transposed"])
@pytest.mark.parametrize("zero", [False, True])
def test_other_strides(layout: str, zero: bool) -> None:
    values = torch.randn(6, 8, 5, 7)
    if layout == "transposed":
        param = values.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    elif layout == "channels_last":
        param = values.to(memory_format=torch.channels_last)
    else:
        param = torch.stack([values, values], -1)[..., 0] if layout == "holes" else values.clone()
    reference = values.clone().requires_grad_()
    param = param.detach().requires_grad_()
    ours = optim.Adafactor([param], zero_grads_in_step=zero)
    theirs = torch.optim.Adafactor([reference])
    for _ in range(3):
        reference.grad = torch.randn(values.shape)
        param.grad = reference.grad.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        ours.step()
        theirs.step()
        assert param.grad.any() != zero
    assert_same([param], [reference], rtol=1e-5, atol=1e-6)
    state = ours.state[param]
    state["row_var"] = torch.stack([state["row_var"]] * 2, -1)[..., 0]  # A step writes a state with holes in place.
    reference.grad = torch.randn(values.shape)
    param.grad = reference.grad.clone()
    ours.step()
    theirs.step()
    torch.testing.assert_close(state["row_var"], theirs.state[reference]["row_var"])


def test_empty_parameters_and_those_without_gradient() -> None:
    params = make_params(shapes=[(0,), (0, 4), (3, 0), (5, 6), (2, 2)])
    for param in params[:-1]:
        param.grad = torch.ones_like(param)
    untouched = params[-1].detach().clone()
    optimizer = optim.Adafactor(params)
    optimizer.step()
    optimizer.step()
    assert optimizer.state[params[1]]["row_var"].shape == (0, 1)
    assert params[-1] not in optimizer.state
    assert torch.equal(params[-1].detach(), untouched)


def test_state_goes_to_torch_and_back() -> None:
    params = make_params(shapes=[(20, 30), (7,)])
    reference_params = copies(params)
    reference = torch.optim.Adafactor(reference_params)
    saved: dict[str, Any] | None = None
    for make in (optim.Adafactor, torch.optim.Adafactor, optim.Adafactor):
        optimizer: Any = make(params)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for _ in range(2):
            set_grads(params, reference_params)
            optimizer.step()
            reference.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file)
    assert_same(params, reference_params, rtol=1e-5, atol=1e-6)
    assert optimizer.state[params[0]]["step"] == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
        ({"lr": math.nan}, "Learning rate should be >= 0 but is: nan"),
        ({"beta2_decay": 0.1}, "beta2_decay should be <= 0 but is: 0.1"),
        ({"eps": (-1.0, 1e-3)}, "epsilon1 should be >= 0 but is: -1.0"),
        ({"eps": (None, math.nan)}, "epsilon2 should be >= 0 but is: nan"),
        ({"d": 0.5}, "Clipping threshold d should be >= 1 but is: 0.5"),
        ({"weight_decay": -0.1}, "weight_decay should be >= 0 but is: -0.1"),
    ],
)
def test_hyper_parameters_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optim.Adafactor([torch.zeros(3, 3).requires_grad_()], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": math.nan}, "lr is nan, expected a finite number, 0 or above"),
        ({"beta2_decay": 1.0}, "beta2_decay is 1, expected a finite number, 0 or below"),
        ({"d": 0.5}, "d is 0.5, expected a finite number, 1 or above"),
        ({"eps": (None, -1.0)}, r"eps\[1\] is -1, expected a finite number, 0 or above"),
        ({"eps": (math.inf, 1e-3)}, r"eps\[0\] is inf, expected a finite number, 0 or above"),
    ],
)
def test_written_into_a_group(options: dict[str, Any], message: str) -> None:
    param = torch.ones(3, 3).requires_grad_()
    param.grad = torch.ones(3, 3)
    optimizer = optim.Adafactor([param])
    optimizer.param_groups[0].update(options)
    with pytest.raises(ValueError, match=rf"param_groups\[0\]: {message}"):
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3, 3))
    assert not optimizer.state


class TestBadInput:
    def test_complex(self) -> None:
        good, param = torch.ones(2, 2).requires_grad_(), torch.ones(2, 2, dtype=torch.complex64).requires_grad_()
        good.grad, param.grad = torch.ones_like(good), torch.ones_like(param)
        with pytest.raises(
            RuntimeError, match=r"parameter 'w' is ComplexFloat .* Adafactor does not support complex parameters"
        ):
            optim.Adafactor([("good", good), ("w", param)]).step()
        assert torch.equal(good.detach(), torch.ones(2, 2))

    def test_state_of_another_shape(self) -> None:
        param = torch.ones(3, 4).requires_grad_()
        param.grad = torch.ones(3, 4)
        optimizer = optim.Adafactor([("w", param)])
        optimizer.step()
        optimizer.state[param]["row_var"] = torch.zeros(4, 1)
        before = param.detach().clone()
        with pytest.raises(TypeError, match=r"'w': its state 'row_var' is Float of shape \[4, 1\].*expected.*\[3, 1\]"):
            optimizer.step()
        assert optimizer.state[param]["step"] == 1
        assert torch.equal(param.detach(), before)
