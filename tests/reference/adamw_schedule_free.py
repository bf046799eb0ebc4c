"""Schedule-free AdamW, one tensor at a time, from the paper's algorithm 1, and as an optimizer (torch has none)."""

import math

import torch
from torch import Tensor

from reference.as_optimizer import AsOptimizer


def adamw_schedule_free(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 2.5e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    warmup_steps: int = 0,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
    maximize: bool = False,
) -> Tensor:
    """Returns the new y; `state` (step, scalars, z and the mean of squares) is updated in place."""
    beta1, beta2 = betas
    state["step"] = state.get("step", torch.zeros(())) + 1
    step, zero = int(state["step"]), torch.zeros((), dtype=torch.float64)
    if maximize:
        grad = -grad
    gamma = lr * min(1.0, step / max(1, warmup_steps)) * math.sqrt(1 - beta2**step)
    state["lr_max"] = state.get("lr_max", zero).clamp(min=gamma)
    weight = step**r * state["lr_max"].item() ** weight_lr_power
    state["weight_sum"] = state.get("weight_sum", zero) + weight
    share = weight / state["weight_sum"].item()
    z = state.get("z", param)
    state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", torch.zeros_like(param)) + (1 - beta2) * grad**2
    update = grad / (state["exp_avg_sq"].sqrt() + eps) + weight_decay * param
    # The average x follows from y = (1 - beta1) z + beta1 x.
    x = (param - (1 - beta1) * z) / beta1
    state["z"] = z - gamma * update
    x = (1 - share) * x + share * state["z"]
    return (1 - beta1) * state["z"] + beta1 * x


class AdamWScheduleFree(AsOptimizer):
    """The reference with the interface of torch's optimizers."""

    function = staticmethod(adamw_schedule_free)
