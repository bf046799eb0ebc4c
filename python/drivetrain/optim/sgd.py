"""SGD: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor

from .base import FusedOptimizer, learning_rate


class SGD(FusedOptimizer, torch.optim.SGD):
    """torch.optim.SGD, constructor and state included, stepped in one pass over all parameters.

    Momentum, dampening, Nesterov, weight decay (L2) and maximize as in torch; dtypes and devices as in
    :class:`drivetrain.optim.Adam`. `foreach` and `fused` are accepted and change nothing.

    Raises:
        NotImplementedError: `differentiable=True`.
        ValueError: as torch, for hyper-parameters out of range.
    """

    def _rule(self, group: dict[str, Any]) -> str:
        return "sgd_momentum" if group["momentum"] else "sgd"

    def _hypers(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
        return {
            "lr": learning_rate(group),
            "momentum": group["momentum"],
            "dampening": group["dampening"],
            "weight_decay": group["weight_decay"],
            "nesterov": group["nesterov"],
            "maximize": group["maximize"],
        }
