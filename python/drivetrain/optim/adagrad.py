"""Adagrad: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor

from .base import FusedOptimizer, learning_rate


class Adagrad(FusedOptimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad, constructor and state included, stepped in one pass over all parameters.

    Dtypes and devices as in :class:`drivetrain.optim.Adam`. `foreach` and `fused` are accepted and change nothing.
    `max_grad_norm` and `zero_grads_in_step` as in every class here.

    Source: Duchi et al. 2011, section 1.1, in torch's form.

    Raises:
        NotImplementedError: `differentiable=True`.
        ValueError: as torch, for hyper-parameters out of range.
    """

    def _rule(self, group: dict[str, Any]) -> str:
        return "adagrad"

    def _hypers(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
        return {
            "lr": learning_rate(group),
            "lr_decay": group["lr_decay"],
            "weight_decay": group["weight_decay"],
            "eps": group["eps"],
            "maximize": group["maximize"],
        }

    def _initial_value(self, group: dict[str, Any]) -> float:
        return float(group["initial_accumulator_value"])  # of complex parameters both parts, as torch has it
