"""Measures the host time of steps on a GPU, and the device time of a step over many small parameters."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import DistributedDataParallel, optim
from drivetrain.bench.measure import Row, median_interval, small_collections
from drivetrain.bench.optim import models
from drivetrain.bench.ranks import BACKENDS, on_ranks
from drivetrain.bench.shapes import Shape, gpt2_124m, many_small

from .activation_models import GPT

REPLAYS = 20  # of a captured CUDA graph between two events


def run(device: torch.device, rounds: int, is_dry: bool) -> Iterator[Row]:
    small: list[Shape] = [(33, 8), (8,), (1,)]
    for what, shapes in (("148 tensors", gpt2_124m()), ("10,000 x 64", many_small())):
        theirs, ours = models(small if is_dry else shapes, device=device)
        sides = [torch.optim.AdamW(theirs, fused=True), optim.AdamW(ours)]
        seconds = [_host_seconds(each.step, min(rounds, 20), device) for each in sides]
        ratio, low, high = median_interval([b / a for a, b in zip(*seconds, strict=True)])
        medians = [1e3 * statistics.median(each) for each in seconds]
        yield Row(f"AdamW fp32, {what}: host time of a step", "ms", medians[0], medians[1], ratio, low, high)
        if device.type == "cuda" and what.startswith("10,000"):
            micro = [1e6 * _device_seconds(make, device) for make in (_torch_capturable, optim.AdamW)]
            yield Row(f"AdamW fp32, {what}: device time of a step", "us", micro[0], micro[1], micro[1] / micro[0])
        del theirs, ours, sides
    measure = functools.partial(_ddp_seconds, device.type, min(rounds, 30), is_dry)
    plain, theirs_s, ours_s = on_ranks(measure, count=1, backend=BACKENDS[device.type])
    for name, wrapped in (("torch's DDP", theirs_s), ("our DDP", ours_s)):
        what = f"a tiny GPT of 148 tensors, one rank: no DDP | {name}"
        ratio, low, high = median_interval([b / a for a, b in zip(plain, wrapped, strict=True)])
        yield Row(what, "ms", 1e3 * statistics.median(plain), 1e3 * statistics.median(wrapped), ratio, low, high)


def _torch_capturable(params: list[Tensor]) -> Any:
    return torch.optim.AdamW(params, fused=True, capturable=True)


def _host_seconds(call: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    """Times each call until it returns, on an idle device."""
    for _ in range(3):
        call()
    found = []
    with small_collections():
        for _ in range(max(rounds, 3)):
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
    return found


def _device_seconds(make: Callable[[list[Tensor]], Any], device: torch.device) -> float:
    """Returns the device time of a step in a CUDA graph, which excludes the host's launches."""
    params = models(many_small(), device=device)[0]
    optimizer = make(params)
    with torch.Stream(device):
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    events = [torch.Event(device, enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(REPLAYS):
        graph.replay()
    events[1].record()
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) / 1e3 / REPLAYS


def _ddp_seconds(device_type: str, rounds: int, is_dry: bool) -> list[list[float]]:
    """Times steps of a small model without a wrapper, under torch's DDP and under ours."""
    device = torch.device(device_type)
    sizes = {"depth": 2, "dim": 32, "heads": 2, "length": 16} if is_dry else {"dim": 64, "heads": 2, "length": 64}
    wrappers: list[Callable[[nn.Module], nn.Module]] = [
        lambda model: model,
        nn.parallel.DistributedDataParallel,
        DistributedDataParallel,
    ]
    steps = []
    for wrap in wrappers:
        torch.manual_seed(0)
        model = wrap(GPT(**sizes, dropout=0.0, vocabulary=64).to(device))
        tokens, targets = torch.randint(64, (2, 4, sizes["length"]), device=device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        steps.append(functools.partial(_step, model, optimizer, tokens, targets, device))
    for _ in range(6):
        for step in steps:
            step()
    found: list[list[float]] = [[] for _ in steps]
    with small_collections():
        for _ in range(max(rounds, 3)):
            for seconds, step in zip(found, steps, strict=True):
                begin = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - begin)
    return found


def _step(model: nn.Module, optimizer: Any, tokens: Tensor, targets: Tensor, device: torch.device) -> None:
    model(tokens, targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()
