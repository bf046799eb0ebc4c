"""Tests the byte counts of the activation benchmark on models of known size."""

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from suite.activation_memory import allocated, peak_of_alive
from suite.activation_models import ModelCase
from suite.activation_rivals import full
from suite.activations import Variant, _compare_gradients

ROWS, WIDTH = 64, 256
LAYER_BYTES = 4 * ROWS * WIDTH


def _model(depth: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)))


def test_what_a_forward_pass_keeps_is_what_the_allocator_says() -> None:
    model, x = _model(4), torch.randn(ROWS, WIDTH)

    def forward() -> Tensor:
        return model(x).sum()

    assert peak_of_alive(forward, model, [x]) == 4 * LAYER_BYTES + 8  # each tanh's, the sum, and its gradient
    model.zero_grad(set_to_none=True)
    grown, peak = allocated(forward)
    assert grown == 4 * LAYER_BYTES + 4
    assert peak > grown  # includes gradients


def test_of_checkpointed_blocks_their_inputs_and_one_recomputed_block_are_alive() -> None:
    model, x = _model(4), torch.randn(ROWS, WIDTH)
    full(list(model))
    # Counts the inputs of the last three blocks, the output of the last, and its recomputed linear and tanh.
    assert 5 * LAYER_BYTES < peak_of_alive(lambda: model(x).sum(), model, [x]) <= 6 * LAYER_BYTES + 8


class _Noise(torch.autograd.Function):
    """Adds different noise to every gradient, like a kernel that sums in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (1 + ctx.scale * next(_noises)), None


_noises = itertools.count()


class _Noisy(nn.Module):
    """Has a noisy gradient of its weight, and an exact one of its bias, doubled where `is_wrong`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.scale, self.is_wrong = scale, False

    def forward(self, x: Tensor) -> Tensor:
        out = (x * _Noise.apply(self.weight, self.scale) + self.bias).sum()
        return out + self.bias.sum() if self.is_wrong else out


@pytest.mark.parametrize(("scale", "is_wrong", "passes"), [(1e-5, False, True), (0.5, False, False), (0, True, False)])
def test_gradients_whose_bits_torch_does_not_repeat_are_compared_within_a_tolerance(
    scale: float, is_wrong: bool, passes: bool
) -> None:
    case = ModelCase("a model", _Noisy(scale), (torch.randn(8),), lambda m: [], False)
    plain, other = Variant.of("plain", case), Variant.of("other", case)
    other.model.is_wrong = is_wrong
    with nullcontext() if passes else pytest.raises(AssertionError, match="gradients or buffers differ with other"):
        _compare_gradients([plain, other])
