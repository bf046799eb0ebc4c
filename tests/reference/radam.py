"""RAdam, one tensor at a time, as torch's documentation writes it."""

import math

from torch import Tensor

from .adam import advance_moments


def radam(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (step and moments, in the computing dtype) is updated in place."""
    beta1, beta2 = betas
    if maximize:
        grad = -grad
    if decoupled_weight_decay:
        param = param * (1 - lr * weight_decay)
    else:
        grad = grad + weight_decay * param
    step = advance_moments(state, grad, betas)
    corrected = state["exp_avg"] / (1 - beta1**step)
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * step * beta2**step / (1 - beta2**step)
    if length <= 5:
        return param - lr * corrected
    rectification = math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
    return param - lr * rectification * corrected * math.sqrt(1 - beta2**step) / (state["exp_avg_sq"].sqrt() + eps)
