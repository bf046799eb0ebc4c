"""Rprop, one tensor at a time, as torch's documentation writes it."""

import torch
from torch import Tensor


def rprop(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-2,
    etas: tuple[float, float] = (0.5, 1.2),
    step_sizes: tuple[float, float] = (1e-6, 50),
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (step, gradient and step sizes) is updated in place."""
    state["step"] = state.get("step", torch.zeros(())) + 1
    if maximize:
        grad = -grad
    agreement = grad * state.get("prev", torch.zeros_like(param))
    factor = torch.ones_like(param)
    factor[agreement > 0], factor[agreement < 0] = etas[1], etas[0]
    state["step_size"] = (state.get("step_size", torch.full_like(param, lr)) * factor).clamp(*step_sizes)
    state["prev"] = torch.where(agreement < 0, torch.zeros_like(grad), grad)
    return param - state["prev"].sign() * state["step_size"]
