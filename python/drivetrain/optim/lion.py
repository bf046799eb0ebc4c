"""Lion, which torch does not have, in the manner of torch's classes."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .arguments import check_arguments
from .base import FusedOptimizer, learning_rate


class _LionArguments(torch.optim.Optimizer):
    """The constructor, as torch would write it."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        check_arguments(lr, betas, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})


class Lion(FusedOptimizer, _LionArguments):
    """Lion: steps of one size along the sign of a momentum, with decoupled weight decay; half of Adam's state.

    Dtypes and devices as in :class:`drivetrain.optim.Adam`; `max_grad_norm` and `zero_grads_in_step` as in every class
    here. Its authors use learning rates 3 to 10 times smaller than AdamW's, and weight decay as many times larger.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.

    Args:
        params: parameters, or dicts with their groups.
        lr: learning rate, a float or a tensor of one element.
        betas: how much of the momentum counts in the sign, and how much of it is kept.
        weight_decay: decoupled: parameters shrink by lr * weight_decay in every step.
        maximize: climbs instead of descending.

    Raises:
        ValueError: hyper-parameters out of range.
    """

    def _rule(self, group: dict[str, Any]) -> str:
        return "lion"

    def _hypers(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
        beta1, beta2 = group["betas"]
        return {
            "lr": learning_rate(group),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "weight_decay": group["weight_decay"],
            "maximize": group["maximize"],
        }
