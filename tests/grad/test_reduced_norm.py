"""Tests the norm that the reduction over ranks computes: its value, and the cases in which it must not be used."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_cases import SMALL_BUCKETS, OnRanks, assert_equal_on_ranks, inputs
from drivetrain import _C, clip_grad_norm_
from drivetrain import DistributedDataParallel as DDP
from drivetrain.optim import SGD


def chain(dtype: torch.dtype = torch.float32, layers: int = 3) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(*(nn.Linear(10, 10) for _ in range(layers))).to(dtype)


def backward(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    model(inputs().to(dtype)).pow(2).sum().backward()


def norm_as_read(model: nn.Module) -> float:
    return math.sqrt(sum(p.grad.double().pow(2).sum().item() for p in model.parameters() if p.grad is not None))


def asked(model: nn.Module, **options: Any) -> SGD:
    """Returns an optimizer that has asked for the norm, so that the next reduction computes it."""
    optimizer = SGD(model.parameters(), lr=1e-4, max_grad_norm=1.0, **options)
    backward(model, next(model.parameters()).dtype)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def assert_norm(optimizer: SGD, expected: float) -> None:
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(expected, rel=1e-12)


def the_same_as_read(dtype: torch.dtype, layers: int, options: dict[str, Any]) -> None:
    model = DDP(chain(dtype, layers), transport="shm", reuse_norm=True, **options)
    optimizer = asked(model)
    for _ in range(8):  # The buckets are planned again twice within these steps.
        backward(model, dtype)
        assert_norm(optimizer, norm_as_read(model))
        assert_equal_on_ranks([torch.tensor(optimizer.grad_norm, dtype=torch.float64)])
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("layers", "options"), [(3, {}), (3, SMALL_BUCKETS), (40, SMALL_BUCKETS)])
def test_it_is_the_norm(on_ranks: OnRanks, dtype: torch.dtype, layers: int, options: dict[str, Any]) -> None:
    on_ranks(the_same_as_read, dtype, layers, options)


def unseen_write(model: nn.Module) -> None:
    """Writes an element that is not in the sample by which drivetrain notices writes."""
    grad = next(model.parameters()).grad
    grad.numpy().reshape(-1)[1] = 1e4


def comes_from_the_reduction(reuse_norm: bool) -> None:
    """An unnoticed write shows whether the norm comes from the reduction or from a new pass over the gradients."""
    model = DDP(chain(), transport="shm", reuse_norm=reuse_norm)
    optimizer = asked(model)
    backward(model)
    before = norm_as_read(model)
    unseen_write(model)
    assert_norm(optimizer, before if reuse_norm else norm_as_read(model))
    backward_norm = clip_grad_norm_(model.parameters(), 1e9).item()  # The step has clipped the gradients.
    assert backward_norm == pytest.approx(norm_as_read(model), rel=1e-6)
    optimizer.zero_grad()
    backward(model)
    before = norm_as_read(model)
    unseen_write(model)
    norm = clip_grad_norm_(model.parameters(), 1e9).item()
    assert norm == pytest.approx(before if reuse_norm else norm_as_read(model), rel=1e-6)


@pytest.mark.parametrize("reuse_norm", [True, False])
def test_it_comes_from_the_reduction(on_ranks: OnRanks, reuse_norm: bool) -> None:
    on_ranks(comes_from_the_reduction, reuse_norm)


def scaled_through_data(model: DDP) -> None:
    next(model.parameters()).grad.data.mul_(0.5)


def scaled_through_numpy(model: DDP) -> None:
    array = next(model.parameters()).grad.numpy()
    array *= 0.5


def written_since(model: DDP) -> None:
    next(model.parameters()).grad.mul_(2)


def accumulated_since(model: DDP) -> None:
    with model.no_sync():
        backward(model)


def replaced_since(model: DDP) -> None:
    param = next(model.parameters())
    param.grad = torch.ones_like(param)


def dropped_since(model: DDP) -> None:
    next(model.parameters()).grad = None


def reduced_again(model: DDP) -> None:
    model.zero_grad()
    backward(model)


def weighted(model: DDP) -> None:
    model.zero_grad()
    model.backward(model(inputs()).pow(2).mean(), weight=dist.get_rank() + 1.0)


def sees(change: Callable[[DDP], None]) -> None:
    model = DDP(chain(), transport="shm", reuse_norm=True)
    optimizer = asked(model)
    backward(model)
    change(model)
    assert_norm(optimizer, norm_as_read(model))


@pytest.mark.parametrize(
    "change",
    [
        scaled_through_data,
        scaled_through_numpy,
        written_since,
        accumulated_since,
        replaced_since,
        dropped_since,
        reduced_again,
        weighted,
    ],
)
def test_a_change_is_seen(on_ranks: OnRanks, change: Callable[[DDP], None]) -> None:
    on_ranks(sees, change)


def is_not_trusted_unasked() -> None:
    model = DDP(chain(), transport="shm")
    optimizer = asked(model)
    for write in (scaled_through_data, scaled_through_numpy, unseen_write):
        backward(model)
        write(model)
        assert_norm(optimizer, norm_as_read(model))
        optimizer.zero_grad()


def test_what_cannot_be_seen_is_not_trusted_by_default(on_ranks: OnRanks) -> None:
    on_ranks(is_not_trusted_unasked)


def of_other_gradients() -> None:
    """The norm of other gradients than the module's, a part of them or more, does not come from the reduction."""
    model = DDP(chain(), transport="shm", reuse_norm=True)
    optimizer = asked(model)
    own = nn.Parameter(torch.ones(3))
    part = SGD(list(model.parameters())[2:], lr=1e-4, max_grad_norm=1.0)
    more = SGD([*model.parameters(), own], lr=1e-4, max_grad_norm=1.0)
    backward(model)
    own.grad = torch.full((3,), 2.0)
    everything = norm_as_read(model)
    first = [p.grad.double().pow(2).sum().item() for p in list(model.parameters())[:2]]
    saved: list[Tensor] = [p.grad.clone() for p in model.parameters()]
    assert_norm(more, math.sqrt(everything**2 + 12.0))
    for p, grad in zip(model.parameters(), saved, strict=True):
        p.grad.copy_(grad)
    assert_norm(part, math.sqrt(everything**2 - sum(first)))
    optimizer.zero_grad()
    backward(model)
    assert_norm(optimizer, norm_as_read(model))


def asked_on_one_rank() -> None:
    model = DDP(chain(), transport="shm", reuse_norm=True, **SMALL_BUCKETS)
    optimizer = asked(model) if dist.get_rank() == 0 else None
    if optimizer is None:
        backward(model)
        model.zero_grad()
    for _ in range(4):
        backward(model)
        if optimizer is not None:
            before = norm_as_read(model)
            unseen_write(model)
            assert_norm(optimizer, before)
        model.zero_grad()


def parameters_without_gradients() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(10, 10), nn.Linear(10, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = DDP(Branches(), transport="shm", reuse_norm=True, find_unused_parameters=True)
    optimizer = asked(model)
    for _ in range(2):
        backward(model)
        assert_norm(optimizer, norm_as_read(model))
        optimizer.zero_grad()


def of_a_wrapper_that_is_gone() -> None:
    model = DDP(chain(), transport="shm", reuse_norm=True)
    optimizer = asked(model)
    backward(model)
    module, before = model.module, norm_as_read(model)
    del model
    assert_norm(optimizer, before)
    assert _C.sum_of_squares([p.grad for p in module.parameters()]) ** 0.5 == pytest.approx(norm_as_read(module))


@pytest.mark.parametrize(
    "function",
    [of_other_gradients, asked_on_one_rank, parameters_without_gradients, of_a_wrapper_that_is_gone],
)
def test_others_read(on_ranks: OnRanks, function: Callable[[], None]) -> None:
    on_ranks(function)
