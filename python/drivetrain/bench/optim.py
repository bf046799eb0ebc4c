"""The AdamW step, and the whole tail of a training step, against torch's fused ones."""

from collections.abc import Callable

import torch
from rich.progress import track
from torch import Tensor

from .. import optim
from ..amp import GradScaler
from .measure import Row, interleaved, ratio_row
from .shapes import Shape, gpt2_124m, many_small, resnet50

# what, shapes, target for the ratio, whether the interval's upper end must reach it
CASES = (
    ("AdamW fp32, GPT-2 124M", gpt2_124m(), 1.03, True),
    ("AdamW fp32, ResNet-50", resnet50(), 0.85, False),
    ("AdamW fp32, 10,000 x 64", many_small(), 0.05, False),
)

# The same for unscaling, clipping, AdamW and zeroing.
TAILS = (
    ("unscale, clip, AdamW, zero fp32, GPT-2 124M", gpt2_124m(), 1 / 1.6),
    ("unscale, clip, AdamW, zero fp32, ResNet-50", resnet50(), 1 / 2.1),
)
MAX_NORM = 1.0
SCALE = 2.0**10


def run(threads: int, rounds: int) -> list[Row]:
    """One row per model; the two optimizers' parameters must agree afterwards, or this raises."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = [
            _measure(what, shapes, target, strict_end, rounds)
            for what, shapes, target, strict_end in track(CASES, description="optimizers", transient=True)
        ]
        for what, shapes, target in track(TAILS, description="tails of a step", transient=True):
            rows.append(_measure_tail(what, shapes, target, rounds))
        return rows
    finally:
        torch.set_num_threads(before)


def _measure(what: str, shapes: list[Shape], target: float, strict_end: bool, rounds: int) -> Row:
    theirs, ours = _models(shapes)
    steps = torch.optim.AdamW(theirs, fused=True).step, optim.AdamW(ours).step
    torch_s, ours_s = interleaved(steps, rounds)
    _check(theirs, ours)
    return ratio_row(what, torch_s, ours_s, target, strict_end=strict_end)


def _measure_tail(what: str, shapes: list[Shape], target: float, rounds: int) -> Row:
    theirs, ours = _models(shapes)
    scaled = [_grad(p) * SCALE for p in theirs]
    tails = _torch_tail(theirs), _our_tail(ours)

    def fill(which: int) -> None:
        torch._foreach_copy_([_grad(p) for p in (theirs, ours)[which]], scaled)

    torch_s, ours_s = interleaved(tails, rounds, prepare=fill)
    _check(theirs, ours)
    return ratio_row(what, torch_s, ours_s, target, strict_end=False)


def _torch_tail(params: list[Tensor]) -> Callable[[], None]:
    optimizer, scaler = torch.optim.AdamW(params, fused=True), _ready(torch.amp.GradScaler("cpu", SCALE))

    def tail() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)

    return tail


def _our_tail(params: list[Tensor]) -> Callable[[], None]:
    optimizer = optim.AdamW(params, max_grad_norm=MAX_NORM, zero_grads_in_step=True)
    scaler = _ready(GradScaler("cpu", SCALE))

    def tail() -> None:
        scaler.step(optimizer)
        scaler.update()

    return tail


def _ready(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    scaler.scale(torch.zeros(()))  # makes its tensors
    return scaler


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _models(shapes: list[Shape]) -> tuple[list[Tensor], list[Tensor]]:
    """The same parameters and gradients twice."""
    torch.manual_seed(0)
    theirs = [torch.randn(shape).mul_(0.02).requires_grad_() for shape in shapes]
    ours = [p.detach().clone().requires_grad_() for p in theirs]
    for a, b in zip(theirs, ours, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    return theirs, ours


def _check(theirs: list[Tensor], ours: list[Tensor]) -> None:
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
