"""Checks that saved-tensor hooks of other code see in a planned model what they saw before."""

import torch
import torch.utils.checkpoint
from models import assert_same_bits, gradients
from torch import Tensor, nn

import drivetrain


def hooks_that_note(seen: list[torch.Size]) -> torch.autograd.graph.saved_tensors_hooks:
    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)


def test_hooks_inside_a_pass_see_what_they_saw() -> None:
    torch.manual_seed(0)
    seen: list[torch.Size] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8 + i) for i in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                if index == 2:
                    with hooks_that_note(seen):
                        x = layer(x).tanh()
                else:
                    x = layer(x).tanh()
                x = x[:, :8]
            return x

    model, x = Watched(), torch.randn(4, 8)

    def step() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    expected = gradients(model, step)
    without = list(seen)
    for share in ("200%", "80%"):
        plan = drivetrain.activation_budget(model, step, share)
        seen.clear()
        assert_same_bits(gradients(model, step), expected)
        assert seen == without
        plan.remove()


def test_hooks_inside_an_operation_see_what_they_saw() -> None:
    """Uses an operation that a Python kernel for autograd composes of others."""
    seen: list[torch.Size] = []

    def scaled_sine(x: Tensor) -> Tensor:
        with hooks_that_note(seen):
            return (2 * x).sin()

    library = torch.library.Library("test_activation_budget", "FRAGMENT")
    library.define("scaled_sine(Tensor x) -> Tensor")
    library.impl("scaled_sine", scaled_sine, "Autograd")
    library.impl("scaled_sine", lambda x: (2 * x).sin(), "CPU")

    class Sines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.ops.test_activation_budget.scaled_sine(layer(x))
            return x

    model, x = Sines(), torch.randn(32, 16)

    def step() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    expected = gradients(model, step)
    without = len(seen)
    plan = drivetrain.activation_budget(model, step, "200%")
    seen.clear()
    assert_same_bits(gradients(model, step), expected)
    assert len(seen) == without > 0
    plan.remove()
