"""Adadelta: torch's class with the native step."""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule


@follows(Rule("adadelta", ("rho", "eps", "weight_decay", "maximize")))
class Adadelta(FusedOptimizer, torch.optim.Adadelta):
    """Adadelta: torch.optim.Adadelta with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. :class:`drivetrain.optim.Adam` lists the dtypes
    and devices.

    Source: Zeiler 2012, "ADADELTA: An Adaptive Learning Rate Method", algorithm 1, as torch implements it.

    Args:
        rho: Decay rate of the means of squares.
        eps: Added to both means before their roots.
    """

    @passes_on
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...
