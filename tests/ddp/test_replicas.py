"""Checks that replicas stay equal as in torch's class: which backward is reduced, and what a kept gradient shows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_cases import (
    SMALL_BUCKETS,
    OnRanks,
    TorchDDP,
    assert_equal_grads,
    assert_equal_on_ranks,
    assert_means,
    grads_of,
    inputs,
    linear_chain,
    local_grads,
    mean_over_ranks,
    pair,
)
from drivetrain import DistributedDataParallel as DDP
from ranks import run_on

OPTIONS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
Model = DDP | TorchDDP


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).pow(2).sum()
    return loss


def step(model: nn.Module, lr: float = 1e-3) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p -= lr * p.grad
    model.zero_grad()


# ---- One rank does what the others do not.


def inspected_on_one_rank(options: dict[str, Any]) -> None:
    """Computes gradients of the inner module on rank 0 every few steps, as saliency maps and logs do."""
    models = pair(linear_chain(), **SMALL_BUCKETS, **options)
    for number in range(50):
        x = inputs()
        for model in models:
            if dist.get_rank() == 0 and number % 20 == 10:
                loss_of(model.module, x).backward()
                model.zero_grad()
            loss_of(model, x).backward()
            step(model)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert_equal_on_ranks([p.detach() for p in models[0].parameters()])


@pytest.mark.parametrize("transport", ["torch", "shm"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_backward_of_the_inner_module_on_one_rank(on_ranks: OnRanks, options: dict[str, Any], transport: str) -> None:
    on_ranks(on_transport, transport, inspected_on_one_rank, options)


def on_transport(transport: str, function: Callable[..., Any], *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRIVETRAIN_TRANSPORT", transport)
        return function(*args)


# ---- What every rank does, and torch's class leaves local.


def of_the_inner_module(model: Model, x: Tensor) -> None:
    loss_of(model.module, x).backward()


def of_the_inner_module_after_a_step(model: Model, x: Tensor) -> None:
    loss_of(model, x).backward()
    loss_of(model.module, x + 1).backward()


def of_a_penalty_after(model: Model, x: Tensor) -> None:
    loss_of(model, x).backward()
    model.module[0].weight.pow(2).sum().backward()


def of_a_penalty_before(model: Model, x: Tensor) -> None:
    model.module[0].weight.pow(2).sum().backward()
    loss_of(model, x).backward()


def of_a_penalty_that_differs(model: Model, x: Tensor) -> None:
    """Adds it on some ranks only, with different factors."""
    for factor in range(dist.get_rank()):
        (model.module[2].bias.pow(2).sum() * (factor + 2)).backward()
    loss_of(model, x).backward()
    for factor in range(dist.get_rank()):
        (model.module[2].bias.pow(2).sum() * (factor + 3)).backward()


def under_no_sync(model: Model, x: Tensor) -> None:
    with model.no_sync():
        loss_of(model, x).backward()
    loss_of(model.module, x + 1).backward()


def with_respect_to_inputs(model: Model, x: Tensor) -> None:
    x = x.requires_grad_()
    loss = loss_of(model, x)
    torch.autograd.grad(loss, [x], retain_graph=True)
    loss.backward(inputs=[x], retain_graph=True)
    loss.backward()
    loss_of(model.module, x).backward(inputs=[x])


CASES = [
    of_the_inner_module,
    of_the_inner_module_after_a_step,
    of_a_penalty_after,
    of_a_penalty_before,
    of_a_penalty_that_differs,
    under_no_sync,
    with_respect_to_inputs,
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", CASES)
@run_on(2)
def test_stays_local_as_with_torch(case: Callable[[Model, Tensor], None], options: dict[str, Any]) -> None:
    models = pair(linear_chain(), **SMALL_BUCKETS, **options)
    for number in range(4):
        x = inputs()
        for model in models:
            # torch's own class dies on a static graph whose first backward is local.
            if number > 0 or not options.get("static_graph"):
                case(model, x.clone())
            else:
                loss_of(model, x).backward()
        assert_equal_grads(*models)
        for model in models:
            model.zero_grad()


class Recomputed(nn.Module):
    """Uses a layer in two reentrant checkpoints, so that it gets two gradients in one backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.first, self.last = nn.Linear(10, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.first, x, use_reentrant=True).tanh()
        out: Tensor = self.last(x)
        return out


@run_on(2)
def test_reentrant_checkpoints_under_no_sync() -> None:
    ours, theirs = pair(Recomputed(), **SMALL_BUCKETS)
    x = inputs().requires_grad_()
    for model in (ours, theirs):
        with model.no_sync():
            loss_of(model, x).backward()
        loss_of(model.module, x).backward()
    assert_equal_grads(ours, theirs)
    # torch silently leaves this rank's own gradient here. Ours leaves the mean.
    ours.zero_grad()
    expected = mean_over_ranks(local_grads(ours, x))
    for _ in range(2):
        with ours.no_sync():
            loss = loss_of(ours, x)
        loss.backward()
        assert_means(ours, expected)
        ours.zero_grad()


# ---- Gradients that the script keeps.


@pytest.mark.parametrize("options", OPTIONS)
@run_on(2)
def test_gradients_that_the_script_keeps(options: dict[str, Any]) -> None:
    models = pair(linear_chain(), **SMALL_BUCKETS, **options)
    for number in range(8):  # through both changes of plan
        x = inputs()
        kept: list[list[Tensor]] = [[], []]
        for factor in (1.0, 100.0, 10.0):
            for model, own in zip(models, kept, strict=True):
                model.zero_grad()
                (model(x).sum() * factor).backward()
                for p in model.parameters():
                    own += [p.grad.flatten(), p.grad.T[-1:]] if number % 2 else [p.grad]
        for ours, theirs in zip(*kept, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert_equal_grads(*models)


@run_on(2)
def test_kept_gradients_of_unused_parameters() -> None:
    """An unused parameter's region gets zeros if another rank uses it, and a local backward writes there, too."""
    model = DDP(linear_chain(), find_unused_parameters=True, **SMALL_BUCKETS)
    x = inputs()
    loss_of(model, x).backward()
    kept = [(p.grad.view(-1), p.grad.flatten().clone()) for p in model.parameters()]
    model.zero_grad()
    out = model(x)
    (out.sum() if dist.get_rank() == 0 else (out * 0 + model.module[0].bias.sum() * 0).sum()).backward()
    model.zero_grad()
    with model.no_sync():
        loss_of(model, x * 3).backward()
    assert all(torch.equal(ours, before) for ours, before in kept)


class Sometimes(nn.Module):
    """Uses its second layer on one rank at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(10, 7), nn.Linear(7, 7)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = self.first(x)
        return self.second(x) if self.steps % dist.get_world_size() == dist.get_rank() else x


@pytest.mark.parametrize("options", OPTIONS)
@run_on(2)
def test_gradients_that_the_script_assigns(options: dict[str, Any]) -> None:
    """Assigns views of one tensor, and tensors that the script keeps: as under torch, these get the means."""
    net = Sometimes() if options.get("find_unused_parameters") else linear_chain()
    models = pair(net, **SMALL_BUCKETS, **options)
    flats, owned = [], []
    for model in models:
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        pieces = flat.split([p.numel() for p in model.parameters()])
        for number, (p, piece) in enumerate(zip(model.parameters(), pieces, strict=True)):
            p.grad = piece.view_as(p) if number % 2 else torch.zeros_like(p)
        flats.append(flat)
        owned.append([p.grad for p in model.parameters()][::2])
    for number in range(8):
        x = inputs()
        for model, flat, own in zip(models, flats, owned, strict=True):
            torch._foreach_zero_([flat, *own])
            if number % 3 == 1 and (number > 1 or not options.get("static_graph")):
                with model.no_sync():
                    loss_of(model, x + 1).backward()
            loss_of(model, x).backward()
            assert all(p.grad is mine for p, mine in zip(list(model.parameters())[::2], own, strict=True))
        torch.testing.assert_close(flats[0], flats[1])
        assert_equal_grads(*models)
    for model in models:
        model.zero_grad()
        loss_of(model, x).backward()
    assert_equal_grads(*models)


@run_on(2)
def test_gradients_stay_in_the_buffer() -> None:
    """Keeps gradients in the flat buffer from step to step."""
    model = DDP(linear_chain(), **SMALL_BUCKETS)
    places = []
    for number in range(8):
        loss_of(model, inputs()).backward()
        places.append([p.grad.data_ptr() for p in model.parameters()])
        model.zero_grad()
        if number == 5:
            grads_of(model)
    assert places[-1] == places[-2]
