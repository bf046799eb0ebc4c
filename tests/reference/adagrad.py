"""Adagrad, one tensor at a time, as torch's documentation writes it."""

import torch
from torch import Tensor


def adagrad(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (step and sum, in the computing dtype) is updated in place."""
    state["step"] = state.get("step", torch.zeros(())) + 1
    if maximize:
        grad = -grad
    grad = grad + weight_decay * param
    state["sum"] = state.get("sum", torch.full_like(param, initial_accumulator_value)) + grad**2
    return param - lr / (1 + (int(state["step"]) - 1) * lr_decay) * grad / (state["sum"].sqrt() + eps)
