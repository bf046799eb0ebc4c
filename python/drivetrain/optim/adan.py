"""Adan, which torch lacks, with the interface of torch's classes."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule, hypers


def _numbers(group: dict[str, Any]) -> dict[str, float | Tensor]:
    beta1, beta2, beta3 = map(float, group["betas"])
    numbers = hypers(group, "eps", "weight_decay", "no_prox", "maximize")
    return {**numbers, "beta1": beta1, "beta2": beta2, "beta3": beta3}


@follows(Rule("adan", _numbers))
class Adan(FusedOptimizer):
    """Adan: Adam with Nesterov's momentum, estimated from the differences of successive gradients.

    :class:`drivetrain.optim.Adam` lists the dtypes and devices. The state keeps the previous gradient, so that it takes
    twice as much memory as Adam's. The authors use learning rates 5 to 10 times larger than Adam's.

    Source: Xie et al. 2022, "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models", algorithm
    1. The betas, which are one minus the paper's, and the bias corrections follow the authors' code.

    Args:
        betas: Decay rates of the means of gradients, of their differences, and of squares.
        eps: Added to the root of the mean of squares.
        weight_decay: Decoupled weight decay.
        no_prox: Decays weights before the step, as AdamW does. By default they are divided by 1 + lr * weight_decay
            after it.

    Raises:
        ValueError: A hyper-parameter is out of range.
    """

    @passes_on
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        no_prox: bool = False,
        maximize: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...
