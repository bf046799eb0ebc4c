"""Checks that gradients which are not finite, or whose norm jumps, are found before their reduction, on all ranks."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_cases import SMALL_BUCKETS, OnRanks, TorchDDP, assert_equal_on_ranks, grads_of, inputs, linear_chain
from drivetrain import DistributedDataParallel as DDP
from drivetrain import main_grads, optim
from ranks import run_on

TRANSPORTS = pytest.mark.parametrize("transport", ["torch", "shm"])


def spoil(model: nn.Module, name: str, value: float, rank: int = 1) -> Callable[[], None]:
    """Puts a value into one element of a parameter's gradient on one rank. Returns what ends that."""
    param = dict(model.named_parameters())[name]

    def hook(grad: Tensor) -> Tensor:
        if dist.get_rank() != rank:
            return grad
        grad = grad.clone()
        grad.view(-1)[-1] = value
        return grad

    handle = param.register_hook(hook)
    return handle.remove


def backward(model: nn.Module, x: Tensor | None = None) -> None:
    model(inputs() if x is None else x).pow(2).sum().backward()


@TRANSPORTS
@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, torch.float32), (-math.inf, torch.float64), (math.inf, torch.bfloat16)]
)
@run_on(2)
def test_raises_on_every_rank_and_names_rank_and_parameter(transport: str, value: float, dtype: torch.dtype) -> None:
    """Raises on every rank, keeps no gradient, and goes on as if the step had not been."""
    chain = linear_chain().to(dtype)
    reference = TorchDDP(copy.deepcopy(chain), **SMALL_BUCKETS)
    checked = DDP(chain, check_gradients="raise", transport=transport, **SMALL_BUCKETS)
    for step in range(8):  # through both changes of plan
        end = spoil(checked.module, "2.weight", value) if step % 3 == 1 else None
        x = inputs().to(dtype)
        checked.zero_grad()
        if end is not None:
            with pytest.raises(RuntimeError, match=r"rank 1 has a gradient that is not finite .* for '2\.weight'"):
                backward(checked, x)
            end()
            assert all(p.grad is None for p in checked.parameters())
            continue
        backward(checked, x)
        reference.zero_grad()
        backward(reference, x)
        for ours, theirs in zip(checked.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        assert_equal_on_ranks(grads_of(checked))


@TRANSPORTS
@pytest.mark.parametrize("cls", ["ours.AdamW", "torch.AdamW"])
@run_on(2)
def test_skip_makes_optimizers_do_nothing(transport: str, cls: str) -> None:
    """Leaves parameters and optimizer states as they were, on all ranks."""
    model = DDP(linear_chain(), check_gradients="skip", transport=transport, **SMALL_BUCKETS)
    optimizer: Any = getattr(optim if cls.startswith("ours") else torch.optim, cls.split(".")[1])(
        model.parameters(), lr=1e-2
    )
    assert model.skipped_steps() == (0, "")
    for step in range(6):
        end = spoil(model.module, "0.bias", math.nan, rank=0) if step in (0, 4) else None
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        backward(model)
        assert all((p.grad is None) == (end is not None) for p in model.parameters())
        optimizer.step()
        is_same = all(torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True))
        assert is_same == (end is not None)
        if end is not None:
            end()
        assert_equal_on_ranks([p.detach() for p in model.parameters()])
    count, last = model.skipped_steps()
    assert count == 2
    assert "rank 0 has a gradient that is not finite (nan or inf) for '0.bias', in synchronized step 5" in last


def accumulating() -> None:
    """A gradient of a backward under no_sync() is found by the synchronized one, which drops the whole sum."""
    model = DDP(linear_chain(), check_gradients="skip", **SMALL_BUCKETS)
    end = spoil(model.module, "4.weight", math.inf)
    with model.no_sync():
        backward(model)
    end()
    backward(model)
    assert model.skipped_steps().num_steps == 1
    assert all(p.grad is None for p in model.parameters())
    backward(model)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def finding_on_both_ranks() -> None:
    model = DDP(linear_chain(), check_gradients="raise", **SMALL_BUCKETS)
    spoil(model.module, "0.weight", math.nan, rank=0)
    spoil(model.module, "4.bias", math.nan, rank=1)
    with pytest.raises(RuntimeError, match=r"rank 0 .* for '0\.weight'; rank 1 .* for '4\.bias'"):
        backward(model)


def large_but_finite() -> None:
    """Values whose squares overflow float32, and in float64 even their sum, are no finding."""
    for dtype, value in ((torch.float32, 1e30), (torch.float64, 1e200)):
        model = DDP(linear_chain().to(dtype), check_gradients="raise", **SMALL_BUCKETS)
        spoil(model.module, "2.weight", value)
        backward(model, inputs().to(dtype))
        assert max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) > value / 4


@TRANSPORTS
@run_on(2)
def test_spikes_are_found(transport: str) -> None:
    """Norms are known after eight steps. A jump is found on the rank that has it, and is not learned."""
    model = DDP(linear_chain(), check_gradients="skip", spike_factor=20.0, transport=transport, **SMALL_BUCKETS)
    torch.manual_seed(dist.get_rank())
    for step in range(24):
        is_spike = step in (2, 20, 21, 23) and dist.get_rank() == 1
        model.zero_grad()
        (model(inputs()).pow(2).sum() * (1000 if is_spike else 1)).backward()
        found = step in (20, 21, 23)  # the plan's buckets have been known for eight steps
        assert (next(model.parameters()).grad is None) == found, step
    count, last = model.skipped_steps()
    assert count == 3
    assert "rank 1 has a bucket whose norm exceeds the median of its last ones more than 20" in last


def with_unused() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(dist.get_rank())
            self.first, self.second = nn.Linear(10, 5), nn.Linear(10, 5)

        def forward(self, x: Tensor, which: int) -> Tensor:
            return (self.first if which == 0 else self.second)(x)

    model = DDP(Two(), check_gradients="raise", find_unused_parameters=True, **SMALL_BUCKETS)
    for step in range(6):
        model.zero_grad()
        model(inputs(), step % 2).sum().backward()
    spoil(model.module, "second.weight", math.nan)
    with pytest.raises(RuntimeError, match=r"for 'second\.weight'"):
        model(inputs(), 1).sum().backward()


def with_a_sparse_gradient() -> None:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)), check_gradients="skip")
    model(torch.tensor([1, 2])).sum().backward()
    assert model.skipped_steps().num_steps == 0
    model(torch.tensor([1, 2])).mul(math.inf if dist.get_rank() == 0 else 1.0).sum().backward()
    assert model.skipped_steps().num_steps == 1


def with_uneven_inputs() -> None:
    """Ranks check nothing in join()."""
    model = DDP(linear_chain(), check_gradients="raise", **SMALL_BUCKETS)
    with model.join():
        for _ in range(3 + 2 * dist.get_rank()):
            backward(model)


def refusing() -> None:
    chain = linear_chain()
    for arguments, message in (
        ({"check_gradients": "warn"}, "check_gradients is 'warn', expected None, 'raise' or 'skip'"),
        ({"spike_factor": 5.0}, "spike_factor is 5.0 without check_gradients"),
        ({"check_gradients": "skip", "spike_factor": 0.5}, "spike_factor is 0.5, expected a factor above 1"),
        ({"check_gradients": "skip", "spike_factor": math.nan}, "spike_factor is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            DDP(chain, **arguments)
    model = DDP(chain, check_gradients="skip")
    optim.SGD(model.parameters(), lr=0.1).step_in_backward(model)
    with pytest.raises(NotImplementedError, match="check_gradients does not go together with step_in_backward"):
        backward(model)
    narrow = linear_chain().bfloat16()
    main_grads(narrow)
    model = DDP(narrow, check_gradients="skip")
    with pytest.raises(NotImplementedError, match="check_gradients does not go together"):
        backward(model, inputs().bfloat16())


def asking_for_different_things() -> None:
    with pytest.raises(RuntimeError, match="check_gradients"):
        DDP(linear_chain(), check_gradients="raise" if dist.get_rank() == 0 else None)


@pytest.mark.parametrize(
    "function",
    [
        accumulating,
        finding_on_both_ranks,
        large_but_finite,
        with_unused,
        with_a_sparse_gradient,
        with_uneven_inputs,
        refusing,
        asking_for_different_things,
    ],
)
def test_check(on_ranks: OnRanks, function: Callable[[], None]) -> None:
    on_ranks(function)
