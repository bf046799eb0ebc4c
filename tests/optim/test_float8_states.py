"""Tests the float8 states of state_bits="fp8" against torch's own casts to float8."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from drivetrain import _C, optim
from effort import rounds
from precision_cases import same_bits

BLOCK = 256
FORMATS = {torch.float8_e4m3fn: 416.0, torch.float8_e5m2: 57344.0}  # the number that the largest value becomes
float8_formats = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])


def values_of(numel: int, exponent: int, dtype: torch.dtype) -> Tensor:
    """Returns numbers of many magnitudes. Only e4m3 is for negative ones."""
    values = torch.ldexp(torch.randn(numel), torch.randint(-14, 2, (numel,)) + exponent)
    values[::7] = 0
    return values.abs() if dtype == torch.float8_e5m2 else values


def stored(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes, scales = _C.optim_store_state(torch.empty_like(values), values, dtype)
    assert codes.dtype == dtype
    assert scales is not None
    return codes, scales


def of_elements(scales: Tensor, numel: int) -> Tensor:
    return scales.abs().repeat_interleave(BLOCK)[:numel]


@float8_formats
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 513, 5000])
@pytest.mark.parametrize("exponent", [-90, -30, 0, 30])
def test_numbers_are_those_of_torch(dtype: torch.dtype, numel: int, exponent: int, isa: str) -> None:
    values = values_of(numel, exponent, dtype)
    codes, scales = stored(values, dtype)
    largest = torch.nn.functional.pad(values.abs(), (0, -numel % BLOCK)).view(-1, BLOCK).amax(1)
    smallest = torch.where(largest > 0, 2.0**-118, 0.0)  # of scales, so that their reciprocals are finite
    torch.testing.assert_close(scales, (largest / FORMATS[dtype]).maximum(smallest), rtol=1e-6, atol=0)
    scale = of_elements(scales, numel)
    loaded = _C.optim_load_state(codes, scales)
    assert same_bits(loaded, codes.float() * scale)
    # Products and roots are rounded before float8 is, so a value next to a tie may go either way.
    scaled = torch.where(scale > 0, values.double() / scale, 0.0)
    below, above = ((scaled * (1 + sign * 1e-6)).float().to(dtype).float() for sign in (-1, 1))
    least = torch.where((values > 0) & (dtype == torch.float8_e5m2), 2.0**-16, -math.inf)
    found = codes.float()
    assert ((found == below.maximum(least)) | (found == above.maximum(least))).all()


@float8_formats
def test_every_number_is_kept(dtype: torch.dtype, isa: str) -> None:
    """A block that holds the numbers times a scale gets that scale and those codes, but for the rounding of roots."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
    every = every[every.isfinite() & (every.abs() <= FORMATS[dtype])]
    every = every[every > 0] if dtype == torch.float8_e5m2 else every
    numbers = torch.nn.functional.pad(every, (0, BLOCK - len(every)), value=FORMATS[dtype])
    for scale in (1.0, 2.0**-40, 2.0**20):
        codes, scales = stored(numbers * scale, dtype)
        assert torch.equal(codes.float(), numbers)
        tolerance = 2.0**-22 if dtype == torch.float8_e5m2 else 0.0
        torch.testing.assert_close(scales, torch.tensor([scale]), rtol=tolerance, atol=0)
        torch.testing.assert_close(_C.optim_load_state(codes, scales), numbers * scale, rtol=tolerance, atol=0)


@float8_formats
def test_infinities_and_nan_stay_where_they_are(dtype: torch.dtype, isa: str) -> None:
    values = values_of(700, 0, dtype)
    values[3], values[300] = math.inf, math.nan
    if dtype == torch.float8_e4m3fn:
        values[5] = -math.inf
    codes, scales = stored(values, dtype)
    loaded = _C.optim_load_state(codes, scales)
    assert torch.equal(loaded.isnan(), values.isnan())
    assert torch.equal(loaded[values.isinf()], values[values.isinf()])
    finite = values.isfinite()
    clean_codes, clean_scales = stored(values.where(finite, 0.0), dtype)
    assert torch.equal(loaded[finite], _C.optim_load_state(clean_codes, clean_scales)[finite])


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=600), st.booleans())
@settings(deadline=None, max_examples=rounds(50, whole=200))
def test_errors_are_bounded(numbers: list[float], squared: bool) -> None:
    dtype = torch.float8_e5m2 if squared else torch.float8_e4m3fn
    values = torch.tensor(numbers, dtype=torch.float32)
    values = values.abs() if squared else values
    codes, scales = stored(values, dtype)
    loaded, scale = _C.optim_load_state(codes, scales).double(), of_elements(scales, len(values)).double()
    relative, smallest = (2.0**-3, 2.0**-16) if squared else (2.0**-4, 2.0**-9)
    # A nonzero square keeps the smallest number, which is up to a whole step off.
    absolute = scale * smallest * (1.0 if squared else 0.5)
    bound = (values.abs() * relative).maximum(absolute) * (1 + 1e-5) + 1e-38
    assert ((loaded - values).abs() <= bound).all()
    if squared:
        visible = values > 1e-37
        assert (codes.float()[visible] > 0).all()


def test_the_state_is_readable_by_torch_and_survives_a_state_dict() -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 40)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, state_bits="fp8", min_8bit_size=0)
    for _ in range(3):
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[model.weight]
    assert state["exp_avg_codes"].dtype == torch.float8_e4m3fn
    assert state["exp_avg_sq_codes"].dtype == torch.float8_e5m2
    for name in ("exp_avg", "exp_avg_sq"):
        scale = of_elements(state[f"{name}_scales"], 300 * 40).view(40, 300)
        plain = _C.optim_load_state(state[f"{name}_codes"], state[f"{name}_scales"])
        assert same_bits(state[f"{name}_codes"].float() * scale, plain)
    other = optim.AdamW(model.parameters(), lr=1e-3, state_bits="fp8", min_8bit_size=0)
    other.load_state_dict(optimizer.state_dict())
    assert same_bits(other.state[model.weight]["exp_avg_codes"], state["exp_avg_codes"])
    assert same_bits(other.state[model.weight]["exp_avg_sq_codes"], state["exp_avg_sq_codes"])


@pytest.mark.parametrize(("before", "after"), [(8, "fp8"), ("fp8", 8), ("fp8", 32), (16, "fp8")])
def test_the_format_may_change_between_steps(before: Any, after: Any) -> None:
    torch.manual_seed(0)
    param = torch.randn(30, 40).requires_grad_()
    optimizer = optim.AdamW([param], lr=1e-2, state_bits=before, min_8bit_size=0)
    param.grad = torch.randn_like(param)
    optimizer.step()
    kept = {name: value.clone() for name, value in optimizer.state[param].items()}
    optimizer.param_groups[0]["state_bits"] = after
    param.grad = torch.zeros_like(param)
    optimizer.step()

    def means(state: dict[str, Tensor]) -> Tensor:
        if "exp_avg" in state:
            return state["exp_avg"].float()
        return _C.optim_load_state(state["exp_avg_codes"], state["exp_avg_scales"])

    largest = means(kept).abs().max().item()
    torch.testing.assert_close(means(optimizer.state[param]), 0.9 * means(kept), rtol=0.13, atol=largest * 2**-7)
