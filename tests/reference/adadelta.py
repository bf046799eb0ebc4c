"""Adadelta, one tensor at a time, as torch's documentation writes it."""

import torch
from torch import Tensor


def adadelta(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (step and both means, in the computing dtype) is updated in place."""
    zeros = torch.zeros_like(param)
    state["step"] = state.get("step", torch.zeros(())) + 1
    if maximize:
        grad = -grad
    grad = grad + weight_decay * param
    state["square_avg"] = rho * state.get("square_avg", zeros) + (1 - rho) * grad**2
    before = state.get("acc_delta", zeros)
    delta = (before + eps).sqrt() / (state["square_avg"] + eps).sqrt() * grad
    state["acc_delta"] = rho * before + (1 - rho) * delta**2
    return param - lr * delta
