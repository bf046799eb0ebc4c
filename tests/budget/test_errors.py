"""Checks the errors of activation budgets, and the state of the model after each."""

import itertools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from models import Step, assert_same_bits, forget_all, gradients, smallest_in
from torch import Tensor, nn

import drivetrain


def test_a_budget_that_is_too_small_names_the_smallest(gpt: tuple[nn.Module, Step]) -> None:
    model, step = gpt
    with pytest.raises(ValueError, match=r"budget is .* KiB: the smallest that is possible") as error:
        drivetrain.activation_budget(model, step, "1%")
    assert not model._forward_pre_hooks
    plan = drivetrain.activation_budget(model, step, smallest_in(error.value))
    assert plan.measured_bytes is not None
    assert plan.measured_bytes <= plan.budget_bytes


@pytest.mark.parametrize("budget", ["", "nine", "9 apples", 0, -1, "0GiB", "0%", "-5MiB"])
def test_what_is_no_budget_is_told(gpt: tuple[nn.Module, Step], budget: Any) -> None:
    with pytest.raises(ValueError, match="expected a number of bytes above 0"):
        drivetrain.activation_budget(*gpt, budget)


@pytest.mark.parametrize("budget", [True, 1.5, [3]])
def test_what_is_of_no_use_as_a_budget_is_told(gpt: tuple[nn.Module, Step], budget: Any) -> None:
    with pytest.raises(TypeError, match="expected a number of bytes above 0"):
        drivetrain.activation_budget(*gpt, budget)


def test_missing_arguments_are_told(gpt: tuple[nn.Module, Step]) -> None:
    model, step = gpt
    with pytest.raises(ValueError, match="step_fn is None"):
        drivetrain.activation_budget(model, budget="1GiB")
    with pytest.raises(ValueError, match="budget is None"):
        drivetrain.activation_budget(model, step)
    with pytest.raises(RuntimeError, match="step_fn did not call the model with gradients on"):
        drivetrain.activation_budget(nn.Linear(2, 2), step, "1GiB")


def test_what_is_kept_as_it_is_and_written_in_forward_counts_as_it_was() -> None:
    """Compares with a twin that writes over a copy. Without a budget, torch raises an error."""
    torch.manual_seed(0)

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.copies = self.writes = False

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
                y = x.sigmoid()
                if self.copies:
                    x = x.clone()
                if self.writes and layer is self.layers[-1]:
                    x.detach().zero_()
                x = x + y
            return x

    model, x = Writes(), torch.randn(4, 8)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    model.copies = model.writes = True
    expected = gradients(model, step)
    model.copies = model.writes = False
    drivetrain.activation_budget(model, step, "200%")
    model.writes = True
    assert_same_bits(gradients(model, step), expected)


def test_what_is_written_before_backward_needs_it_is_an_error(gpt: tuple[nn.Module, Step]) -> None:
    model, step = gpt
    forget_all(model, step)
    loss = model(torch.randint(50, (2, 24)))
    with torch.no_grad():
        next(iter(model.blocks[1].parameters())).add_(1)
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="was modified in place"):
        loss.backward()


@pytest.mark.parametrize("write", ["relu_", "detached", "no_grad"])
@pytest.mark.parametrize("share", ["90%", "60%", "50%"])
def test_a_result_that_is_written_after_the_pass(write: str, share: str) -> None:
    """Writes a result that autograd did not save, so torch allows the write; replays may need the result."""

    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.two(self.one(x)) + self.one(x)
            return y, sum((y * k).sigmoid().mean() for k in range(2, 8))

    torch.manual_seed(0)
    model = Backbone()
    x = torch.randn(32, 16)

    def step() -> None:
        y, other = model(x)
        if write == "relu_":
            (y.relu_().square().mean() + other).backward()
            return
        if write == "detached":
            y.detach()[::2] = 0
        else:
            with torch.no_grad():
                y.mul_(2)
        other.backward()

    expected = gradients(model, step)
    model.zero_grad()
    try:
        drivetrain.activation_budget(model, step, share)
        model.zero_grad()
        found = gradients(model, step)
    except torch.utils.checkpoint.CheckpointError as error:
        said = str(error)
    else:
        assert_same_bits(found, expected)
        return
    assert "was modified in place after the forward pass" in said


def test_a_step_without_backward_is_told(gpt: tuple[nn.Module, Step]) -> None:
    model, _ = gpt
    ids = torch.randint(50, (2, 24))
    with pytest.raises(RuntimeError, match="ran no backward"):
        drivetrain.activation_budget(model, lambda: model(ids), "60%")
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_pass_that_is_interrupted_leaves_nothing(error: type[BaseException]) -> None:
    torch.manual_seed(0)

    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Softplus())
            self.raises = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers(x)
            if self.raises:
                raise error
            return x.square().sum()

    model, x = Interrupted(), torch.randn(32, 64)
    plan = drivetrain.activation_budget(model, lambda: model(x).backward(), "100%")
    model.raises = True
    with pytest.raises(error):
        model(x)
    model.raises = False
    model(x).backward()
    assert plan.live_bytes == 0
    (torch.randn(64, 64, requires_grad=True) @ torch.randn(64, 64)).tanh().sum().backward()
    plan.reset_peak()
    (torch.randn(64, 64, requires_grad=True) @ torch.randn(64, 64)).tanh().sum().backward()
    assert plan.peak_bytes == 0


def test_data_that_is_written_behind_autograds_back() -> None:
    """Expects gradients of the values that forward read, like a model that saves a copy. Torch's own gradients use
    the values written later, because torch does not see the write."""
    torch.manual_seed(0)

    class Behind(nn.Module):
        def __init__(self, saves_copy: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.saves_copy = saves_copy

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y.data.add_(1)
            z = y.clone().sin() if self.saves_copy else y.sin()
            y.data.mul_(2)
            return (y.cos() * z).sum()

    def run(model: nn.Module) -> dict[str, Tensor]:
        return gradients(model, lambda: model(x).backward())

    x = torch.randn(4, 16)
    reference = Behind(saves_copy=True)
    expected = run(reference)
    model = Behind(saves_copy=False)
    model.load_state_dict(reference.state_dict())
    forget_all(model, lambda: model(x).backward())
    model.zero_grad()
    assert_same_bits(run(model), expected)
    again = Behind(saves_copy=False)
    drivetrain.activation_budget(again, lambda: again(x).backward(), "100%")


def test_a_step_that_fails_leaves_no_plan(gpt: tuple[nn.Module, Step]) -> None:
    model, step = gpt
    calls = itertools.count(1)

    def fails_late() -> None:
        step()
        if next(calls) == 2:
            raise OSError("the loader's disk is gone")

    with pytest.raises(OSError, match="disk is gone"):
        drivetrain.activation_budget(model, fails_late, "50%")
    assert not model._forward_pre_hooks
    drivetrain.activation_budget(model, step, 10**30)
