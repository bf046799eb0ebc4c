"""Measures the optimizers that need several passes, LAMB, Adafactor and Muon, against torch's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track
from torch import Tensor

from .. import optim
from .measure import Row, interleaved, ratio_row
from .ranks import meet, on_ranks
from .roofline import least_bytes, with_roofline
from .shapes import Shape, gpt2_124m

GPT2_LAYER: list[Shape] = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
# 48 matrices of a small model, which Muon batches.
SMALL_LAYERS: list[Shape] = [(128, 384), (128, 128), (128, 512), (512, 128)] * 12


class ForeachLamb:
    """LAMB written with torch's foreach functions and the defaults of optim.LAMB."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params, self.count = params, 0
        self.mean = [torch.zeros_like(p) for p in params]
        self.mean_sq = [torch.zeros_like(p) for p in params]
        states = zip(params, self.mean, self.mean_sq, strict=True)
        self.state = {p: {"exp_avg": mean, "exp_avg_sq": mean_sq} for p, mean, mean_sq in states}

    @torch.no_grad()
    def step(self) -> None:
        """Takes a step with lr 1e-3, betas 0.9 and 0.999, eps 1e-6 and weight decay 0.01."""
        self.count += 1
        grads = [p.grad for p in self.params if p.grad is not None]
        torch._foreach_lerp_(self.mean, grads, 1 - 0.9)
        torch._foreach_mul_(self.mean_sq, 0.999)
        torch._foreach_addcmul_(self.mean_sq, grads, grads, 1 - 0.999)
        directions = torch._foreach_sqrt(self.mean_sq)
        torch._foreach_div_(directions, (1 - 0.999**self.count) ** 0.5)
        torch._foreach_add_(directions, 1e-6)
        torch._foreach_reciprocal_(directions)
        torch._foreach_mul_(directions, self.mean)
        torch._foreach_div_(directions, 1 - 0.9**self.count)
        torch._foreach_add_(directions, self.params, alpha=0.01)
        param_norms, norms = torch._foreach_norm(self.params), torch._foreach_norm(directions)
        ratios = [torch.where((p > 0) & (n > 0), p / n, 1.0) for p, n in zip(param_norms, norms, strict=True)]
        torch._foreach_mul_(directions, ratios)
        torch._foreach_add_(self.params, directions, alpha=-1e-3)


# Name, shapes, torch's side, ours, target for the ratio, most rounds, and the tolerated difference relative to the
# update. torch sums norms in float32, which is 0.3 % too small over 38 M elements; Muon iterates in bfloat16.
CASES: tuple[tuple[str, list[Shape], Callable[..., Any], Callable[..., Any], float, int, float], ...] = (
    ("LAMB fp32, GPT-2 124M (torch: foreach calls)", gpt2_124m(), ForeachLamb, optim.LAMB, 0.5, 31, 0.01),
    ("Adafactor fp32, GPT-2 124M", gpt2_124m(), torch.optim.Adafactor, optim.Adafactor, 0.5, 15, 0.01),
    ("Muon fp32, a layer of GPT-2 124M", GPT2_LAYER, torch.optim.Muon, optim.Muon, 1.05, 7, 0.1),
    ("Muon fp32, 48 matrices of 128 x 128 to 512", SMALL_LAYERS, torch.optim.Muon, optim.Muon, 0.8, 15, 0.1),
)


def run(rounds: int) -> list[Row]:
    """Returns one row per optimizer. Raises AssertionError if the two sides' parameters disagree."""
    rows = []
    for what, shapes, theirs, ours, target, most, share in track(CASES, description="more than a pass", transient=True):
        torch.manual_seed(0)
        start = [torch.randn(shape).mul_(0.02) for shape in shapes]
        models = [[p.clone().requires_grad_() for p in start] for _ in range(2)]
        for a, b in zip(*models, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        optimizer = ours(models[1])
        torch_s, ours_s = interleaved((theirs(models[0]).step, optimizer.step), min(rounds, most), warm_up=2)
        for before, a, b in zip(start, *models, strict=True):
            if not (a - b).norm() <= share * (a - before).norm():
                raise AssertionError(f"{what}: a parameter of shape {tuple(a.shape)} differs by more than {share:g}")
        row = ratio_row(what, torch_s, ours_s, target)
        # Muon is bound by matrix products.
        rows.append(row if ours is optim.Muon else with_roofline(row, least_bytes(models[1], optimizer)))
    alone_s, shared_s = on_ranks(partial(_on_a_rank, min(rounds, 7)))
    rows.append(ratio_row("Muon fp32, 3 layers of GPT-2 124M, on 2 ranks: alone; shared", alone_s, shared_s, 0.6))
    return rows


def _on_a_rank(rounds: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of steps that every rank computes, and of steps whose matrices ranks share."""
    steps = []
    for group in (None, dist.group.WORLD):
        params = [torch.randn(shape).mul_(0.02).requires_grad_() for shape in GPT2_LAYER * 3]
        for param in params:
            param.grad = torch.randn_like(param)
        steps.append(optim.Muon(params, process_group=group).step)
    alone_s, shared_s = interleaved(steps, rounds, warm_up=2, prepare=lambda which: meet())
    return alone_s, shared_s
