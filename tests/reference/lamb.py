"""LAMB, one tensor at a time, written from the paper's algorithm 2, and as an optimizer (torch has none)."""

import torch
from torch import Tensor

from reference.as_optimizer import AsOptimizer


def lamb(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    always_adapt: bool = False,
    trust_clip: bool = False,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (step and moments, in the computing dtype) is updated in place."""
    beta1, beta2 = betas
    if maximize:
        grad = -grad
    state["step"] = state.get("step", torch.zeros(())) + 1
    step, zeros = int(state["step"]), torch.zeros_like(grad)
    mean = state["exp_avg"] = beta1 * state.get("exp_avg", zeros) + (1 - beta1 if grad_averaging else 1) * grad
    mean_sq = state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", zeros) + (1 - beta2) * grad**2
    if bias_correction:
        mean, mean_sq = mean / (1 - beta1**step), mean_sq / (1 - beta2**step)
    direction = mean / (mean_sq.sqrt() + eps) + weight_decay * param
    param_norm, direction_norm = param.norm().item(), direction.norm().item()
    ratio = 1.0
    if (weight_decay != 0 or always_adapt) and param_norm > 0 and direction_norm > 0:
        ratio = param_norm / direction_norm
    if trust_clip:
        ratio = min(ratio, 1.0)
    return param - lr * ratio * direction


class LAMB(AsOptimizer):
    """The reference with the interface of torch's optimizers."""

    function = staticmethod(lamb)
