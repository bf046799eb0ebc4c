"""Checks the profile from which an activation budget is planned: operations, their times and their order."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from models import Step, assert_same_bits, forget_all, gradients
from torch import Tensor, nn

import drivetrain
from drivetrain.budget.trace import Trace, profile


class Doubled(nn.Module):
    """Calls an operation of any library."""

    def __init__(self, double: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.double = nn.Linear(16, 16), double

    def forward(self, x: Tensor) -> Tensor:
        return self.double(self.linear(x)).sin().sum()


def define(schema: str, function: Callable[[Tensor], Tensor]) -> torch.library.Library:
    """Defines an operation by a function, below autograd and for it, until the library's `_destroy()`."""
    library = torch.library.Library("test_activation_places", "FRAGMENT")
    library.define(schema)
    for key in ("CompositeExplicitAutograd", "Autograd"):
        library.impl(schema.split("(")[0], function, key)
    return library


class ManyReaders(nn.Module):
    """Computes many values from one that autograd does not save."""

    def __init__(self, readers: int) -> None:
        super().__init__()
        self.linear, self.readers = nn.Linear(16, 16), readers

    def forward(self, x: Tensor) -> Tensor:
        shared = self.linear(x) + 1
        return torch.stack([(shared + i).sin() for i in range(self.readers)]).sum()


def called(trace: Trace) -> dict[str, list[bool]]:
    """Returns, per name, if each operation was re-executed."""
    found: dict[str, list[bool]] = {}
    for name, _, seconds, _, _ in trace.passes[0].ops:
        found.setdefault(name, []).append(seconds is not None)
    return found


def test_forward_and_backward_call_an_operation_of_many_readers_once_more() -> None:
    torch.manual_seed(0)
    model, x = ManyReaders(readers=40), torch.randn(64, 16)
    calls = 0

    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.test_activation_places.counted(x)

    def count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x + 1

    library = define("counted(Tensor x) -> Tensor", count)
    model.linear = Counted()
    x.requires_grad_(True)
    trace, _ = profile(model, lambda: model(x).backward())
    library._destroy()
    assert calls == 3
    assert all(all(of_name) for of_name in called(trace).values())


def test_a_profile_leaves_random_numbers_as_a_step_does() -> None:
    """Covers an operation that draws random numbers without declaring it."""
    torch.manual_seed(0)
    library = define("noisy(Tensor x) -> Tensor", lambda x: x + torch.rand(x.shape))
    model, x = Doubled(torch.ops.test_activation_places.noisy), torch.randn(8, 16)

    def step() -> None:
        torch.manual_seed(1)
        model(x).backward()

    step()
    expected = torch.get_rng_state()
    trace, _ = profile(model, step)
    assert called(trace)["test_activation_places::noisy"] == [True]
    assert torch.equal(torch.get_rng_state(), expected)
    library._destroy()


def test_an_operation_that_takes_anothers_place() -> None:
    """The dispatcher reuses the entry of a removed operation, as when a notebook's cell runs again."""
    x = torch.randn(8, 16)
    for count in range(8):
        name = f"double{count}"
        if count % 2:
            library = define(f"{name}(Tensor(a!) x) -> Tensor(a!)", lambda x: x.mul_(2))
        else:
            library = define(f"{name}(Tensor x) -> Tensor", lambda x: x * 2)
        torch.manual_seed(0)
        model = Doubled(getattr(torch.ops.test_activation_places, name))

        def step(model: nn.Module = model) -> None:
            model.zero_grad()
            model(x).backward()

        expected = gradients(model, step)
        trace, _ = profile(model, step)
        assert f"test_activation_places::{name}" in [op[0] for op in trace.passes[0].ops]
        forget_all(model, step)
        assert_same_bits(gradients(model, step), expected)
        library._destroy()


def test_an_operation_that_is_removed_before_backward_is_told() -> None:
    x = torch.randn(8, 16)
    library = define("double(Tensor x) -> Tensor", lambda x: x * 2)
    model = Doubled(torch.ops.test_activation_places.double)
    _, recorder = forget_all(model, lambda: model(x).backward())
    loss = model(x)
    library._destroy()
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="test_activation_places::double was removed"):
        loss.backward()
    del loss
    assert recorder.live_bytes == 0


def test_what_makes_something_of_nothing_takes_time_too() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            for _ in range(4):
                x = x * torch.rand(256, 64)
            return x.sum()

    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(256, 64)
    plan = drivetrain.activation_budget(model, lambda: model(x).backward(), "40%")
    assert "recomputed" in str(plan)
    assert any(op[0] == "aten::rand" or op[0] == "aten::uniform_" for op in plan._trace.passes[0].ops)
    assert plan.planned_seconds > 0
    assert sum(block["planned_seconds"] for block in plan.blocks()) > 0


def test_statistics_that_the_pass_has_made_are_updated_once() -> None:
    class Fresh(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

        def forward(self, x: Tensor) -> Tensor:
            self.norm.running_mean = self.norm.running_mean.clone()
            return self.norm(self.linear(x)).tanh().square().sum()

    torch.manual_seed(0)
    model, x = Fresh(), torch.randn(64, 16) + 3

    def step() -> None:
        model.zero_grad()
        model(x).backward()

    before = copy.deepcopy(model.state_dict())
    expected = gradients(model, step) | {"mean": model.norm.running_mean.clone()}
    model.load_state_dict(before)
    profile(model, step)
    torch.testing.assert_close(model.norm.running_mean, expected["mean"], rtol=0, atol=0)
    forget_all(model, step)
    model.load_state_dict(before)
    assert_same_bits(gradients(model, step) | {"mean": model.norm.running_mean.clone()}, expected)


def test_operations_that_do_the_same_take_the_same_time(gpt: tuple[nn.Module, Step]) -> None:
    """Otherwise noise would decide among equal layers."""
    model, step = gpt
    trace, _ = profile(model, step)
    layers = [
        [(op[0], op[2]) for op in trace.passes[0].ops if trace.modules[op[1]].startswith(f"blocks.{i}.")]
        for i in range(len(model.blocks))
    ]
    assert len(layers) > 1
    assert len(layers[0]) > 4
    assert all(layer == layers[0] for layer in layers)
    seconds = {op[2] for op in trace.passes[0].ops}
    assert len(seconds) > 4
    assert None not in seconds


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_changed_between_forward_and_backward_is_kept(device: str) -> None:
    """Recomputation would differ from what forward saved, and torch does not see the change. So the step runs twice."""
    torch.manual_seed(0)
    model, x, scale = nn.Linear(16, 16).to(device), torch.randn(64, 16, device=device), torch.rand(16, device=device)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * scale).tanh().sum()

    runs = 0

    def step() -> None:
        nonlocal runs
        runs += 1
        loss = scaled(x)
        scale.data[:2].neg_()  # changes single bits, an even number of times
        try:
            loss.backward()
        finally:
            scale.data[:2].neg_()

    scaled = Scaled()
    trace, _ = profile(scaled, step)
    by_name = {op[0]: [trace.passes[0].values[write][2] for write in op[4]] for op in trace.passes[0].ops}
    assert by_name["aten::addmm"] == [True]
    assert by_name["aten::tanh"] == [False]
    assert runs == 2


def test_zeros_that_a_later_part_reads_before_autograd_saves_them() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(30))
            self.weight = nn.Parameter(torch.randn(256))

        def forward(self, x: Tensor) -> Tensor:
            zeros = self.layers[0](x) * 0
            hidden = self.layers[2](self.layers[1](x).sin()).sin() + zeros
            hidden = hidden + zeros * self.weight
            for layer in self.layers[3:]:
                hidden = hidden + layer(hidden).sin()
            return hidden.sum()

    torch.manual_seed(0)
    model, x = Gated(), torch.randn(64, 256)
    expected = gradients(model, lambda: model(x).backward())
    model.zero_grad()
    profile(model, lambda: model(x).backward())
    assert_same_bits(gradients(model, lambda: None), expected)


@pytest.mark.parametrize("catches", [False, True])
def test_inputs_that_change_before_backward_are_not_read_again(catches: bool) -> None:
    """A write that torch counts is no error where autograd has not saved the tensor."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("average", torch.rand(16))

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) + self.average).tanh().sum()

    torch.manual_seed(0)
    model, x = Averaged(), torch.randn(8, 16)
    runs = 0

    def step() -> None:
        nonlocal runs
        runs += 1
        model.zero_grad()
        loss = model(x)
        model.average.mul_(0.9)
        try:
            loss.backward()
        except BaseException:
            if not catches:
                raise

    trace, _ = profile(model, step)
    assert runs == 2
    by_name = {op[0]: [trace.passes[0].values[write][2] for write in op[4]] for op in trace.passes[0].ops}
    assert by_name["aten::add"] == [False]
