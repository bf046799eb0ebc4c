"""Tests LAMB beyond the table of test_optim: norms over whole parameters, and the two passes that they take."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

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


def test_a_step_is_as_long_as_the_parameter() -> None:
    params = [torch.randn(50, 7).mul_(scale).requires_grad_() for scale in (1e-3, 1.0, 1e3)]
    before = copies(params)
    set_grads(params)
    optim.LAMB(params, lr=0.01).step()
    for param, start in zip(params, before, strict=True):
        moved = (param - start).norm() / start.norm()
        assert moved.item() == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("always_adapt", [False, True])
def test_a_parameter_or_direction_of_norm_zero_has_no_ratio(weight_decay: float, always_adapt: bool) -> None:
    zero, still = torch.zeros(4).requires_grad_(), torch.ones(4).requires_grad_()
    zero.grad, still.grad = torch.ones(4), torch.zeros(4)
    optim.LAMB([zero, still], lr=0.1, weight_decay=weight_decay, always_adapt=always_adapt).step()
    torch.testing.assert_close(zero.detach(), torch.full((4,), -0.1))  # Adam's first step
    torch.testing.assert_close(still.detach(), torch.full((4,), 0.9 if weight_decay else 1.0))


def test_the_clipped_ratio_shortens_but_never_lengthens() -> None:
    small, large = (torch.full((4,), size).requires_grad_() for size in (0.5, 5.0))
    for param in (small, large):
        param.grad = torch.ones(4)
    optim.LAMB([small, large], lr=0.1, weight_decay=0.0, always_adapt=True, trust_clip=True).step()
    torch.testing.assert_close(small.detach(), torch.full((4,), 0.5 - 0.1 * 0.5))
    torch.testing.assert_close(large.detach(), torch.full((4,), 5.0 - 0.1))


def test_groups_have_their_own_options() -> None:
    matrix, bias = make_params(shapes=[(8, 8), (8,)])
    groups: list[dict[str, Any]] = [{"params": [matrix]}, {"params": [bias], "weight_decay": 0.0, "lr": 0.5}]
    references = copies([matrix, bias])
    ours = optim.LAMB(groups, lr=0.1)
    reference = LAMB(
        [{"params": references[:1], "weight_decay": 0.01}, {"params": references[1:], "weight_decay": 0.0, "lr": 0.5}],
        0.1,
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(ours, 0.5)
    reference_scheduler = torch.optim.lr_scheduler.ExponentialLR(reference, 0.5)
    for _ in range(3):
        set_grads([matrix, bias], references)
        for each in (ours, reference, scheduler, reference_scheduler):
            each.step()
    assert_same([matrix, bias], references, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_are_pairs_of_real_ones(dtype: torch.dtype) -> None:
    param = torch.randn(5, 7, dtype=dtype).requires_grad_()
    reference = torch.view_as_real(param.detach()).clone().requires_grad_()
    for own in (param, reference):
        own.grad = torch.full_like(own, 0.5 + 0.5j if own.is_complex() else 0.5)
        optim.LAMB([own], lr=0.1).step()
    torch.testing.assert_close(torch.view_as_real(param.detach()), reference.detach(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": math.nan}, "Invalid learning rate: nan"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, math.nan)}, "Invalid beta parameter at index 1: nan"),
        ({"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
    ],
)
def test_hyper_parameters_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optim.LAMB([torch.zeros(3).requires_grad_()], **options)


def test_tensor_lr_is_read_at_every_step() -> None:
    lr: Tensor = torch.tensor(0.0)
    param = torch.ones(3).requires_grad_()
    optimizer = optim.LAMB([param], lr=lr)
    param.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3))
    lr.fill_(0.1)
    optimizer.step()
    assert not torch.equal(param.detach(), torch.ones(3))
