"""ADOPT, one tensor at a time, written from the paper's algorithm 2, and as an optimizer (torch has none)."""

import math

import torch
from torch import Tensor

from reference.as_optimizer import AsOptimizer


def adopt(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.9999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    clip: bool = True,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (step and means, in the computing dtype) is updated in place."""
    beta1, beta2 = betas
    state["step"] = state.get("step", torch.zeros(())) + 1
    done = int(state["step"]) - 1
    if maximize:
        grad = -grad
    if not decoupled_weight_decay:
        grad = grad + weight_decay * param
    if done == 0:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), grad**2
        return param.clone()
    normalized = grad / state["exp_avg_sq"].sqrt().clamp(min=eps)
    bound = done**0.25 if clip else math.inf
    state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * normalized.clamp(-bound, bound)
    state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad**2
    decay = 1 - lr * weight_decay if decoupled_weight_decay else 1.0
    return param * decay - lr * state["exp_avg"]


class ADOPT(AsOptimizer):
    """The reference with the interface of torch's optimizers."""

    function = staticmethod(adopt)
