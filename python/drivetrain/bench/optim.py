"""The AdamW step against torch's fused one."""

import torch
from rich.progress import track

from .. import optim
from .measure import Row, interleaved, ratio_row
from .shapes import Shape, gpt2_124m, many_small, resnet50

# what, shapes, target for the ratio, whether the interval's upper end must reach it
CASES = (
    ("AdamW fp32, GPT-2 124M", gpt2_124m(), 1.03, True),
    ("AdamW fp32, ResNet-50", resnet50(), 0.85, False),
    ("AdamW fp32, 10,000 x 64", many_small(), 0.05, False),
)


def run(threads: int, rounds: int) -> list[Row]:
    """One row per model; the two optimizers' parameters must agree afterwards, or this raises."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return [
            _measure(what, shapes, target, strict_end, rounds)
            for what, shapes, target, strict_end in track(CASES, description="optimizers", transient=True)
        ]
    finally:
        torch.set_num_threads(before)


def _measure(what: str, shapes: list[Shape], target: float, strict_end: bool, rounds: int) -> Row:
    torch.manual_seed(0)
    theirs = [torch.randn(shape).mul_(0.02).requires_grad_() for shape in shapes]
    ours = [p.detach().clone().requires_grad_() for p in theirs]
    for a, b in zip(theirs, ours, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    steps = torch.optim.AdamW(theirs, fused=True).step, optim.AdamW(ours).step
    torch_s, ours_s = interleaved(steps, rounds)
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    return ratio_row(what, torch_s, ours_s, target, strict_end=strict_end)
