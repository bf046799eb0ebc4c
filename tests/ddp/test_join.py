"""Compares join() with torch's class: `.grad`, and steps of ZeroRedundancyOptimizer, for ranks with uneven inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from drivetrain import DistributedDataParallel
from ranks import run_on

OnRanks = Callable[..., list[Any]]
Gradients = dict[str, Tensor | None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, uses_all: bool) -> Tensor:
        x = self.second(self.first(x))
        return self.sometimes(x) if uses_all else x


def gradients_of(module: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def uneven_steps(wrap: type, zeroing: str, by_initial: bool, **options: Any) -> list[Gradients]:
    """Returns every rank's gradients after each of its steps, and once the last rank has ended."""
    model = wrap(Net(), find_unused_parameters=True, **options)
    rank, seen = dist.get_rank(), []
    if zeroing == "kept":
        for param in model.parameters():
            param.grad = torch.full_like(param, 5)
    with model.join(divide_by_initial_world_size=by_initial):
        for step in range(2 + 2 * rank):
            if zeroing != "kept":
                model.zero_grad(set_to_none=zeroing == "none")
            model((step + 1 + rank) * torch.ones(2, 4), uses_all=rank == 0 and step == 1).sum().backward()
            seen.append(gradients_of(model.module))
    seen.append(gradients_of(model.module))
    return seen


@run_on(2)
def test_gradients_are_what_torch_leaves() -> None:
    for zeroing in ("none", "zeros", "kept"):
        for by_initial in (True, False):
            for options in ({"transport": "shm"}, {"transport": "torch"}, {"gradient_as_bucket_view": True}):
                torchs = {name: value for name, value in options.items() if name != "transport"}
                expected = uneven_steps(TorchDistributedDataParallel, zeroing, by_initial, **torchs)
                found = uneven_steps(DistributedDataParallel, zeroing, by_initial, **options)
                for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
                    for name, grad in theirs.items():
                        where = f"{name}, {zeroing}, {by_initial}, {options}, step {step}"
                        assert (ours[name] is None) == (grad is None), where
                        if grad is not None:
                            torch.testing.assert_close(ours[name], grad, msg=lambda text, where=where: where + text)


def uneven_zero(wrap: type, zeroing: str) -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    model = wrap(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with Join([model, zero]):
        for step in range(3 + 2 * dist.get_rank()):
            model((step + 1) * torch.ones(2, 8)).square().mean().backward()
            zero.step()
            if zeroing != "kept":
                zero.zero_grad(set_to_none=zeroing == "none")
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("zeroing", ["none", "kept"])
@run_on(2)
def test_zero_redundancy_optimizer_steps_as_with_torchs_class(zeroing: str) -> None:
    torch.manual_seed(0)
    expected = uneven_zero(TorchDistributedDataParallel, zeroing)
    torch.manual_seed(0)
    for mine, theirs in zip(uneven_zero(DistributedDataParallel, zeroing), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
