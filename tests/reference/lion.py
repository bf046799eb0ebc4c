"""Lion, one tensor at a time, written from the paper's algorithm 2, and as an optimizer (torch has none)."""

import torch
from torch import Tensor

from reference.as_optimizer import AsOptimizer


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


class Lion(AsOptimizer):
    """The reference with the interface of torch's optimizers."""

    function = staticmethod(lion)
