"""ASGD: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule, hypers


def _numbers(group: dict[str, Any]) -> dict[str, float | Tensor]:
    return {**hypers(group, "lambd", "t0", "weight_decay", "maximize"), "average_decay": group["alpha"]}


def _initial(group: dict[str, Any], name: str) -> float:
    return {"eta": float(group["lr"]), "mu": 1.0}.get(name, 0.0)


@follows(Rule("asgd", _numbers, initial=_initial))
class ASGD(FusedOptimizer, torch.optim.ASGD):
    """ASGD: torch.optim.ASGD with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. :class:`drivetrain.optim.Adam` lists the dtypes
    and devices. The state keeps the average `ax`, and the step size `eta` and the weight `mu` of the next step, as
    torch does.

    Source: Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging", as torch implements it.

    Args:
        lambd: Decay of parameters per step, times the step size.
        alpha: Power of the decay of the step size.
        t0: Step after which parameters are averaged.
    """

    @passes_on
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...
