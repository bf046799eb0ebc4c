"""Adam and AdamW: torch's classes with the native step."""

from typing import Any

import torch
from torch import Tensor

from .base import FusedOptimizer, learning_rate


class Adam(FusedOptimizer, torch.optim.Adam):
    """torch.optim.Adam, constructor and state included, stepped in one pass over all parameters.

    Takes float32, float64, bfloat16, float16 and complex parameters, on the CPU and on CUDA devices; arithmetic is
    in float32 (float64 for float64 parameters). 16-bit parameters may have float32 gradients (`grad_dtype`) and
    keep their state in their own dtype, as torch does. `foreach` and `fused` are accepted and change nothing.

    Source: Kingma & Ba 2015, algorithm 1; AMSGrad after Reddi et al. 2018, in torch's form.

    Raises:
        NotImplementedError: `differentiable=True`.
        ValueError: as torch, for hyper-parameters out of range.
    """

    def _rule(self, group: dict[str, Any]) -> str:
        return "adam_amsgrad" if group["amsgrad"] else "adam"

    def _hypers(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
        beta1, beta2 = group["betas"]
        return {
            "lr": learning_rate(group),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "decoupled_weight_decay": group["decoupled_weight_decay"],
            "maximize": group["maximize"],
        }


class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW, constructor and state included, stepped in one pass over all parameters.

    As :class:`Adam`, with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2).

    Raises:
        NotImplementedError: `differentiable=True`.
        ValueError: as torch, for hyper-parameters out of range.
    """
