"""Adam and AdamW: torch's classes with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule

NUMBERS = ("betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")


def adam_name(group: dict[str, Any]) -> str:
    """Returns the native rule of a group of Adam's."""
    return "adam_amsgrad" if group["amsgrad"] else "adam"


@follows(Rule(adam_name, NUMBERS))
class Adam(FusedOptimizer, torch.optim.Adam):
    """Adam: torch.optim.Adam with a native step over all parameters.

    Takes float32, float64, bfloat16, float16 and complex parameters on the CPU and on CUDA devices. The arithmetic is
    float32, or float64 for float64 parameters. 16-bit parameters may have float32 gradients (`grad_dtype`).

    Source: Kingma & Ba 2015, algorithm 1; AMSGrad after Reddi et al. 2018, as torch implements it.

    Args:
        amsgrad: Divides by the largest mean of squares so far.
    """

    @passes_on
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...


@follows(Rule(adam_name, NUMBERS))
class AdamW(Adam, torch.optim.AdamW):
    """AdamW: torch.optim.AdamW with a native step over all parameters.

    :class:`Adam` with decoupled weight decay; it takes the same dtypes and devices.

    Source: Loshchilov & Hutter 2019, algorithm 2.

    Args:
        weight_decay: Decoupled weight decay.
        amsgrad: Divides by the largest mean of squares so far.
    """

    @passes_on
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[StepOptions],
    ) -> None: ...
