"""Computes the roofline of a step: the time that its traffic with memory takes at this process's bandwidth."""

import time
from typing import Any

import torch
from torch import Tensor

from .measure import Row


def least_bytes(
    params: list[Tensor], optimizer: Any, *, param_passes: int = 2, state_passes: int = 2, grad_passes: int = 1
) -> int:
    """Returns the bytes that a step must move.

    Args:
        params: Parameters with gradients that the optimizer has stepped.
        optimizer: Has a `state`, as torch's classes do. Step counters are excluded.
        param_passes: Reads and writes of each parameter together, 2 for a plain step.
        state_passes: Reads and writes of each state together, 2 for a plain step.
        grad_passes: Reads and writes of each gradient together, 1 for a plain step.
    """
    states = [t for param in params for name, t in optimizer.state[param].items() if name != "step"]
    param_bytes: int = sum(p.nbytes for p in params)
    state_bytes: int = sum(t.nbytes for t in states)
    grad_bytes: int = sum(p.grad.nbytes for p in params if p.grad is not None)
    return param_passes * param_bytes + state_passes * state_bytes + grad_passes * grad_bytes


def bandwidth(rounds: int = 9) -> float:
    """Returns the bytes per second of the fastest of `rounds` in-place triads, on torch's number of threads.

    A triad reads two arrays of 128 MiB and writes one of them, which is close to a step's share of writes.
    """
    a, b = torch.zeros(1 << 25), torch.ones(1 << 25)
    fastest = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        a.add_(b, alpha=1e-9)
        fastest = min(fastest, time.perf_counter() - begin)
    return 3 * a.nbytes / fastest


def with_roofline(row: Row, num_bytes: int) -> Row:
    """Returns the row, in ms, with the time that moving that many bytes takes now."""
    row.roofline = num_bytes / bandwidth() * 1e3
    return row
