"""RMSprop: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule


def _name(group: dict[str, Any]) -> str:
    centered, momentum = bool(group["centered"]), bool(group["momentum"] > 0)
    return "rmsprop" + "_centered" * centered + "_momentum" * momentum


@follows(Rule(_name, ("alpha", "eps", "weight_decay", "momentum", "maximize")))
class RMSprop(FusedOptimizer, torch.optim.RMSprop):
    """RMSprop: torch.optim.RMSprop with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. :class:`drivetrain.optim.Adam` lists the dtypes
    and devices.

    Source: Tieleman & Hinton 2012, lecture 6.5; centered after Graves 2013, equations 38 to 41; as torch implements it.

    Args:
        alpha: Decay rate of the mean of squares.
        centered: Divides by the gradients' estimated standard deviation.
    """

    @passes_on
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...
