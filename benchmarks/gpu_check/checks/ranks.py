"""Compares training under drivetrain's DDP on several ranks with torch's DDP: gradients, weights and buffers.

Ranks may share a GPU.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import drivetrain
from drivetrain.bench.ranks import on_ranks

from .findings import Finding

NUM_STEPS = 5
TOLERANCE = 1e-5  # relative to the largest value; sums over more than two ranks may use another order
TRANSPORTS = {"cuda": ("torch", "nccl"), "cpu": ("torch", "shm")}
VOCABULARY, WIDTH = 512, 64


class Small(nn.Module):
    """Has an embedding, a weight that is used twice, synchronized buffers, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens).mean(1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.norm(x) @ self.tokens.weight.T, tokens[:, 0])


def run(count: int, device: torch.device, is_dry: bool) -> Iterator[Finding]:
    """Compares both classes over each transport.

    Ranks that share a GPU communicate through sockets, because drivetrain.bench.ranks presents each as a separate host.
    """
    backend = "gloo" if is_dry else "nccl"
    for transport in TRANSPORTS[device.type]:
        what = f"{count} ranks over {backend}, transport {transport}"
        try:
            found = on_ranks(functools.partial(_both_ways, device.type, transport), count=count, backend=backend)
        except RuntimeError as error:  # the other transport is still checked
            yield Finding(what, False, str(error))
            continue
        for finds_unused, (difference, has_same_bits) in found.items():
            seen = "the same bits" if has_same_bits else f"largest difference {difference:.1e} of the largest value"
            seen = f"{NUM_STEPS} steps, gradients, weights and buffers: {seen}"
            yield Finding(f"{what}{', find_unused_parameters' * finds_unused}", difference <= TOLERANCE, seen)


def _both_ways(device_type: str, transport: str) -> dict[bool, tuple[float, bool]]:
    return {finds_unused: _train_both(device_type, transport, finds_unused) for finds_unused in (False, True)}


def _train_both(device_type: str, transport: str, finds_unused: bool) -> tuple[float, bool]:
    """Trains with both classes on every rank.

    Returns:
        The largest relative difference over all ranks and steps, and True if all bits are equal.
    """
    torch.manual_seed(0)
    start = Small()
    if not finds_unused:
        del start.unused
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    sides = []
    for make in (
        nn.parallel.DistributedDataParallel,
        functools.partial(drivetrain.DistributedDataParallel, transport=transport),
    ):
        model = Small()
        if not finds_unused:
            del model.unused
        model.load_state_dict(start.state_dict())
        wrapped = make(model.to(device), find_unused_parameters=finds_unused)
        sides.append((wrapped, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
    worst = torch.zeros((), device=device)
    has_same_bits = torch.ones((), device=device)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(NUM_STEPS):
        tokens = torch.randint(VOCABULARY, (16, 8)).to(device)
        for wrapped, _, optimizer in sides:
            optimizer.zero_grad()
            wrapped(tokens).backward()
        pairs: list[tuple[Any, Any]] = [
            (a.grad, b.grad) for a, b in zip(sides[0][1].parameters(), sides[1][1].parameters(), strict=True)
        ]
        for _, _, optimizer in sides:
            optimizer.step()
        pairs += zip(sides[0][1].state_dict().values(), sides[1][1].state_dict().values(), strict=True)
        for theirs, ours in pairs:
            if theirs is None and ours is None:
                continue
            ours = torch.zeros_like(theirs) if ours is None else ours
            theirs = torch.zeros_like(ours) if theirs is None else theirs
            has_same_bits = has_same_bits * bool(torch.equal(theirs, ours))
            gap = (theirs.double() - ours.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-12)
            worst = torch.maximum(worst, gap.nan_to_num(nan=1e9).float())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    dist.all_reduce(has_same_bits, dist.ReduceOp.MIN)
    return worst.item(), bool(has_same_bits.item())
