"""Models, optimizers and training loops for the tests of DistributedDataParallel(shard=...)."""

import gc
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import drivetrain
from drivetrain import DistributedDataParallel

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
is_exact = True  # False: the transport may add values in another order where it scatters them


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


class Whole(nn.Module):
    """Gradients are small whole numbers whatever the parameters, so that every order of a sum has the same bits."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(7, width, dtype=dtype) for width in (5, 12, 1)])
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1 + dist.get_rank()
        return torch.cat([layer(inputs) for layer in self.layers], dim=1)


def transports() -> tuple[str, ...]:
    """Returns the transports to compare: those of the CPU, or the one that shard_nccl_ranks.py was told."""
    chosen = os.environ.get("DRIVETRAIN_TRANSPORT")
    return (chosen,) if chosen else ("shm", "torch")


def drawn(seed: int, low: int, high: int, *shape: int) -> Tensor:
    """Returns whole numbers from `low` to `high - 1` on the default device, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, device="cpu").to(torch.get_default_device())


def tokens_of(step: int, rank: int, vocabulary: int) -> Tensor:
    return drawn(1000 * step + rank, 0, vocabulary, 6)


def whole_loss(net: nn.Module, step: int) -> Tensor:
    """Returns a loss of a `Whole`."""
    dtype = next(net.parameters()).dtype
    seed = 100 * step + dist.get_rank()
    return (net(drawn(seed, -3, 4, 4, 7).to(dtype)) * drawn(seed + 50, -2, 3, 4, 18).to(dtype)).sum()


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
    if not is_exact:
        expect_close(found, expected, what, rtol=1e-4, atol=1e-5)
        return
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
