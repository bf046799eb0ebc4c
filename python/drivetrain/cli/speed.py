"""Measures how fast this rank computes for `drivetrain doctor`, and finds ranks that are slower than the others."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor

from drivetrain.cli.finding import Finding, passed, warn

_SIZE, _GPU_SIZE = 384, 4096
_ROUNDS = 8  # the fastest one counts, so that a moment of other work raises no alarm
_ROUND_S = 0.03  # several time slices of the scheduler, so that a round sees a program that shares the core
_SLOW = 0.6  # of the median rank's speed


def own_device() -> torch.device:
    """Returns this rank's GPU, or the CPU of a rank that sees none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def own_gpu() -> str:
    """Returns the name of this rank's GPU, such as "cuda:0"; "": it sees none."""
    device = own_device()
    return str(device) if device.type == "cuda" else ""


def flops_per_s() -> float:
    """Returns the operations per second of a matrix product: in bfloat16 on a GPU, else in float32 on all threads."""
    device = own_device()
    size, dtype = (_GPU_SIZE, torch.bfloat16) if device.type == "cuda" else (_SIZE, torch.float32)
    a, b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    torch.mm(a, b)  # the first product sets up the library
    return max(_products_per_s(a, b) for _ in range(_ROUNDS)) * 2 * size**3


def _products_per_s(a: Tensor, b: Tensor) -> float:
    start, count = perf_counter(), 0
    while (seconds := perf_counter() - start) < _ROUND_S:
        torch.mm(a, b)
        if a.is_cuda:
            torch.cuda.synchronize(a.device)
        count += 1
    return count / seconds


def slow_rank(speeds: Mapping[int, float]) -> int | None:
    """Returns the slowest rank if it is too slow compared with the median rank."""
    slow = min(speeds, key=lambda rank: speeds[rank])
    return slow if speeds[slow] < _SLOW * statistics.median_high(speeds.values()) else None


def judge(speeds: Mapping[int, float], hosts: Sequence[str]) -> Finding:
    """Turns the speeds of all ranks into a finding.

    Args:
        speeds: Operations per second of each rank.
        hosts: The host of each rank.
    """
    slow, typical = slow_rank(speeds), statistics.median_high(speeds.values())
    if slow is None:
        return passed("speed", f"{min(speeds.values()) / 1e9:.0f} to {max(speeds.values()) / 1e9:.0f} GFLOP/s per rank")
    text = (
        f"rank {slow} on {hosts[slow]} computes {speeds[slow] / 1e9:.0f} GFLOP/s, the median rank {typical / 1e9:.0f}"
    )
    cure = "look there for other programs (top, nvidia-smi), a lowered clock, fewer cores (taskset -p), or a hidden GPU"
    return warn("speed", text, cure)
