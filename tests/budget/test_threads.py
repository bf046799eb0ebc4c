"""Checks activation budgets where several threads or ranks run the model."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from models import ABOVE, Gpt, ResNet, Step, assert_same_bits, forget_all, gradients
from torch import Tensor, nn

import drivetrain
from ranks import run_on


@pytest.mark.usefixtures("threads_switch_often")
def test_the_books_are_read_while_a_pass_writes_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(100)))
    x = torch.randn(4, 8)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    plan = drivetrain.activation_budget(model, step, "200%")
    read: list[int] = []
    ends = threading.Event()

    def watch() -> None:
        while not ends.is_set():
            read.append(plan.live_bytes)
            plan.reset_peak()

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(50):
        step()
    ends.set()
    watcher.join()
    assert plan.live_bytes == 0
    assert 0 <= min(read) < max(read) <= plan.unplanned_bytes


def test_a_pass_in_a_thread_that_has_ended(gpt: tuple[nn.Module, Step]) -> None:
    model, step = gpt
    expected = gradients(model, step)
    losses: list[Tensor] = []

    def forward_elsewhere() -> None:
        def forward() -> None:
            torch.manual_seed(1)
            losses.append(model(ids))

        torch.manual_seed(0)
        Gpt()
        ids = torch.randint(50, (2, 24))
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
        model.zero_grad()
        losses.pop().backward()

    plan = drivetrain.activation_budget(model, forward_elsewhere, "50%")
    forward_elsewhere()
    assert_same_bits({name: param.grad for name, param in model.named_parameters()}, expected)
    assert plan.live_bytes == 0


def under_ddp(ddp: type[nn.Module], steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ResNet(), nn.Identity())
    reference = copy.deepcopy(model)
    wrapped, plain = ddp(model), ddp(reference)
    torch.manual_seed(torch.distributed.get_rank())
    x = torch.randn(4, 3, 12, 12)

    def step() -> None:
        wrapped.zero_grad()
        wrapped(x).backward()

    plan = drivetrain.activation_budget(wrapped, step, "60%")
    assert plan.measured_bytes is not None
    assert plan.measured_bytes <= plan.budget_bytes
    assert not plan.notes
    for _ in range(steps):
        for one in (wrapped, plain):
            one.zero_grad()
            one(x).backward()
        for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), name
        for (name, a), b in zip(model.named_buffers(), reference.buffers(), strict=True):
            assert torch.equal(a, b), name
    assert plan.live_bytes == 0


@pytest.mark.parametrize("ddp", [drivetrain.DistributedDataParallel, nn.parallel.DistributedDataParallel])
def test_under_ddp(on_ranks: Callable[..., list[Any]], ddp: type[nn.Module]) -> None:
    on_ranks(under_ddp, ddp, 2)


@run_on(2)
def test_a_collective_inside() -> None:
    torch.manual_seed(0)

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = x.clone()
            torch.distributed.all_reduce(y)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            nn.init.zeros_(self.down.weight)  # zero at first, so the profiled additions have no effect
            nn.init.zeros_(self.down.bias)

        def forward(self, x: Tensor) -> Tensor:
            return (x + Reduced.apply(self.down(self.up(x).tanh()))).square().exp().sum()

    model = Parallel()
    x = torch.randn(4, 8)
    forget_all(model, lambda: model(x).backward())
    nn.init.normal_(model.down.weight, std=0.1 * (1 + torch.distributed.get_rank()))
    reference = copy.deepcopy(model)
    reference._forward_hooks.clear()
    reference._forward_pre_hooks.clear()
    for one in (model, reference):
        one.zero_grad()
        one(x).backward()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.usefixtures("threads_switch_often")
@pytest.mark.parametrize("share", ["50%", "200%"])
@ABOVE
def test_threads_that_share_a_model(gpt: tuple[nn.Module, Step], share: str) -> None:
    model, step = gpt
    plan = drivetrain.activation_budget(model, step, share)
    model.eval()
    ids = [torch.randint(50, (2, 24)) for _ in range(4)]

    def gradient(one: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(model(one), list(model.parameters())))

    expected = [gradient(one) for one in ids]
    found: dict[int, list[Tensor]] = {}

    def work(index: int) -> None:
        for _ in range(20):
            found[index] = gradient(ids[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, one in enumerate(expected):
        for a, b in zip(one, found[index], strict=True):
            assert torch.equal(a, b)
    assert plan.live_bytes == 0
