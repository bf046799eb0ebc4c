"""Knows the optimizers whose first steps take other memory than later ones."""

from __future__ import annotations

import math

import torch

_MOST = 100  # steps that a plan traces for one of them


def steps_until_settled(optimizer: torch.optim.Optimizer) -> int:
    """Returns the number of steps after which all steps of an optimizer allocate the same."""
    if isinstance(optimizer, torch.optim.LBFGS):  # its history grows with each evaluation but the first
        group = optimizer.param_groups[0]
        each: int = max(1, min(group["max_iter"], group["max_eval"]))
        return int(min(_MOST, 1 + math.ceil((group["history_size"] + 1) / each)))
    if isinstance(optimizer, torch.optim.RAdam):
        return min(_MOST, max((_until_rectified(group["betas"][1]) for group in optimizer.param_groups), default=1))
    return 1


def _until_rectified(beta: float) -> int:
    """Returns the first step of RAdam at which it divides by the second moment."""
    longest = 2 / (1 - beta) - 1
    for step in range(1, _MOST):
        if longest - 2 * step * beta**step / (1 - beta**step) > 5:
            return step
    return 1
