"""RMSprop: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor

from .base import FusedOptimizer, learning_rate


class RMSprop(FusedOptimizer, torch.optim.RMSprop):
    """torch.optim.RMSprop, constructor and state included, stepped in one pass over all parameters.

    Dtypes and devices as in :class:`drivetrain.optim.Adam`. `foreach` is accepted and changes nothing. `max_grad_norm`
    and `zero_grads_in_step` as in every class here.

    Source: Tieleman & Hinton 2012, lecture 6.5; centered after Graves 2013, equations 38 to 41; in torch's form.

    Raises:
        NotImplementedError: `differentiable=True`.
        ValueError: as torch, for hyper-parameters out of range.
    """

    def _rule(self, group: dict[str, Any]) -> str:
        centered, momentum = bool(group["centered"]), bool(group["momentum"] > 0)
        return "rmsprop" + "_centered" * centered + "_momentum" * momentum

    def _hypers(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
        return {
            "lr": learning_rate(group),
            "alpha": group["alpha"],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "momentum": group["momentum"],
            "maximize": group["maximize"],
        }
