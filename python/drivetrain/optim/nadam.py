"""NAdam: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule


def _initial(group: dict[str, Any], name: str) -> float:
    return 1.0 if name == "mu_product" else 0.0


@follows(
    Rule(
        "nadam",
        ("betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize"),
        initial=_initial,
    )
)
class NAdam(FusedOptimizer, torch.optim.NAdam):
    """NAdam: torch.optim.NAdam with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. :class:`drivetrain.optim.Adam` lists the dtypes
    and devices. The state keeps the product of all momenta, `mu_product`, as torch does.

    Source: Dozat 2016, "Incorporating Nesterov Momentum into Adam", algorithm 2, as torch implements it.

    Args:
        weight_decay: L2 penalty, or decoupled weight decay.
        momentum_decay: Decay of the momentum: its factor in step t is 1 - 0.96**(t * momentum_decay) / 2.
    """

    @passes_on
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...
