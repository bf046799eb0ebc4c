"""Measures the host time of a checkpointed region beyond its operations."""

import functools
import statistics
from collections.abc import Callable

import torch
import torch.utils.checkpoint
from rich.progress import track
from torch import Tensor, nn

from drivetrain.bench.measure import Row, interleaved, ratio_of_medians
from drivetrain.recompute import checkpoint

REGIONS = 12
TARGET = 0.5
Call = Callable[[nn.Module, Tensor], Tensor]


def run(rounds: int) -> list[Row]:
    """Returns rows of the time per region, forward and backward, beyond a step that runs each region's function twice.

    Raises:
        AssertionError: The gradients of the two sides differ.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the operations are too small for a second thread
    try:
        return [_measure(dropout, rounds) for dropout in track((0.0, 0.1), description="regions", transient=True)]
    finally:
        torch.set_num_threads(before)


def _measure(dropout: float, rounds: int) -> Row:
    torch.manual_seed(0)
    blocks = [_block(dropout) for _ in range(REGIONS)]
    x = torch.randn(4, 16, requires_grad=True)
    theirs = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    calls: tuple[Call, ...] = (_twice, theirs, checkpoint)
    steps = [functools.partial(_step, call, blocks, x) for call in calls]
    if not torch.equal(steps[1](), steps[2]()):
        raise AssertionError(f"gradients differ with a dropout of {dropout}")
    twice, torch_s, ours_s = interleaved(steps, 10 * rounds)
    torch_us, our_us = (
        [1e6 * (a - b) / REGIONS for a, b in zip(times, twice, strict=True)] for times in (torch_s, ours_s)
    )
    ratio, low, high = ratio_of_medians(torch_us, our_us)
    medians = statistics.median(torch_us), statistics.median(our_us)
    what = f"a region {'with' if dropout else 'without'} random numbers: host time beyond its operations"
    return Row(what, "us", *medians, ratio, low, high, f"<= {TARGET:g}", ratio <= TARGET)


def _block(dropout: float) -> nn.Module:
    """Makes a block so small that the host's time dominates."""
    layers: list[nn.Module] = [nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)]
    return nn.Sequential(*layers, nn.Dropout(dropout)) if dropout else nn.Sequential(*layers)


def _twice(block: nn.Module, x: Tensor) -> Tensor:
    block(x)
    result: Tensor = block(x)
    return result


def _step(call: Call, blocks: list[nn.Module], x: Tensor) -> Tensor:
    torch.manual_seed(1)
    y = x
    for block in blocks:
        y = call(block, y)
    return torch.autograd.grad(y.sum(), x)[0]
