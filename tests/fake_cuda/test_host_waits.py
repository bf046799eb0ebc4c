"""Tests that a step of DistributedDataParallel causes no more host waits than a step of torch's class."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import drivetrain
import fake_cuda

STEPS = 15  # torch's class collects statistics in its first ten steps, and waits for them


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    yield
    torch.cuda.synchronize()
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.maybe, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, uses_maybe: bool) -> Tensor:
        x = self.first(x)
        return self.last(self.maybe(x) if uses_maybe else x)


def waits_of_last_step(step: Callable[[], None]) -> int:
    for _ in range(STEPS - 1):
        step()
    torch.cuda.synchronize()
    before = fake_cuda.num_host_waits()
    step()
    return fake_cuda.num_host_waits() - before


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("transport", ["torch", "nccl"])
@pytest.mark.parametrize("kind", ["plain", "all used", "one unused", "static graph", "zeroed", "weighted", "window"])
def test_a_step_waits_no_more_than_torchs(kind: str, transport: str) -> None:
    options: dict[str, Any] = {"find_unused_parameters": kind in ("all used", "one unused")}
    options["static_graph"] = kind == "static graph"
    model = Net().cuda()
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(model), **options)
    ours = drivetrain.DistributedDataParallel(model, transport=transport, **options)
    x = torch.randn(4, 8, device="cuda")

    if kind == "window":
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, foreach=False)
        window = drivetrain.accumulate(ours, optimizer, 1).__enter__()

    def step(ddp: Any, is_weighted: bool) -> None:
        # An earlier weight may have counted gradients that are zeroed now.
        ddp.zero_grad(set_to_none=not is_weighted and kind != "zeroed")
        loss = ddp(x, kind != "one unused").sum()
        if kind == "window" and ddp is ours:
            window.backward(loss, weight=3.0)
        elif is_weighted:
            ddp.backward(loss, weight=3.0)
        else:
            loss.backward()

    expected = waits_of_last_step(lambda: step(theirs, False))
    waited = waits_of_last_step(lambda: step(ours, kind == "weighted"))
    assert waited <= expected, f"ours waited {waited} times, torch's class {expected}"
