"""Adamax, one tensor at a time, as torch's documentation writes it."""

import torch
from torch import Tensor


def adamax(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (step, mean and norm, in the computing dtype) is updated in place."""
    beta1, beta2 = betas
    zeros = torch.zeros_like(param)
    state["step"] = state.get("step", torch.zeros(())) + 1
    if maximize:
        grad = -grad
    grad = grad + weight_decay * param
    state["exp_avg"] = beta1 * state.get("exp_avg", zeros) + (1 - beta1) * grad
    state["exp_inf"] = torch.maximum(beta2 * state.get("exp_inf", zeros), grad.abs() + eps)
    return param - lr / (1 - beta1 ** int(state["step"])) * state["exp_avg"] / state["exp_inf"]
