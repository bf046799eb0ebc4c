"""Adafactor, one tensor at a time, written from the paper's algorithm 4 with torch's places for both epsilons."""

import torch
from torch import Tensor


def adafactor(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float, float] = (torch.finfo(torch.float32).eps, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Tensor:
    """Returns the new parameter; `state` (step and second moments, in the computing dtype) is updated in place."""
    state["step"] = state.get("step", torch.zeros(())) + 1
    step = int(state["step"])
    beta2 = 1 - step**beta2_decay
    squares = grad**2

    def mean(name: str, now: Tensor) -> Tensor:
        state[name] = beta2 * state.get(name, torch.zeros_like(now)) + (1 - beta2) * now
        return state[name]

    def rms(values: Tensor) -> float:
        return values.square().mean().sqrt().item()

    if grad.dim() > 1:
        rows = mean("row_var", squares.mean(-1, keepdim=True))
        columns = mean("col_var", squares.mean(-2, keepdim=True))
        variance = rows * columns / rows.mean(-2, keepdim=True).clamp(min=eps[0])
    else:
        variance = mean("variance", squares)
    update = (-grad if maximize else grad) / variance.clamp(min=eps[0] ** 2).sqrt()
    size = max(eps[1], rms(param)) * min(lr, step**-0.5) / max(1.0, rms(update) / d)
    return param * (1 - lr * weight_decay) - size * update
