"""NAdam, one tensor at a time, as torch's documentation writes it."""

import torch
from torch import Tensor

from .adam import advance_moments


def nadam(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (step, product of the momenta, moments) is updated in place.

    The product is float32, as torch keeps it, and the moments are in the computing dtype.
    """
    beta1, beta2 = betas
    if maximize:
        grad = -grad
    if decoupled_weight_decay:
        param = param * (1 - lr * weight_decay)
    else:
        grad = grad + weight_decay * param
    step = advance_moments(state, grad, betas)
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (at * momentum_decay)) for at in (step, step + 1))
    state["mu_product"] = state.get("mu_product", torch.ones(())) * mu
    product = state["mu_product"].item()
    update = (1 - mu) / (1 - product) * grad + mu_next / (1 - product * mu_next) * state["exp_avg"]
    return param - lr * update / ((state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + eps)
