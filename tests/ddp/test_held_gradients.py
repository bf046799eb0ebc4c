"""Tests that tensors which a script keeps over a `.grad` show what they show under torch's class."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from drivetrain import DistributedDataParallel
from ranks import run_on

STEPS = 5


class Weak:
    """Refers to a tensor without keeping it."""

    def __init__(self, tensor: Tensor) -> None:
        self._refer = weakref.ref(tensor)

    def shows(self) -> Tensor | None:
        return self._refer()


class Strong:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def shows(self) -> Tensor | None:
        return self._tensor


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": Strong,
    "a weak reference": Weak,
    "a view": lambda grad: Strong(grad[None]),
    "a slice": lambda grad: Strong(grad[1:, ::2]),
    "detached": lambda grad: Strong(grad.detach()),
    "data": lambda grad: Strong(grad.data),
    "another dtype": lambda grad: Strong(grad.view(torch.int32)),
    "transposed": lambda grad: Strong(grad.t()),
    "a weak reference to a view": lambda grad: Weak(grad[None]),
    "the storage": lambda grad: Strong(
        torch.empty(0).set_(grad.untyped_storage(), grad.storage_offset(), grad.shape, grad.stride())
    ),
}


def replace_data(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.data = param.grad.data * 3


def set_another(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.set_(param.grad * 2)


def round_trip(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad.half().float()


def transpose(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.data = param.grad.data.t().clone(memory_format=torch.contiguous_format).t()


def assign_view(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad.view(-1).view_as(param)


def assign_part_of_another(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.data = torch.stack([param.grad, param.grad])[1]


def empty_and_drop(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.data = torch.empty_like(param.grad).fill_(7)
    param.grad = None


def scale_in_place(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(2)


def drop(param: Tensor) -> None:
    param.grad = None


REPLACEMENTS = [
    replace_data,
    set_another,
    round_trip,
    transpose,
    assign_view,
    assign_part_of_another,
    empty_and_drop,
    scale_in_place,
    drop,
]


class Weights(nn.Module):
    """A parameter for each kind of holder."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.arange(16.0).view(4, 4) + i for i in range(len(HOLDERS)))

    def forward(self, scale: float) -> Tensor:
        return torch.stack([(weight * weight * scale).sum() for weight in self.weights]).sum()


def copies(held: list[list[Any]]) -> list[list[Tensor | None]]:
    return [[None if (shown := one.shows()) is None else shown.clone() for one in of_param] for of_param in held]


def observe(wrapper: type, replace: Callable[[Tensor], None], zeroes: bool, again: bool) -> list[Any]:
    """Trains, keeps tensors over gradients, and replaces gradients. Returns what all of them show after each step."""
    module = Weights()
    ddp = wrapper(module)
    held: list[list[Any]] = [[] for _ in HOLDERS]
    seen: list[Any] = []
    for step in range(STEPS):
        ddp(float(step + 1 + dist.get_rank())).backward()
        grads = [param.grad for param in module.weights]
        seen.append(([grad.clone() for grad in grads], copies(held)))
        del grads
        for param, keep, of_param in zip(module.weights, HOLDERS.values(), held, strict=True):
            of_param.append(keep(param.grad))
            replace(param)
            if again and param.grad is not None:
                of_param.append(keep(param.grad))
            if zeroes:
                param.grad = None
    return seen


def differences(ours: list[Any], theirs: list[Any]) -> list[str]:
    found = []
    for step, ((our_grads, our_held), (their_grads, their_held)) in enumerate(zip(ours, theirs, strict=True)):
        for index, kind in enumerate(HOLDERS):
            if not torch.equal(our_grads[index], their_grads[index]):
                found.append(f"step {step}: .grad with {kind}")
            for age, (mine, expected) in enumerate(zip(our_held[index], their_held[index], strict=True)):
                # A tensor that nobody keeps may end sooner or later than torch's.
                if mine is not None and expected is not None and not torch.equal(mine, expected):
                    found.append(f"step {step}: {kind}, kept as number {age}")
                if (mine is None or expected is None) and not kind.startswith("a weak reference"):
                    found.append(f"step {step}: {kind}, kept as number {age}, is gone")
    return found


def compare_all() -> list[str]:
    found = []
    for replace in REPLACEMENTS:
        for zeroes in (False, True):
            for again in (False, True):
                ours = observe(DistributedDataParallel, replace, zeroes, again)
                theirs = observe(TorchDDP, replace, zeroes, again)
                found += [f"{replace.__name__}, {zeroes=}, {again=}: {what}" for what in differences(ours, theirs)]
    return found


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_kept_tensors_show_what_torchs_do(on_ranks: Callable[..., list[Any]], transport: str) -> None:
    for found in on_ranks(compare_over, transport):
        assert found == []


def compare_over(transport: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRIVETRAIN_TRANSPORT", transport)
        return compare_all()


def accumulate_over_replaced(make: Callable[[nn.Module], nn.Module], replace: Callable[[Tensor], None]) -> list[Tensor]:
    """Returns the gradients of accumulated backward passes, between which a script replaces what lies under `.grad`."""
    module = Weights()
    net = make(module)
    for step in range(STEPS):
        net(float(step + 1)).backward()
        for param in module.weights:
            replace(param)
    return [param.grad for param in module.weights]


@run_on(2)
def test_replaced_memory_of_views_is_added_to_as_without_a_wrapper() -> None:
    """torch's class loses what a script puts there (docs/limitations.md)."""
    for replace in (replace_data, set_another):
        ours = accumulate_over_replaced(lambda net: DistributedDataParallel(net, gradient_as_bucket_view=True), replace)
        torch.testing.assert_close(ours, accumulate_over_replaced(lambda net: net, replace), rtol=0, atol=0)
