"""Checks steps on a device that is not the current one, and on a tensor of more than 2^31 elements."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import optim

from . import steps
from .findings import Finding

BLOCK = 256  # elements that share one scale of 8-bit states
COMPRESSED: dict[str, Any] = {"master_bits": 24, "state_bits": 8, "min_8bit_size": 0}
STORAGES: list[tuple[str, dict[str, Any], torch.dtype]] = [
    ("fp32", {}, torch.float32),
    ("compressed", COMPRESSED, torch.bfloat16),
]


def run_second(device: torch.device, is_dry: bool) -> Iterator[Finding]:
    what = "a step on the second device, while the first is the current one"
    if not is_dry and torch.cuda.device_count() < 2:
        yield Finding(what, None, "this machine has one GPU")
        return
    for name, options, dtype in STORAGES:
        sides = []
        for where in ("cpu", "cpu" if is_dry else "cuda:1"):
            torch.manual_seed(0)
            param = nn.Parameter(torch.randn(1000, 77).to(dtype).to(where))
            param.grad = torch.randn(1000, 77).to(dtype).to(where)
            optimizer = optim.AdamW([param], max_grad_norm=1.0, **options)
            optimizer.step()
            sides.append(optimizer)
        wrong = steps._first_difference(*sides)
        yield Finding(f"{what}, {name}", not wrong, wrong or "the CPU's bits")
    if not is_dry:
        yield Finding("the current device is as before", torch.cuda.current_device() == device.index)


def run_huge(device: torch.device, is_dry: bool) -> Iterator[Finding]:
    """Compares windows of a huge tensor with a small tensor of equal values, as each block steps independently."""
    boundary = 1 << 12 if is_dry else 1 << 31
    numel = boundary + 5 * BLOCK + 77
    windows = [(0, 2 * BLOCK), (boundary - BLOCK, boundary + BLOCK), (boundary + 4 * BLOCK, numel)]
    for name, options, dtype in STORAGES:
        what = f"AdamW {name} on {numel:,} elements"
        if not is_dry and torch.cuda.mem_get_info(device)[0] < 1.1 * numel * (16 if not options else 8):
            yield Finding(what, None, "the GPU has too little memory left")
            continue
        yield Finding(what, *_huge_step(numel, windows, options, dtype, device))
        if not is_dry:
            torch.cuda.empty_cache()


def _huge_step(
    numel: int, windows: list[tuple[int, int]], options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[bool, str]:
    sizes = [end - begin for begin, end in windows]
    torch.manual_seed(0)
    values, grads = (torch.randn(sum(sizes)).to(dtype).to(device) for _ in range(2))
    huge = nn.Parameter(torch.full((numel,), 0.5, dtype=dtype, device=device))
    huge.grad = torch.full((numel,), 0.25, dtype=dtype, device=device)
    for (begin, end), value, grad in zip(windows, torch.split(values, sizes), torch.split(grads, sizes), strict=True):
        huge.data[begin:end] = value
        huge.grad[begin:end] = grad
    small = nn.Parameter(values.clone())
    small.grad = grads.clone()
    for param in (huge, small):
        optimizer = optim.AdamW([param], lr=1e-2, **options)
        for _ in range(2):
            optimizer.step()
        del optimizer
    found = torch.cat([huge.data[begin:end] for begin, end in windows])
    rest = huge.data[windows[0][1] + BLOCK : windows[0][1] + 2 * BLOCK]
    is_same = _same(found, small.data)
    has_moved = bool((rest != 0.5).all()) and bool((huge.data[numel // 2 : numel // 2 + BLOCK] != 0.5).all())
    return is_same and has_moved, "windows as in a small tensor" if is_same else "other bits than in a small tensor"


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(steps._bytes(a), steps._bytes(b))
