"""Wraps modules, with arguments, that torch's class takes and that differ from the usual or between ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_cases import normed_net, trained_grads
from drivetrain import DistributedDataParallel as DDP
from ranks import run_on

OnRanks = Callable[..., list[Any]]


@run_on(2)
def test_wraps_what_torch_wraps() -> None:
    rank = dist.get_rank()

    class Filters(nn.Sequential):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return ((n, p) for n, p in super().named_parameters(*args, **kwargs) if not n.startswith("0."))

    torch.manual_seed(0)
    cases: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
        "filtered": (lambda: Filters(nn.Linear(10, 4), nn.Linear(4, 3)), {}),
        "none": (normed_net, {"find_unused_parameters": None, "gradient_as_bucket_view": None, "static_graph": None}),
        "names": (lambda: nn.Sequential(nn.Sequential(), normed_net()) if rank else nn.Sequential(normed_net()), {}),
        "caps": (normed_net, {"bucket_cap_mb": 1 + rank}),
        "some caps": (normed_net, {"bucket_cap_mb": 25} if rank else {}),
    }
    for make, options in cases.values():
        found = []
        for wrap in (TorchDDP, DDP):
            torch.manual_seed(0)
            found.append(trained_grads(wrap(make(), **options)))
        for mine, expected in zip(*found, strict=True):
            assert torch.equal(mine, expected)
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"):
            module = normed_net()
        model = DDP(module)
    finally:
        torch.set_default_device(None)
    trained_grads(model)


@run_on(2)
def test_a_parameter_frozen_in_a_static_graph_is_missed_after_several_forwards() -> None:
    for wrap in (TorchDDP, DDP):
        torch.manual_seed(0)
        # Before torch 2.13, a second forward would write to buffers that the backward pass of the first still needs.
        net = wrap(normed_net(), static_graph=True, find_unused_parameters=True, broadcast_buffers=False)
        trained_grads(net)
        next(net.parameters()).requires_grad_(False)
        rows = torch.ones(4, 10)
        (net(rows).sum() + net(rows).sum()).backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            net(rows)
