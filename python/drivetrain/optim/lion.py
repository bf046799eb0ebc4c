"""Lion, which torch lacks, with the interface of torch's classes."""

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule


@follows(Rule("lion", ("betas", "weight_decay", "maximize")))
class Lion(FusedOptimizer):
    """Lion: steps of constant size along the sign of a momentum, with decoupled weight decay and half of Adam's state.

    :class:`drivetrain.optim.Adam` lists the dtypes and devices. The authors use learning rates 3 to 10 times smaller
    than AdamW's, and weight decay larger by the same factor.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.

    Args:
        betas: The first weighs the momentum against the gradient in the sign; the second is the decay rate of the
            momentum.
        weight_decay: Decoupled: parameters shrink by lr * weight_decay in every step.

    Raises:
        ValueError: A hyper-parameter is out of range.
    """

    @passes_on
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...
