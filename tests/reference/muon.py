"""Muon, one matrix at a time: momentum, Newton-Schulz in the matrix's own precision, step."""

import math

import torch
from torch import Tensor


def muon(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> Tensor:
    """Returns the new parameter; `state` (the momentum) is updated in place."""
    buffer = state.get("momentum_buffer", torch.zeros_like(param))
    state["momentum_buffer"] = buffer = momentum * buffer + (1 - momentum) * grad
    x = (1 - momentum) * grad + momentum * buffer if nesterov else buffer
    x = x / max(x.norm().item(), eps)
    a, b, c = ns_coefficients
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    rows, columns = param.shape
    adjust = 0.2 * math.sqrt(max(rows, columns)) if adjust_lr_fn else math.sqrt(max(1, rows / columns))
    return param * (1 - lr * weight_decay) - lr * adjust * x
