"""ADOPT, which torch lacks, with the interface of torch's classes."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule, hypers


def _numbers(group: dict[str, Any]) -> dict[str, float | Tensor]:
    numbers = hypers(group, "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")
    return {**numbers, "clips": group["clip"]}


@follows(Rule("adopt", _numbers))
class ADOPT(FusedOptimizer):
    """ADOPT: Adam that divides by the second moment of earlier steps, so that it converges with any `betas[1]`.

    :class:`drivetrain.optim.Adam` lists the dtypes and devices. The first step only starts the mean of squares and
    moves no parameter.

    Source: Taniguchi et al. 2024, "ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate", algorithm
    2.

    Args:
        betas: Decay rates of the means of normalized gradients and of squared gradients.
        eps: Lower bound of the denominator.
        weight_decay: L2 penalty, or decoupled weight decay.
        clip: Limits normalized gradients to the fourth root of the number of steps done, as the paper advises.

    Raises:
        ValueError: A hyper-parameter is out of range.
    """

    @passes_on
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        clip: bool = True,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...
