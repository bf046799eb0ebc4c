"""Wraps modules, with arguments, that torch's class takes and that differ from the usual or between ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from drivetrain import DistributedDataParallel as DDP

OnRanks = Callable[..., list[Any]]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """Trains and returns copies of the gradients."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, 10, generator=generator)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def wraps_what_torch_wraps() -> None:
    rank = dist.get_rank()

    class Filters(nn.Sequential):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return ((n, p) for n, p in super().named_parameters(*args, **kwargs) if not n.startswith("0."))

    torch.manual_seed(0)
    cases: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
        "filtered": (lambda: Filters(nn.Linear(10, 4), nn.Linear(4, 3)), {}),
        "none": (net, {"find_unused_parameters": None, "gradient_as_bucket_view": None, "static_graph": None}),
        "names": (lambda: nn.Sequential(nn.Sequential(), net()) if rank else nn.Sequential(net()), {}),
        "caps": (net, {"bucket_cap_mb": 1 + rank}),
        "some caps": (net, {"bucket_cap_mb": 25} if rank else {}),
    }
    for make, options in cases.values():
        found = []
        for wrap in (TorchDDP, DDP):
            torch.manual_seed(0)
            found.append(train(wrap(make(), **options)))
        for mine, expected in zip(*found, strict=True):
            assert torch.equal(mine, expected)
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"):
            module = net()
        model = DDP(module)
    finally:
        torch.set_default_device(None)
    train(model)


def test_wraps_what_torch_wraps(on_ranks: OnRanks) -> None:
    on_ranks(wraps_what_torch_wraps)
