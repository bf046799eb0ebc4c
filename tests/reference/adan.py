"""Adan, one tensor at a time, written from the paper's algorithm 1, and as an optimizer (torch has none)."""

import torch
from torch import Tensor

from reference.as_optimizer import AsOptimizer


def adan(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    no_prox: bool = False,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (step, means and gradient, in the computing dtype) is updated in place."""
    beta1, beta2, beta3 = betas
    state["step"] = state.get("step", torch.zeros(())) + 1
    step = int(state["step"])
    if maximize:
        grad = -grad
    diff = grad - state["prev_grad"] if step > 1 else torch.zeros_like(grad)
    state["prev_grad"] = grad.clone()
    means = {"exp_avg": (beta1, grad), "exp_avg_diff": (beta2, diff), "exp_avg_sq": (beta3, (grad + beta2 * diff) ** 2)}
    for name, (beta, value) in means.items():
        state[name] = beta * state.get(name, torch.zeros_like(param)) + (1 - beta) * value
    m, v, n = (state[name] / (1 - beta**step) for name, (beta, _) in means.items())
    update = lr * (m + beta2 * v) / (n.sqrt() + eps)
    if no_prox:
        return param * (1 - lr * weight_decay) - update
    return (param - update) / (1 + lr * weight_decay)


class Adan(AsOptimizer):
    """The reference with the interface of torch's optimizers."""

    function = staticmethod(adan)
