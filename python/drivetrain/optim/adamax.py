"""Adamax: torch's class with the native step."""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule


@follows(Rule("adamax", ("betas", "eps", "weight_decay", "maximize")))
class Adamax(FusedOptimizer, torch.optim.Adamax):
    """Adamax: torch.optim.Adamax with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. :class:`drivetrain.optim.Adam` lists the dtypes
    and devices. With `state_bits=8` the norm has the codes of means of squares, which are never 0 where it is not.

    Source: Kingma & Ba 2015, algorithm 2, as torch implements it: `eps` is added to the magnitude of the gradient.

    Args:
        betas: Decay rates of the mean of gradients and of their infinity norm.
        eps: Added to the magnitude of each gradient.
    """

    @passes_on
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...
