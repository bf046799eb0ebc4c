"""Tests that drivetrain.checkpoint raises where gradients would differ, and what its messages say."""

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from regions import Block, plain
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointError

from drivetrain import checkpoint


class Wandering(nn.Module):
    """Differs in its second call from the first in the way that `change` names."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change, self.calls = change, 0
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        again = self.calls > 1
        if self.change == "fewer" and again:
            return self.inner(x)
        if self.change == "more" and again:
            x = x.exp().sin()
        if self.change == "shape" and again:
            x = x[:2]
        if self.change == "dtype" and again:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x).float().exp()
        if self.change == "buffer":
            assert isinstance(self.scale, Tensor)
            self.scale.add_(1)
            x = x * self.scale
        if self.change == "value" and again:
            x = x + 1
        return self.inner(x).exp()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fewer", r"Wandering saved 4 tensors for backward and only 3 when it was called again\.\n  The first missing "
         r"one: torch.float32 \[3, 4\] on cpu, output of ExpBackward0\nUsually the function took another path"),
        ("more", r"saved 4 tensors .* and at least 5 .*\n  The first additional one is saved in \w+.* of Wandering \("
         r"recompute/test_checkpoint_errors.py:\d+ in forward\)|tensor 2 of 4 .* other metadata"),
        ("shape", r"tensor 1 of 4 that Wandering saved for backward has other metadata when it is recomputed\.\n"
         r"  forward: torch.float32 \[3, 4\] on cpu\n  recomputed: torch.float32 \[2, 4\] on cpu.* in inner.0 of "
         r"Wandering \("),
        ("dtype", r"forward: torch.float32 .*\n  recomputed: torch.bfloat16 .* in inner.0 of Wandering \("),
        ("buffer", r"buffer 'scale' of Wandering \(torch.float32 \[4\] on cpu\), which Wandering saved for backward, "
         r"has been modified in place since, in Wandering \(recompute/test_checkpoint_errors.py:"
         r"\d+ in forward\): .* optimizer"),
    ],
)  # fmt: skip
def test_another_path_is_an_error(change: str, message: str, early_stop: bool) -> None:
    model, x = Wandering(change), torch.randn(3, 4, requires_grad=True)
    out = checkpoint(model, x, early_stop=early_stop)
    with pytest.raises(CheckpointError, match=message):
        out.sum().backward()
    assert x.grad is None


def test_other_values_are_an_error_with_verify() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    out = checkpoint(Wandering("value"), x, verify=True)
    with pytest.raises(
        CheckpointError,
        match=r"tensor 1 of 4 that Wandering saved for backward has other values .*\n  forward: .* in inner.0 "
        r"of Wandering \(rec.*\n  recomputed: .*AddBackward0, in inner.0 of Wandering .*\nUsually random numbers of ",
    ):
        out.sum().backward()
    x = torch.ones(100, requires_grad=True)
    out = checkpoint(nn.Sequential(nn.Dropout(0.5), nn.Tanh()), x, verify=True, preserve_rng_state=False)
    with pytest.raises(CheckpointError, match=r"Usually dropout .* as preserve_rng_state is False"):
        out.sum().backward()


def test_a_parameter_that_was_stepped() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    out = checkpoint(model, x)
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"parameter '0.weight' of Sequential .* modified in place since, in 0"):
        out.sum().backward()
    out = checkpoint(model, x)
    out.sum().backward()  # nothing was left behind


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y, z: x.add_(1), "argument 0 of <lambda> was modified in place after the forward"),
        (lambda x, y, z: y.mul_(2), r"argument 1\['deep'\]\[1\] of <lambda> was modified"),
        (lambda x, y, z: z[0].zero_(), r"argument 'z' of <lambda> was modified"),
    ],
)
def test_an_argument_that_is_written_afterwards(change: Callable[..., Any], message: str) -> None:
    x = torch.randn(3, requires_grad=True).clone()
    y, z = torch.randn(3), torch.randn(3)
    out = checkpoint(lambda x, y, *, z: (x * y["deep"][1]).exp() * z, x, {"deep": [1, y]}, z=z)
    with torch.no_grad():
        change(x, y, z)
    with pytest.raises(CheckpointError, match=message):
        out.sum().backward()


@pytest.mark.parametrize("grad", [False, True])
def test_an_argument_that_the_function_writes(grad: bool) -> None:
    x = torch.randn(3, requires_grad=True)
    argument = x.clone() if grad else torch.randn(3)
    region = weakref.ref(argument)
    with pytest.raises(CheckpointError, match="argument 1 of <lambda> was modified in place by the function itself"):
        checkpoint(lambda x, a: a.mul_(2).exp() * x, x, argument)
    del argument
    gc.collect()
    assert region() is None


def test_a_saved_tensor_that_the_function_writes() -> None:
    """Raises as it does without checkpointing. Gradients are right if recomputation stops before the write."""

    def function(x: Tensor, more: int) -> Tensor:
        y = x.exp()
        z = y * 2
        y.add_(1)
        return z.sin() if more else z

    x = torch.randn(3, requires_grad=True)
    for call in (plain, checkpoint):
        with pytest.raises(RuntimeError, match=r"modified .*in.?place"):
            call(function, x, 1).sum().backward()
    checkpoint(function, x, 0).sum().backward()
    assert torch.equal(x.grad, (x.exp() * 2).detach())


def test_subclasses_are_not_verified() -> None:
    x = TwoTensor(torch.randn(3), torch.randn(3)).requires_grad_()
    gradient = torch.autograd.grad(checkpoint(lambda x: x.exp().sin(), x).sum(), x)[0]
    assert torch.equal(gradient.a, (x.exp().cos() * x.exp()).detach().a)
    with pytest.raises(NotImplementedError, match="verify=True cannot hash the values of a saved tensor subclass"):
        checkpoint(lambda x: x.exp().sin(), x, verify=True)


def test_names_of_functions() -> None:
    block, x = Block(), torch.randn(2, 5, 16, requires_grad=True)
    for function in (block, block.forward, functools.partial(block.forward)):
        with torch.device("cpu"):
            out = checkpoint(function, x)
        with torch.no_grad():
            x.zero_()
        with pytest.raises(CheckpointError, match="argument 0 of Block was modified"):
            out.sum().backward()


def test_checks_may_be_let_go() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    checkpoint(Wandering("buffer"), x, determinism_check="none").sum().backward()
    with pytest.raises(ValueError, match=r"determinism_check is 'all', expected one of \('default', 'none'\)"):
        checkpoint(Wandering("buffer"), x, determinism_check="all")


@pytest.mark.parametrize("call", [1, 2])
def test_an_error_of_the_function(call: int) -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        y = F.dropout(x.exp())
        if len(calls) == call:
            raise LookupError("of the function")
        return y.sin()

    x = torch.randn(3, requires_grad=True)
    torch.manual_seed(0)
    state = None
    with torch.autocast("cpu", torch.bfloat16), contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(LookupError, match="of the function"))
        out = checkpoint(function, x)
        state = torch.get_rng_state()
        out.sum().backward()
    assert (state is not None) == (call == 2)
    if state is not None:
        assert torch.equal(torch.get_rng_state(), state)
    checkpoint(function, x).sum().backward()
    assert not torch.is_autocast_enabled("cpu")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        x.exp()
    assert len(saved) == 1  # the hooks outside are in force again
