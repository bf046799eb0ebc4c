"""Counts how often the host waits for the device in a training step: drivetrain must not wait more than torch."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import drivetrain
from drivetrain import optim
from drivetrain.bench.ranks import on_ranks

from .findings import Finding

WARM_UP = 6  # steps; drivetrain plans its buckets again after four
WIDTH = 64


class Layers(nn.Module):
    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: 5 if self.skips else 6]:
            x = torch.tanh(layer(x))
        return x.square().mean()


def run(device: torch.device, is_dry: bool) -> Iterator[Finding]:
    counts = on_ranks(functools.partial(_counts, device.type), count=1, backend="gloo" if is_dry else "nccl")
    for what, (theirs, ours) in counts.items():
        seen = f"{ours} waits, torch {'has no such' if theirs is None else theirs}"
        yield Finding(what, ours <= (theirs or 0), seen)


def _counts(device_type: str) -> dict[str, tuple[int | None, int]]:
    device = torch.device(device_type)
    x = torch.randn(32, WIDTH, device=device)
    found: dict[str, tuple[int | None, int]] = {}
    under_ddp: list[tuple[str, bool, dict[str, Any]]] = [
        ("a step under DDP", False, {}),
        ("find_unused_parameters, all used", False, {"find_unused_parameters": True}),
        ("find_unused_parameters, one layer unused", True, {"find_unused_parameters": True}),
    ]
    engines: list[Any] = [
        (nn.parallel.DistributedDataParallel, torch.optim.AdamW),
        (drivetrain.DistributedDataParallel, optim.AdamW),
    ]
    for what, skips, options in under_ddp:
        sides = []
        for wrap, make in engines:
            model = wrap(Layers(skips).to(device), **options)
            sides.append(_waits(functools.partial(_step, model, make(model.parameters()), x)))
        found[what] = (sides[0], sides[1])
    model = drivetrain.DistributedDataParallel(Layers().to(device))
    optimizer: Any = optim.AdamW(model.parameters())
    found["model.backward(loss, weight=...)"] = (None, _waits(functools.partial(_weighted, model, optimizer, x)))
    optimizer.zero_grad()
    found["a window of accumulate, 2 micro-batches"] = (None, _waits(functools.partial(_window, model, optimizer, x)))
    firsts: list[tuple[str, Any, dict[str, Any]]] = [
        ("AdamW with 8-bit states", optim.AdamW, {"state_bits": 8, "master_bits": 24, "min_8bit_size": 0}),
        ("Muon with remainders", optim.Muon, {"master_bits": 32}),
        ("Adafactor with remainders", optim.Adafactor, {"master_bits": 32}),
        ("AdamW that clips and zeroes", optim.AdamW, {"max_grad_norm": 1.0, "zero_grads_in_step": True}),
    ]
    for what, make, options in firsts:
        dtype = torch.bfloat16 if "master_bits" in options else torch.float32
        params = [nn.Parameter(torch.randn(WIDTH, WIDTH, device=device).to(dtype)) for _ in range(4)]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = make(params, **options)
        found[f"the first step of {what}"] = (None, _waits(optimizer.step, warm_up=0))
    return found


def _step(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).backward()
    optimizer.step()


def _weighted(model: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model.backward(model(x), weight=32)
    optimizer.step()


def _window(model: Any, optimizer: Any, x: Tensor) -> None:
    with drivetrain.accumulate(model, optimizer, steps=2) as window:
        for _ in range(2):
            window.backward(model(x), weight=32)


def _waits(step: Callable[[], object], warm_up: int = WARM_UP) -> int:
    """Counts waits in one call after some uncounted calls. On the CPU the count is 0."""
    for _ in range(warm_up):
        step()
    with _counting() as caught:
        step()
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


@contextlib.contextmanager
def _counting() -> Iterator[list[warnings.WarningMessage]]:
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if has_cuda:
                torch.cuda.set_sync_debug_mode("warn")
            yield caught
        finally:
            if has_cuda:
                torch.cuda.set_sync_debug_mode("default")
