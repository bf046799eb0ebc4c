"""LAMB, one tensor at a time, written from the paper's algorithm 2, and as an optimizer (torch has none)."""

from typing import Any

import torch
from torch import Tensor

from reference.adam import advance_moments


def lamb(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    always_adapt: bool = False,
    trust_clip: bool = False,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (step and moments, in the computing dtype) is updated in place."""
    beta1, beta2 = betas
    step = advance_moments(state, -grad if maximize else grad, betas, None if grad_averaging else 1)
    mean, mean_sq = state["exp_avg"], state["exp_avg_sq"]
    if bias_correction:
        mean, mean_sq = mean / (1 - beta1**step), mean_sq / (1 - beta2**step)
    direction = mean / (mean_sq.sqrt() + eps) + weight_decay * param
    param_norm, direction_norm = param.norm().item(), direction.norm().item()
    ratio = 1.0
    if (weight_decay != 0 or always_adapt) and param_norm > 0 and direction_norm > 0:
        ratio = param_norm / direction_norm
    if trust_clip:
        ratio = min(ratio, 1.0)
    return param - lr * ratio * direction


class LAMB(torch.optim.Optimizer):
    """The reference with the interface of torch's optimizers."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        defaults = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "maximize": False}
        flags = {"bias_correction": True, "grad_averaging": True, "always_adapt": False, "trust_clip": False}
        super().__init__(params, {"lr": lr, **defaults, **flags, **options})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
            for param in group["params"]:
                if param.grad is not None:
                    param.copy_(lamb(param, param.grad, self.state[param], **options))
