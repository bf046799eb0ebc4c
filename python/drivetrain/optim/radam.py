"""RAdam: torch's class with the native step."""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule


@follows(Rule("radam", ("betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")))
class RAdam(FusedOptimizer, torch.optim.RAdam):
    """RAdam: torch.optim.RAdam with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. :class:`drivetrain.optim.Adam` lists the dtypes
    and devices.

    Source: Liu et al. 2020, "On the Variance of the Adaptive Learning Rate and Beyond", algorithm 2, as torch
    implements it.

    Args:
        weight_decay: L2 penalty, or decoupled weight decay.
    """

    @passes_on
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...
