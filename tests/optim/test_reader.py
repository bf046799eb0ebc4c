"""Tests what a reader keeps between steps: a change in between counts as in a step that reads everything again."""

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import optim
from drivetrain.optim.base import FusedOptimizer
from drivetrain.optim.kept import kept_of

COUNT = 200  # parameters: more than one thread's share
CHANGED = COUNT - 3  # the parameter that most changes concern
Change = Callable[[FusedOptimizer, list[nn.Parameter]], None]


def fill(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        grad = torch.randn(param.shape, generator=generator)
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.copy_(grad)


def new_grads(_: FusedOptimizer, params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = None


def one_new_grad(_: FusedOptimizer, params: list[nn.Parameter]) -> None:
    params[CHANGED].grad = torch.empty_like(params[CHANGED])


def strided_grad(_: FusedOptimizer, params: list[nn.Parameter]) -> None:
    params[CHANGED].grad = torch.empty(3, 10).t()[::2]


def moved_data(_: FusedOptimizer, params: list[nn.Parameter]) -> None:
    params[CHANGED].data = params[CHANGED].data.clone()


def moved_grad_data(_: FusedOptimizer, params: list[nn.Parameter]) -> None:
    grad = params[CHANGED].grad
    assert grad is not None
    grad.data = torch.empty_like(grad)


def smaller_param(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> None:
    params[CHANGED].data = params[CHANGED].data[:2].clone()
    params[CHANGED].grad = None
    optimizer.state.pop(params[CHANGED], None)


def swapped_tensor(_: FusedOptimizer, params: list[nn.Parameter]) -> None:
    params[CHANGED].grad = None
    torch.utils.swap_tensors(params[CHANGED], nn.Parameter(params[CHANGED].detach() * 2))


def swapped_state(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> None:
    state = optimizer.state[params[CHANGED]]
    for name in [name for name in state if name != "step"]:
        torch.utils.swap_tensors(state[name], state[name] * 2)


def new_state(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> None:
    state = optimizer.state[params[CHANGED]]
    for name in state:
        state[name] = state[name].clone() * 2


def moved_state(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> None:
    for value in optimizer.state[params[CHANGED]].values():
        value.data = value.data.clone() * 2


def no_state(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> None:
    optimizer.state.pop(params[CHANGED], None)


def later_step(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> None:
    if "step" in optimizer.state[params[CHANGED]]:
        optimizer.state[params[CHANGED]]["step"] += 5


def earlier_steps(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> None:
    for param in params:
        if "step" in optimizer.state[param]:
            optimizer.state[param]["step"].fill_(1)


def other_numbers(optimizer: FusedOptimizer, _: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.param_groups[1]["weight_decay"] = 0.25


def other_order(optimizer: FusedOptimizer, _: list[nn.Parameter]) -> None:
    optimizer.param_groups[1]["params"].reverse()


def moved_between_groups(optimizer: FusedOptimizer, _: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())


def new_group(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> None:
    params.append(nn.Parameter(torch.ones(7)))
    optimizer.add_param_group({"params": [params[-1]]})


def other_storage(optimizer: FusedOptimizer, _: list[nn.Parameter]) -> None:
    optimizer.param_groups[1]["state_bits"] = 16


def zeroing(optimizer: FusedOptimizer, _: list[nn.Parameter]) -> None:
    optimizer.zero_grads_in_step = not optimizer.zero_grads_in_step


def clipping(optimizer: FusedOptimizer, _: list[nn.Parameter]) -> None:
    optimizer.max_grad_norm = 0.5


def skipped_step(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> None:
    fill(params, 99)
    optimizer.found_inf = 1.0
    optimizer.step()
    del optimizer.found_inf


def steps_without_a_gradient(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> None:
    fill(params, 98)
    params[CHANGED].grad = None
    for _ in range(3):
        optimizer.step()


def a_scale_for_one_step(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> None:
    fill(params, 97)
    optimizer.grad_scale = 4.0
    optimizer.step()
    del optimizer.grad_scale


def loaded(optimizer: FusedOptimizer, _: list[nn.Parameter]) -> None:
    reader = kept_of(optimizer).reader
    optimizer.load_state_dict(optimizer.state_dict())
    kept_of(optimizer).reader = reader  # It must notice the new states itself.


CHANGES: list[Change] = [
    new_grads,
    one_new_grad,
    strided_grad,
    moved_data,
    moved_grad_data,
    smaller_param,
    swapped_tensor,
    swapped_state,
    new_state,
    moved_state,
    no_state,
    later_step,
    earlier_steps,
    other_numbers,
    other_order,
    moved_between_groups,
    new_group,
    other_storage,
    zeroing,
    clipping,
    skipped_step,
    steps_without_a_gradient,
    a_scale_for_one_step,
    loaded,
]


class Run:
    """Trains parameters of one optimizer, which reads everything again in each step if asked to."""

    def __init__(self, name: str, reads_all: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(torch.randn(5, 3, generator=generator)) for _ in range(COUNT)]
        groups = [{"params": self.params[:50]}, {"params": self.params[50:], "weight_decay": 0.5}]
        self.optimizer: Any = getattr(optim, name)(groups, lr=0.01)
        self.reads_all = reads_all

    def step(self, seed: int) -> None:
        fill(self.params, seed)
        if self.reads_all:
            kept_of(self.optimizer).reader = None
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*(param.detach() for param in self.params), *(param.grad for param in self.params), *states]


def expect_same(runs: list[Run]) -> None:
    for a, b in zip(*(run.values() for run in runs), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_steps_counts(change: Change, name: str) -> None:
    runs = [Run(name, reads_all) for reads_all in (False, True)]
    for run in runs:
        for seed in range(4):
            run.step(seed)
        change(run.optimizer, run.params)
        for seed in range(4, 8):
            run.step(seed)
    expect_same(runs)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_any_sequence_of_changes(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    changes = [change for change in CHANGES if change is not smaller_param]  # others set a gradient of the first shape
    order = [changes[index] for index in torch.randint(len(changes), (60,), generator=generator).tolist()]
    runs = [Run(name, reads_all) for reads_all in (False, True)]
    for seed, change in enumerate(order):
        for run in runs:
            change(run.optimizer, run.params)
            run.step(seed)
        expect_same(runs)


def state_of(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = optimizer.state[params[CHANGED]]
    return state


def replaces(state: dict[str, Tensor]) -> None:
    state["exp_avg"] = state["exp_avg"].clone() * 2


def moves(tensor: Tensor | None) -> None:
    assert tensor is not None
    tensor.data = tensor.data.clone() * 2


Taken = Callable[[FusedOptimizer, list[nn.Parameter]], Any]
Changed = Callable[[Any, list[nn.Parameter]], None]
# Ways to keep a reference to the state between steps, and to change it later without a look at optimizer.state.
KEPT: dict[str, tuple[Taken, Changed]] = {
    "tensor": (lambda o, p: state_of(o, p)["exp_avg"], lambda kept, _: moves(kept)),
    "step": (lambda o, p: state_of(o, p)["step"], lambda kept, _: moves(kept)),
    "weak": (lambda o, p: weakref.ref(state_of(o, p)["exp_avg"]), lambda kept, _: moves(kept())),
    "dict": (state_of, lambda kept, _: replaces(kept)),
    "all": (lambda o, _: o.state, lambda kept, p: replaces(kept[p[CHANGED]])),
    "values": (lambda o, _: o.state.values(), lambda kept, _: replaces([*kept][CHANGED])),
    "iterator": (lambda o, _: iter(o.state.values()), lambda kept, _: replaces([*kept][CHANGED])),
    "list": (lambda o, _: [*o.state.values()], lambda kept, _: replaces(kept[CHANGED])),
    "state_dict": (lambda o, _: o.state_dict(), lambda kept, _: moves(kept["state"][CHANGED]["exp_avg"])),
    "copy": (lambda o, _: copy.copy(o), lambda kept, p: replaces(kept.state[p[CHANGED]])),
    "swap": (lambda o, p: state_of(o, p)["exp_avg"], lambda kept, _: torch.utils.swap_tensors(kept, kept.clone() * 2)),
}


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("kept", KEPT)
def test_a_state_that_other_code_refers_to_is_read_in_every_step(kept: str, steps_before: int) -> None:
    runs = [Run("AdamW", reads_all) for reads_all in (False, True)]
    for run in runs:
        for seed in range(4):
            run.step(seed)
        take, change = KEPT[kept]
        reference = take(run.optimizer, run.params)
        for seed in range(4, 4 + steps_before):
            run.step(seed)
        change(reference, run.params)
        for seed in range(8, 12):
            run.step(seed)
    expect_same(runs)


@pytest.mark.parametrize("freed", ["param", "exp_avg"])
def test_states_in_one_block_of_memory_that_is_freed(freed: str) -> None:
    """Frees memory through another tensor than the state's."""
    run = Run("AdamW", reads_all=False)
    run.step(0)
    block = torch.stack([run.optimizer.state[param]["exp_avg"] for param in run.params])
    for param, state in zip(run.params, block.unbind(), strict=True):
        run.optimizer.state[param]["exp_avg"] = state
    del state
    for seed in range(1, 4):
        run.step(seed)
    before = [param.detach().clone() for param in run.params]
    (run.params[CHANGED].data if freed == "param" else block).untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has been freed"):
        run.optimizer.step()
    for index, (param, value) in enumerate(zip(run.params, before, strict=True)):
        assert (freed == "param" and index == CHANGED) or torch.equal(param, value)


def reshaped(_: FusedOptimizer, params: list[nn.Parameter]) -> None:
    params[CHANGED].data = params[CHANGED].data.reshape(3, 5)
    params[CHANGED].grad = torch.ones(3, 5)


def no_memory(_: FusedOptimizer, params: list[nn.Parameter]) -> None:
    params[CHANGED].untyped_storage().resize_(0)


def no_state_memory(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> None:
    optimizer.state[params[CHANGED]]["exp_avg"].untyped_storage().resize_(0)


def cast(_: FusedOptimizer, params: list[nn.Parameter]) -> None:
    params[CHANGED].data = params[CHANGED].data.to(torch.bfloat16)
    params[CHANGED].grad = torch.ones(5, 3, dtype=torch.bfloat16)


def one_memory(_: FusedOptimizer, params: list[nn.Parameter]) -> None:
    params[CHANGED].data = params[0].data


def bad_number(optimizer: FusedOptimizer, _: list[nn.Parameter]) -> None:
    optimizer.param_groups[1]["eps"] = math.nan


def grads_in_one_memory(optimizer: FusedOptimizer, params: list[nn.Parameter]) -> None:
    optimizer.zero_grads_in_step = True
    optimizer.step()
    optimizer.step()
    params[CHANGED].grad = params[0].grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_memory, f"parameter {CHANGED - 50} of.*memory of it has been freed"),
        (no_state_memory, "memory of its state has been freed"),
        (cast, "was Float in the step before"),
        (one_memory, "share memory"),
        (bad_number, "eps is nan"),
        (reshaped, r"is Float of shape \[5, 3\].*expected a floating tensor of shape \[3, 5\]"),
        (grads_in_one_memory, "share the memory of a gradient"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_error_leaves_everything_as_it_was(change: Change, message: str) -> None:
    run = Run("AdamW", reads_all=False)
    for seed in range(4):
        run.step(seed)
    change(run.optimizer, run.params)
    whole = [value for value in run.values() if value.untyped_storage().nbytes() > 0]
    before = [value.clone() for value in whole]
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=message):
            run.optimizer.step()
    for a, b in zip(before, whole, strict=True):
        assert torch.equal(a, b)


def test_versions_count_steps() -> None:
    run = Run("AdamW", reads_all=False)
    for seed in range(6):
        before = [param._version for param in run.params]
        run.step(seed)
        assert [param._version for param in run.params] == [version + 1 for version in before]


def test_a_freed_gradient_is_not_read() -> None:
    """Gradients that a step has read are freed and their memory is used again."""
    runs = [Run("SGD", reads_all) for reads_all in (False, True)]
    for run in runs:
        for seed in range(6):
            run.step(seed)
            run.optimizer.zero_grad()
            _ = [torch.full((5, 3), math.nan) for _ in range(COUNT)]
        fill(run.params, 7)
    expect_same(runs)
