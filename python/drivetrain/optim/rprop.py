"""Rprop: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule, learning_rate


def _numbers(group: dict[str, Any]) -> dict[str, float | Tensor]:
    eta_minus, eta_plus = group["etas"]
    step_size_min, step_size_max = group["step_sizes"]
    return {
        "lr": learning_rate(group),
        "eta_minus": float(eta_minus),
        "eta_plus": float(eta_plus),
        "step_size_min": float(step_size_min),
        "step_size_max": float(step_size_max),
        "maximize": group["maximize"],
    }


def _initial(group: dict[str, Any], name: str) -> float:
    return float(group["lr"]) if name == "step_size" else 0.0


@follows(Rule("rprop", _numbers, initial=_initial))
class Rprop(FusedOptimizer, torch.optim.Rprop):
    """Rprop: torch.optim.Rprop with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. :class:`drivetrain.optim.Adam` lists the dtypes
    and devices. Feed it the gradients of whole epochs: the rule looks at signs only.

    Source: Riedmiller & Braun 1993, "A direct adaptive method for faster backpropagation learning: the RPROP
    algorithm", as torch implements it.

    Args:
        lr: Step size of every element before the first step; later values have no effect.
        etas: Factors of the step size where the sign of the gradient changes, and where it stays.
        step_sizes: Bounds of the step sizes.
    """

    @passes_on
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50),
        *,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...
