"""Checks budgets of models that use torch.cond, scan and while_loop, or helper functions that torch.compile made."""

from collections.abc import Callable

import pytest
import torch
from models import assert_same_bits, gradients
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import drivetrain


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))


def scans(x: Tensor) -> Tensor:
    return scan(lambda carry, row: ((carry + row).tanh(), (carry * row).clone()), torch.zeros(64), x)[1]


def loops(x: Tensor) -> Tensor:
    with torch.no_grad():
        start = (torch.zeros((), dtype=torch.int64), x.detach())
        _, y = while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, t * 1.1), start)
    return x + y


def helper(x: Tensor) -> Tensor:
    return x.sin() * x.cos()


class Model(nn.Module):
    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.inner(self.first(x).tanh())).tanh()).square().sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at it
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # scan calls it
@pytest.mark.parametrize("inner", [branches, scans, loops, "aot_eager", "eager"])
def test_gradients_have_the_same_bits(inner: "Callable[[Tensor], Tensor] | str") -> None:
    """The first step of planning compiles what the model calls."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(torch.compile(helper, backend=inner) if isinstance(inner, str) else inner)
    x = torch.randn(96, 8)

    def step() -> None:
        model(x).backward()

    # What torch traces of a scan in the first step decides how much of it can be recomputed.
    plan = drivetrain.activation_budget(model, step, "97%" if inner is scans else "70%")
    planned = gradients(model, step)
    assert plan.measured_bytes <= plan.budget_bytes
    plan.remove()
    model.zero_grad()
    assert_same_bits(planned, gradients(model, step))
