"""Checks which saved tensors of a planned model get hooks, and that hooks of other code see what they saw before."""

import torch
import torch.utils.checkpoint
from models import ABOVE, Step, ask_all_hooks, assert_same_bits, gradients
from torch import Tensor, nn

import drivetrain


def hooked_and_unhooked(loss: Tensor) -> tuple[int, int]:
    """Counts the saved tensors of a graph with hooks and without."""
    counts = [0, 0]
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [other for other, _ in node.next_functions]
        for name in dir(node):
            if not name.startswith("_raw_saved_"):
                continue
            raw = getattr(node, name)
            for saved in raw if isinstance(raw, tuple) else (raw,):
                try:
                    saved.register_hooks(lambda x: x, lambda x: x)
                except RuntimeError as error:
                    counts[0] += "already been set" in str(error)  # otherwise no tensor was saved
                else:
                    counts[1] += 1
    return counts[0], counts[1]


@ABOVE
def test_hooks_do_not_see_what_is_kept_as_it_is(gpt: tuple[nn.Module, Step]) -> None:
    model, step = gpt
    expected = gradients(model, step)
    ids = torch.randint(50, (2, 24))
    _, without = hooked_and_unhooked(model(ids))
    counts = {}
    for percent in (200, 60):
        plan = drivetrain.activation_budget(model, step, f"{percent}%")
        loss = model(ids)
        before = plan.live_bytes
        counts[percent] = hooked_and_unhooked(loss)
        assert sum(counts[percent]) == without
        del loss
        assert plan.live_bytes == 0
        ask_all_hooks(plan)
        loss = model(ids)
        assert plan.live_bytes == before
        assert hooked_and_unhooked(loss) == (without, 0)
        assert_same_bits(gradients(model, step), expected)
        plan.remove()
    assert counts[200][0] < without / 8  # the value that is released last holds the tape
    assert 1 < counts[60][0] < without


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
