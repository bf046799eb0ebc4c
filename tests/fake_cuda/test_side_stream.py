"""Tests fused weight gradients of layers whose gradients accumulate on another stream, as in DDP under Lightning."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import drivetrain


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("holds_main_grads", [False, True])
def test_gradients_are_ordered(fuses: bool, holds_main_grads: bool, new_errors: Callable[[], list[str]]) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to("cuda", torch.bfloat16)
    inputs = torch.randn(4, 16, device="cuda", dtype=torch.bfloat16)
    model(inputs).float().sum().backward()
    expected = [param.grad for param in model.parameters()]
    model.zero_grad()
    torch.cuda.synchronize()
    if fuses:
        drivetrain.fuse_wgrad(model)
    if holds_main_grads:
        drivetrain.main_grads(model, 32)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ddp = drivetrain.DistributedDataParallel(model, device_ids=[0])
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        ddp(inputs).float().sum().backward()
        for param, gradient in zip(model.parameters(), expected, strict=True):
            assert param.grad is not None
            torch.testing.assert_close(param.grad.to(torch.bfloat16), gradient, rtol=0.02, atol=0.02)
        ddp.zero_grad()
    assert not new_errors()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_a_capture_takes_in_the_accumulators_stream(new_errors: Callable[[], list[str]]) -> None:
    layer = nn.Linear(16, 16, bias=False).cuda()
    inputs = torch.randn(4, 16, device="cuda")
    expected = torch.autograd.grad(layer(inputs).sum(), layer.weight)[0]
    drivetrain.fuse_wgrad(layer)
    before, side, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(before):
        layer(inputs).sum().backward()
        kept = layer.weight.view(-1).grad_fn  # keeps the accumulator, and so its stream
    torch.cuda.synchronize()
    layer.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        layer(inputs).sum().backward()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert kept is not None
    torch.testing.assert_close(layer.weight.grad, 2 * expected)
    assert not new_errors()
