"""Tests LAMB beyond the table of test_optim: norms over whole parameters, and the two passes that they take."""

from typing import Any

import pytest
import torch

from drivetrain import optim
from optim_cases import assert_same, assert_same_bits_everywhere, copies, make_params, set_grads
from reference.lamb import LAMB

# The sizes lie below, at and above a chunk of the sums and the elements that share a pair of passes. Threads cut some
# parameters, also within 8-bit blocks.
SHAPES: list[Any] = [(5,), (1 << 14,), ((1 << 14) + 1,), (300, 1001), (7,), (2, 128), (1000, 700), (3,)]
PRECISIONS: list[dict[str, Any]] = [{}, {"state_bits": 8, "min_8bit_size": 0}, {"max_grad_norm": 1.0}]


@pytest.mark.parametrize("options", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_threads_nor_instruction_sets_change_the_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    assert_same_bits_everywhere(make_params(dtype, SHAPES), lambda params: optim.LAMB(params, lr=0.1, **options))


def test_a_parameter_is_stepped_alike_in_any_company() -> None:
    """The choice of parameters that share a pair of passes affects speed alone."""
    alone, together = make_params(shapes=SHAPES), []
    together = copies(alone)
    set_grads(alone, together)
    for param in alone:
        optim.LAMB([param], lr=0.1).step()
    optim.LAMB(together, lr=0.1).step()
    assert_same(alone, together, rtol=0, atol=0)


def test_large_parameters_match_the_reference() -> None:
    params = make_params(shapes=SHAPES)
    references = copies(params)
    ours, reference = optim.LAMB(params, lr=0.1), LAMB(references, lr=0.1)
    for _ in range(3):
        set_grads(params, references)
        ours.step()
        reference.step()
    assert_same(params, references, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("always_adapt", [False, True])
def test_a_parameter_or_direction_of_norm_zero_has_no_ratio(weight_decay: float, always_adapt: bool) -> None:
    zero, still = torch.zeros(4).requires_grad_(), torch.ones(4).requires_grad_()
    zero.grad, still.grad = torch.ones(4), torch.zeros(4)
    optim.LAMB([zero, still], lr=0.1, weight_decay=weight_decay, always_adapt=always_adapt).step()
    torch.testing.assert_close(zero.detach(), torch.full((4,), -0.1))  # Adam's first step
    torch.testing.assert_close(still.detach(), torch.full((4,), 0.9 if weight_decay else 1.0))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_are_pairs_of_real_ones(dtype: torch.dtype) -> None:
    param = torch.randn(5, 7, dtype=dtype).requires_grad_()
    reference = torch.view_as_real(param.detach()).clone().requires_grad_()
    for own in (param, reference):
        own.grad = torch.full_like(own, 0.5 + 0.5j if own.is_complex() else 0.5)
        optim.LAMB([own], lr=0.1).step()
    torch.testing.assert_close(torch.view_as_real(param.detach()), reference.detach(), rtol=0, atol=0)
