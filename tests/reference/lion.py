"""Lion, one tensor at a time, written from the paper's algorithm 2, and as an optimizer (torch has none)."""

from typing import Any

import torch
from torch import Tensor


def lion(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (the momentum, in the computing dtype) is updated in place."""
    beta1, beta2 = betas
    if maximize:
        grad = -grad
    exp_avg = state.get("exp_avg", torch.zeros_like(param))
    update = torch.sign(beta1 * exp_avg + (1 - beta1) * grad)
    state["exp_avg"] = beta2 * exp_avg + (1 - beta2) * grad
    return param * (1 - lr * weight_decay) - lr * update


class Lion(torch.optim.Optimizer):
    """The reference with the interface of torch's optimizers."""

    def __init__(self, params: Any, lr: float = 1e-4, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False} | options)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            for param in group["params"]:
                if param.grad is not None:
                    param.copy_(lion(param, param.grad, self.state[param], **options))
