"""Adam and AdamW, one tensor at a time, written from the papers' pseudo code."""

import math

import torch
from torch import Tensor


def advance_moments(
    state: dict[str, Tensor], grad: Tensor, betas: tuple[float, float], gradient_share: float | None = None
) -> int:
    """Counts the step and updates both means with the gradient; returns the step's number."""
    beta1, beta2 = betas
    state["step"] = state.get("step", torch.zeros(())) + 1
    zeros = torch.zeros_like(grad)
    share = 1 - beta1 if gradient_share is None else gradient_share
    state["exp_avg"] = beta1 * state.get("exp_avg", zeros) + share * grad
    state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", zeros) + (1 - beta2) * grad**2
    return int(state["step"])


def adam(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (step and moments, in the computing dtype) is updated in place."""
    beta1, beta2 = betas
    if maximize:
        grad = -grad
    if decoupled:
        param = param * (1 - lr * weight_decay)
    else:
        grad = grad + weight_decay * param
    step = advance_moments(state, grad, betas)
    second_moment = state["exp_avg_sq"]
    if amsgrad:
        largest = state.get("max_exp_avg_sq", torch.zeros_like(param))
        second_moment = state["max_exp_avg_sq"] = torch.maximum(largest, second_moment)
    denominator = second_moment.sqrt() / math.sqrt(1 - beta2**step) + eps
    return param - lr / (1 - beta1**step) * state["exp_avg"] / denominator
