"""Models, optimizers and training loops for the tests of DistributedDataParallel(shard=...)."""

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import drivetrain
from drivetrain import DistributedDataParallel

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Odd(nn.Module):
    """Sizes that no number of ranks divides, fewer rows than ranks, a tied, a frozen and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(37, 24)
        self.body = nn.Sequential(nn.Linear(24, 31), nn.GELU(), nn.LayerNorm(31), nn.Linear(31, 3), nn.Linear(3, 24))
        self.conv = nn.Conv2d(2, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight
        self.body[0].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(self.embed(tokens))
        image = hidden.unflatten(-1, (2, 3, 4))
        mixed = self.conv(image.contiguous(memory_format=torch.channels_last)).mean((1, 2, 3), keepdim=True)
        return self.head(hidden + mixed.squeeze(-1).squeeze(-1)) * self.scale


class Blocks(nn.Module):
    """Sizes that keep the blocks of 8-bit states: every rank's part is a multiple of 256 elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(16, 256)
        self.body = nn.Linear(256, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embed(tokens).tanh())


def tokens_of(step: int, rank: int, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, vocabulary, (6,), generator=generator)


def loss_of(net: nn.Module, step: int, vocabulary: int = 37) -> Tensor:
    return net(tokens_of(step, dist.get_rank(), vocabulary)).float().square().mean() * 3


def alone_before_a_step(**options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer] | None:
    """Returns a wrapper after its backward and its optimizer; None on rank 1, which has deleted its own."""
    net = DistributedDataParallel(Odd(), transport="shm", shard="optimizer", **options)
    optimizer = OURS["AdamW"](net.parameters())
    loss_of(net, 0).backward()
    if dist.get_rank() == 1:
        del net
        gc.collect()
        return None
    return net, optimizer


OURS: dict[str, Make] = {
    "AdamW": lambda p: drivetrain.optim.AdamW(p, lr=1e-2),
    "AdamW that zeroes": lambda p: drivetrain.optim.AdamW(p, lr=1e-2, zero_grads_in_step=True),
    "SGD": lambda p: drivetrain.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "Lion": lambda p: drivetrain.optim.Lion(p, lr=1e-3),
    "RMSprop": lambda p: drivetrain.optim.RMSprop(p, lr=1e-3),
}
TORCHS: dict[str, Make] = {
    name: lambda p, kind=name: getattr(torch.optim, kind)(p, lr=1e-2)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
}
TORCHS["SGD"] = lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)
WITH_SUMS: dict[str, Make] = {
    "LAMB": lambda p: drivetrain.optim.LAMB(p, lr=1e-2),
    "Adafactor": lambda p: drivetrain.optim.Adafactor(p, lr=1e-2),
    "clipped AdamW": lambda p: drivetrain.optim.AdamW(p, lr=1e-2, max_grad_norm=0.3),
}


def train(
    make: Make,
    model: nn.Module,
    steps: int = 3,
    *,
    each: Callable[[nn.Module, torch.optim.Optimizer, int], Any] | None = None,
    vocabulary: int = 37,
    **options: Any,
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Trains on this rank's tokens. `each` replaces a step's backward and step."""
    net = DistributedDataParallel(model, bucket_cap_mb=0.002, **options)
    optimizer = make(net.parameters())
    for step in range(steps):
        if each is not None:
            each(net, optimizer, step)
            continue
        loss_of(net, step, vocabulary).backward()
        optimizer.step()
        if not getattr(optimizer, "zero_grads_in_step", False):
            optimizer.zero_grad()
    return net, optimizer


def values_of(net: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in net.parameters()]


def expect_equal(found: nn.Module, expected: nn.Module, what: object) -> None:
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert a.isfinite().all(), (what, name)
        assert torch.equal(a, b), (what, name, (a - b).abs().max())


def expect_close(found: nn.Module, expected: nn.Module, what: object, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{what} {name}: {text}")
    for name, a in found.named_parameters():  # and every rank has the same bits
        all_of = [torch.empty_like(a) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of, a.detach().contiguous())
        assert all(torch.equal(all_of[0], other) for other in all_of), (what, name)
