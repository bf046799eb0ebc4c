"""Storage formats and helpers that the tests of precision share."""

from typing import Any

import pytest
import torch
from torch import Tensor

HALVES = [torch.bfloat16, torch.float16]

# Maps names of precisions to the options of a parameter group.
PRECISIONS: dict[str, dict[str, Any]] = {
    "state_8": {"state_bits": 8},
    "state_4": {"state_bits": 4},
    "state_fp8": {"state_bits": "fp8"},
    "state_16": {"state_bits": 16},
    "state_32": {"state_bits": 32},
    "master_32": {"master_bits": 32, "state_bits": 32},
    "master_32_state_16": {"master_bits": 32, "state_bits": 16},
    "master_32_state_8": {"master_bits": 32, "state_bits": 8},
    "master_32_state_fp8": {"master_bits": 32, "state_bits": "fp8"},
    "master_24_state_8": {"master_bits": 24, "state_bits": 8},
    "master_24_state_4": {"master_bits": 24, "state_bits": 4},
    "kahan": {"rounding": "kahan"},
    "kahan_state_8": {"rounding": "kahan", "state_bits": 8},
    "stochastic": {"rounding": "stochastic"},
    "stochastic_state_8": {"rounding": "stochastic", "state_bits": 8},
}
precisions = pytest.mark.parametrize("precision", PRECISIONS)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compares bytes, except that all NaNs are equal."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    if a.element_size() == 1:  # float8, which has no isnan()
        return same_bits(a.half(), b.half())
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(
        a.masked_fill(nan, 0).view(ints), b.masked_fill(nan, 0).view(ints)
    )


SHAPES: list[Any] = [(3, 700), (513,), (64, 64), (1, 1), (0, 4), (), (300, 17)]


def make_params(dtype: torch.dtype, shapes: list[Any] = SHAPES) -> list[Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def set_grads(params: list[Tensor], others: list[Tensor]) -> None:
    for param, other in zip(params, others, strict=True):
        grad = torch.randn(param.shape).to(param.dtype)
        param.grad = torch.empty_like(param, memory_format=torch.preserve_format).copy_(grad)
        other.grad = grad.to(other.device, other.dtype)


def everything(optimizer: Any) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.detach() for p in params] + [v for p in params for _, v in sorted(optimizer.state[p].items())]
