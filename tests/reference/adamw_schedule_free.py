"""Schedule-free AdamW, one tensor at a time, from the paper's algorithm 1, and as an optimizer (torch has none)."""

import math
from typing import Any

import torch
from torch import Tensor


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


class AdamWScheduleFree(torch.optim.Optimizer):
    """The reference with the interface of torch's optimizers."""

    def __init__(self, params: Any, lr: float = 2.5e-3, **options: Any) -> None:
        defaults = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "warmup_steps": 0, "r": 0.0}
        super().__init__(params, {"lr": lr, **defaults, "weight_lr_power": 2.0, "maximize": False, **options})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name not in ("params", "train_mode")}
            for param in group["params"]:
                if param.grad is not None:
                    param.copy_(adamw_schedule_free(param, param.grad, self.state[param], **options))
