"""Runs one rank whose buckets are planned from a device's times, on GPUs or on tests/fake_cuda.

python planner_nccl_ranks.py RANK SIZE STORE TRANSPORT CASE ...; prints "ok CASE" after each case that holds.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from drivetrain import DistributedDataParallel
from nccl_ranks import join_group

try:
    import fake_cuda
except ModuleNotFoundError:  # a GPU
    fake_cuda = None

PLANNED_AT = 10  # the step whose backward begins with the plan
NOT_OVER = "the first steps are not over"
MIB = 2**18  # elements of float32

cases: dict[str, Callable[[str], None]] = {}


def case(function: Callable[[str], None]) -> Callable[[str], None]:
    cases[function.__name__] = function
    return function


class Late(torch.autograd.Function):
    """Keeps the device busy in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.ms > 0:
            torch.cuda._sleep(int(2e6 * ctx.ms))
        return grad, None


class Chain(nn.Module):
    """Gets a gradient, waits, gets the next one; the last weight's comes first. Gradients are the inputs.

    Args:
        numels: Numbers of elements.
        ms: Milliseconds of each wait.
        is_reversed: The first weight's gradient comes first.
    """

    def __init__(self, numels: tuple[int, ...], ms: float, is_reversed: bool = False) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(numel, device="cuda") for numel in numels])
        self.start = nn.Parameter(torch.zeros(1, device="cuda"))
        self.ms = ms
        self.is_reversed = is_reversed

    def forward(self, factor: Tensor) -> Tensor:
        x = self.start * factor
        for weight in reversed(self.weights) if self.is_reversed else self.weights:
            x = Late.apply(x, self.ms) + (weight * factor).sum()
        return x.sum()


def factor_of(step: int) -> Tensor:
    return torch.tensor([1.0 + step + 10 * dist.get_rank()], device="cuda")


def names_of(model: nn.Module) -> list[list[str]]:
    return [bucket.names for bucket in model.reducer.buckets()]  # type: ignore[union-attr,operator]


def host_waits() -> int:
    return fake_cuda.num_host_waits() if fake_cuda is not None else 0


def step(model: nn.Module, number: int, set_to_none: bool = True) -> int:
    """Makes a step and waits for the device. Returns how often the step itself has waited."""
    factor = factor_of(number)
    model.zero_grad(set_to_none=set_to_none)
    before = host_waits()
    model(factor).backward()
    waits = host_waits() - before
    torch.cuda.synchronize()
    return waits


def expect_same_buckets(model: nn.Module) -> None:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, names_of(model))
    assert all(names == everywhere[0] for names in everywhere), everywhere


def plan_of(transport: str, ms: float) -> Any:
    model = DistributedDataParallel(Chain((MIB,) * 6, ms), transport=transport)
    for number in range(1, PLANNED_AT + 1):
        waits = step(model, number)
        assert waits == 0 or number <= 2, (number, waits)  # the second step learns the gradients' order
        assert (model.bucket_plan().why_not == NOT_OVER) == (number < PLANNED_AT), number
    plan = model.bucket_plan()
    assert plan.why_not == "", plan
    assert plan.buckets[-1].ready_ms > 5 * ms
    assert [list(bucket.names) for bucket in plan.buckets] == names_of(model)
    expect_same_buckets(model)
    return plan


@case
def long_way(transport: str) -> None:
    """Each collective takes longer than the whole backward: buckets become larger than torch's."""
    plan = plan_of(transport, 10)
    assert plan.latency_ms > 100, plan
    assert len(plan.buckets) == 1, plan


@case
def short_way(transport: str) -> None:
    """Nothing but the last gradient needs to be exposed."""
    plan = plan_of(transport, 20)
    assert len(plan.buckets) > 1, plan
    assert sum(bucket.bytes for bucket in plan.buckets[:-1]) >= 5 * 4 * MIB, plan


@case
def bits(transport: str) -> None:
    for set_to_none in (True, False):
        ours = DistributedDataParallel(Chain((1000, 300_000, 64, 300_001, 17), 0), transport=transport)
        theirs = TorchDistributedDataParallel(copy.deepcopy(ours.module))
        for number in range(1, PLANNED_AT + 3):
            kept_over = number == PLANNED_AT - 5 or not set_to_none  # with gradients there the all-reduces are timed
            for model in (ours, theirs):
                if not kept_over:
                    model.zero_grad()
                with model.no_sync():
                    model(factor_of(100 * number)).backward()
                model(factor_of(number)).backward()
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad), number
        assert ours.bucket_plan().why_not == "", ours.bucket_plan()
        expect_same_buckets(ours)


@case
def nothing_moves(transport: str) -> None:
    """Other buckets leave gradients where they are, and what the script keeps over them."""
    model = DistributedDataParallel(Chain((MIB, 300, 100_000), 1, is_reversed=True), transport=transport)
    addresses, kept = [], []
    for number in range(1, PLANNED_AT + 2):
        step(model, number)
        addresses.append([param.grad.data_ptr() for param in model.parameters()])
        if number > 2:
            kept.append([(param.grad[None], param.grad[None].clone()) for param in model.parameters()])
    assert model.bucket_plan().why_not == "", model.bucket_plan()
    assert all(now == addresses[2] for now in addresses[2:])
    assert addresses[0] != addresses[2]  # the order of gradients has moved them
    assert all(torch.equal(view, then) for tensors in kept for view, then in tensors)


@case
def host_far_ahead(transport: str) -> None:
    """Ranks plan later, together, where one's device has not reached the marks in time."""
    module = Chain((3000, 200), 20 if dist.get_rank() == 1 else 0)
    model = DistributedDataParallel(module, transport=transport)
    factor, waits = factor_of(0), []
    for number in range(1, 102):
        if number == PLANNED_AT + 1:
            assert model.bucket_plan().why_not == NOT_OVER
            module.ms = 0
        model.zero_grad()
        before = host_waits()
        model(factor).backward()
        waits.append(host_waits() - before)
        assert (model.bucket_plan().why_not == "") == (number >= 100), (number, model.bucket_plan())
    assert sum(waits[2:]) <= 1, waits
    assert sum(waits[PLANNED_AT:]) == 0, waits
    expect_same_buckets(model)


@case
def captured_steps(transport: str) -> None:
    for captured in (4, 5, 7):
        factor = torch.ones(1, device="cuda")
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model = DistributedDataParallel(Chain((3000, 200), 0), transport=transport)
            for _ in range(1, captured):
                model.zero_grad()
                model(factor).backward()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        model.zero_grad()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            model(factor).backward()
        addresses = [param.grad.data_ptr() for param in model.parameters()]
        with torch.cuda.stream(side):
            for number in range(captured + 1, PLANNED_AT + 2):
                step(model, number)
        assert "a CUDA graph was captured in the steps" in model.bucket_plan().why_not, model.bucket_plan()
        factor.fill_(2 + dist.get_rank())
        graph.replay()
        torch.cuda.synchronize()
        for param, address in zip(model.parameters(), addresses, strict=True):
            assert param.grad.data_ptr() == address
            assert (param.grad == sum(2 + rank for rank in range(dist.get_world_size())) / dist.get_world_size()).all()


@case
def refusals(transport: str) -> None:
    def why_not(module: nn.Module, keeps_views: bool = False, **options: Any) -> str:
        model, kept = DistributedDataParallel(module, transport=transport, **options), []
        for number in range(1, PLANNED_AT + 2):
            step(model, number)
            if keeps_views:
                kept.append([param.grad[None] for param in model.parameters()])
        return model.bucket_plan().why_not

    def chain() -> Chain:
        return Chain((3000, 200), 0)

    assert why_not(chain(), bucket_cap_mb=25) == "bucket sizes were given"
    assert "keeps references to .grad" in why_not(Chain((3000, 200), 0, is_reversed=True), keeps_views=True)
    several = chain()
    several.weights[0].data = several.weights[0].data.double()
    assert "several dtypes" in why_not(several)
    if transport == "torch" and torch.cuda.device_count() >= 2 * dist.get_world_size():
        spread = chain()
        other = f"cuda:{dist.get_world_size() + dist.get_rank()}"
        spread.weights[0].data = spread.weights[0].data.to(other)
        model = DistributedDataParallel(spread, transport=transport)
        assert model.bucket_plan().why_not == "the parameters lie on several devices"


def main() -> None:
    transport, chosen = join_group()
    for name in chosen:
        cases[name](transport)
        torch.cuda.synchronize()
        if fake_cuda is not None:
            assert not fake_cuda.errors()
        print(f"ok {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # torch's watchdog would query events of captures
    main()
