"""Tests that optimizer states go to the parameters of their names, and that another class of optimizer is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drivetrain
from drivetrain.checkpointing import Checkpointer
from drivetrain.checkpointing.state.training_state import state_dicts

CLASSES = (torch.optim.AdamW, drivetrain.optim.AdamW)


class Net(nn.Module):
    """Layers whose parameters have equal shapes, but gradients of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(inputs) * 10) * 10)


def orders(net: Net, loss_scale: nn.Parameter) -> dict[str, list[dict[str, Any]]]:
    """Returns groups of the same parameters in several orders; `loss_scale` is not in the model."""
    a, b, c = (layer.weight for layer in (net.first, net.second, net.third))
    return {
        "one group": [{"params": [a, b, c, loss_scale]}],
        "reversed": [{"params": [c, b, a, loss_scale]}],
        "rotated": [{"params": [loss_scale, b, c, a]}],
        "named": [{"params": [("c", c), ("a", a), ("b", b), ("scale", loss_scale)]}],
    }


def steps(net: Net, scale: nn.Parameter, optimizer: torch.optim.Optimizer, ckpt: Checkpointer, count: int) -> None:
    for step in range(count):
        (net(torch.full((2, 8), step + 1.0)).square().mean() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()


@pytest.mark.parametrize("kind", CLASSES, ids=["torch", "drivetrain"])
@pytest.mark.parametrize("order", ["reversed", "rotated", "named"])
@pytest.mark.filterwarnings("ignore:optimizer.0. has 1 parameters that are not in the model:UserWarning")
def test_states_follow_names(tmp_path: Path, kind: Callable[..., torch.optim.Optimizer], order: str) -> None:
    def made(order: str) -> tuple[Net, nn.Parameter, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net, scale = Net(), nn.Parameter(torch.ones(()))
        return net, scale, kind(orders(net, scale)[order], lr=0.01)

    net, scale, optimizer = made("one group")
    with Checkpointer(tmp_path, model=net, optimizer=optimizer, every=None) as ckpt:
        steps(net, scale, optimizer, ckpt, 3)
    before = {name: {**optimizer.state[param]} for name, param in net.named_parameters()}
    again, scale, other = made(order)
    with Checkpointer(tmp_path, model=again, optimizer=other, every=None) as ckpt:
        for name, param in again.named_parameters():
            for entry, value in before[name].items():
                torch.testing.assert_close(other.state[param][entry], value, rtol=0, atol=0)
        assert other.state[scale]["exp_avg"].shape == ()
        if order == "named":
            assert other.param_groups[0]["param_names"] == ["c", "a", "b", "scale"]


def test_nameless_states_follow_the_order_with_a_warning(tmp_path: Path) -> None:
    def made(order: str) -> tuple[Net, nn.Parameter, torch.optim.Optimizer, Checkpointer]:
        net, scale = Net(), nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD(orders(net, scale)[order], lr=0.01, momentum=0.9)
        return net, scale, optimizer, Checkpointer(tmp_path, model=net, optimizer=optimizer, every=None)

    net, scale, optimizer, ckpt = made("one group")
    with ckpt:
        steps(net, scale, optimizer, ckpt, 1)
    _, scale, optimizer, ckpt = made("rotated")
    with pytest.warns(UserWarning, match=r"optimizer\[0\] has 1 parameters that are not in the model"), ckpt:
        assert optimizer.state[scale]["momentum_buffer"].shape == ()


def test_other_parameters_are_refused(tmp_path: Path) -> None:
    net = Net()
    first, second = (torch.optim.SGD(one.parameters(), lr=0.01, momentum=0.9) for one in (net.first, net.second))
    with Checkpointer(tmp_path, model=net, optimizer=first, every=None) as ckpt:
        steps(net, nn.Parameter(torch.ones(())), first, ckpt, 1)
    ckpt = Checkpointer(tmp_path, model=net, optimizer=second, every=None)
    with pytest.raises(ValueError, match=r"optimizer\[0\] has .* 'second.weight', expected 'first.weight'"), ckpt:
        pytest.fail("the block has begun")


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch.SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "torch.AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "torch.Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "drivetrain.AdamW": lambda params: drivetrain.optim.AdamW(params, lr=0.1),
    "drivetrain.AdamW of 8 bits": lambda params: drivetrain.optim.AdamW(params, lr=0.1, state_bits=8),
    "drivetrain.SGD": lambda params: drivetrain.optim.SGD(params, lr=0.1, momentum=0.9),
    "drivetrain.Lion": lambda params: drivetrain.optim.Lion(params, lr=0.1),
}


def after_a_step_of(folder: Path, first: str, second: str) -> tuple[nn.Linear, torch.optim.Optimizer, Checkpointer]:
    """Saves a step of one optimizer, and returns another one with the Checkpointer that is to restore it."""
    for name in (first, second):
        net = nn.Linear(300, 40)
        optimizer = MAKERS[name](net.parameters())
        ckpt = Checkpointer(folder, model=net, optimizer=optimizer, every=None)
        if name == first:
            with ckpt:
                net(torch.ones(2, 300)).square().sum().backward()
                optimizer.step()
                ckpt.step()
    return net, optimizer, ckpt


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("torch.SGD", "torch.AdamW"),
        ("torch.AdamW", "torch.SGD"),
        ("drivetrain.SGD", "drivetrain.AdamW"),
        ("drivetrain.Lion", "torch.AdamW"),
        ("drivetrain.AdamW of 8 bits", "torch.AdamW"),
    ],
)
def test_another_optimizer_is_named(tmp_path: Path, first: str, second: str) -> None:
    net, _, ckpt = after_a_step_of(tmp_path, first, second)
    weight = net.weight.detach().clone()
    message = rf"optimizer\[0\] is a {second}, and .* was made by {first.partition(' ')[0]}"
    with pytest.raises(ValueError, match=message), ckpt:
        pytest.fail("the block has begun")
    torch.testing.assert_close(net.weight.detach(), weight, rtol=0, atol=0)


def test_a_state_that_fits_continues_with_a_warning(tmp_path: Path) -> None:
    net, optimizer, ckpt = after_a_step_of(tmp_path, "torch.Adam", "torch.AdamW")
    with pytest.warns(UserWarning, match="is a torch.AdamW, and continues with the state that torch.Adam"), ckpt:
        assert optimizer.state[net.weight]["step"] == 1


def test_compiled_submodules_have_the_names_of_plain_ones(tmp_path: Path) -> None:
    """A run with compiled submodules continues without them, and the other way round; exports have plain names."""

    def made(compiled: bool) -> nn.Sequential:
        layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        if compiled:
            layers[1] = torch.compile(layers[1], backend="eager")
        return nn.Sequential(*layers)

    for directory, order in (("a", (True, False)), ("b", (False, True))):
        weights = []
        for compiled in order:
            net = made(compiled)
            with Checkpointer(tmp_path / directory, model=net, every=None) as ckpt:
                assert ckpt.steps == len(weights)
                weights.append(net[1].weight.detach().clone())
                ckpt.step()
        torch.testing.assert_close(*weights, rtol=0, atol=0)
        assert not any("_orig_mod" in name for name in ckpt.restored.names())
        exported = state_dicts(ckpt.restored)
        made(False).load_state_dict(exported["model"])
