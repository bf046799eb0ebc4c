"""Checks a DDP that was constructed on a side stream, with backward kernels that write gradients late."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import drivetrain
from drivetrain.bench.ranks import on_ranks

from .findings import Finding

SLEEP_CYCLES = 3_000_000  # one or two milliseconds
REPETITIONS = 5
NUM_LAYERS, WIDTH = 15, 256
TOLERANCE = 0.02  # relative to a gradient's norm, for bfloat16 sums
CASES = [  # dtype, bits of main gradients, fused weight gradients
    (torch.float32, None, False),
    (torch.float32, None, True),
    (torch.bfloat16, 32, False),
    (torch.bfloat16, 32, True),
    (torch.bfloat16, 24, False),
    (torch.bfloat16, 24, True),
]


class Late(torch.autograd.Function):
    """Keeps the device busy in backward before the previous layer's gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if grads[0].is_cuda:
            torch.cuda._sleep(SLEEP_CYCLES)
        return grads[0]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + Late.apply(layer(x))  # type: ignore[no-untyped-call]
        return x.float().square().mean()


def run(device: torch.device, is_dry: bool) -> Iterator[Finding]:
    """Runs all cases in one process."""
    counts = on_ranks(functools.partial(_all_cases, device.type), count=1, backend="gloo" if is_dry else "nccl")
    for (dtype, bits, fuses), wrong in zip(CASES, counts, strict=True):
        name = str(dtype).removeprefix("torch.")
        main = "no main gradients" if bits is None else f"main gradients of {bits} bits"
        what = f"DDP built on a side stream: {name}, {main}, fuse_wgrad {'on' if fuses else 'off'}"
        yield Finding(what, wrong == 0, f"{wrong} of {REPETITIONS * NUM_LAYERS} gradients wrong")


def _all_cases(device_type: str) -> list[int]:
    return [_num_wrong(device_type, dtype, bits, fuses) for dtype, bits, fuses in CASES]


def _num_wrong(device_type: str, dtype: torch.dtype, bits: int | None, fuses: bool) -> int:
    torch.manual_seed(0)
    device = torch.device(device_type)
    reference, model = Chain().to(device), Chain().to(device)
    model.load_state_dict(reference.state_dict())
    x = torch.randn(64, WIDTH, device=device)
    model.to(dtype)
    if fuses:
        drivetrain.fuse_wgrad(model)
    if bits is not None:
        drivetrain.main_grads(model, bits)
    if device.type == "cuda":
        torch.cuda.synchronize()
    with torch.Stream(device) if device.type == "cuda" else contextlib.nullcontext():
        wrapped = drivetrain.DistributedDataParallel(model)
    if device.type == "cuda":
        torch.cuda.synchronize()
    wrong = 0
    reference(x).backward()
    for _ in range(REPETITIONS):
        wrapped.zero_grad()
        wrapped(x.to(dtype)).backward()
        # An optimizer on the training stream would read them like this, without a wait of the host.
        found = [param.grad.float() for param in model.parameters() if param.grad is not None]
        for param, grad in zip(reference.parameters(), found, strict=True):
            assert param.grad is not None
            error = (grad - param.grad).norm() / param.grad.norm()
            wrong += not error.item() <= (TOLERANCE if dtype == torch.bfloat16 else 1e-4)
    return wrong
