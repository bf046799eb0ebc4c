"""RMSprop, one tensor at a time, as torch's documentation writes it."""

import torch
from torch import Tensor


def rmsprop(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (in the computing dtype) is updated in place."""
    zeros = torch.zeros_like(param)
    state["step"] = state.get("step", torch.zeros(())) + 1
    if maximize:
        grad = -grad
    grad = grad + weight_decay * param
    variance = state["square_avg"] = alpha * state.get("square_avg", zeros) + (1 - alpha) * grad**2
    if centered:
        state["grad_avg"] = alpha * state.get("grad_avg", zeros) + (1 - alpha) * grad
        variance = variance - state["grad_avg"] ** 2
    update = grad / (variance.sqrt() + eps)
    if momentum:
        update = state["momentum_buffer"] = momentum * state.get("momentum_buffer", zeros) + update
    return param - lr * update
