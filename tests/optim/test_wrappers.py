"""Tests parameters of tensor subclasses: those with memory of their own are stepped, others raise at construction."""

import pytest
import torch
from torch import nn

from drivetrain import optim
from optim_cases import OWN_CLASSES, scaled


class Tagged(nn.Parameter):
    """Has memory of its own, as subclasses that only carry attributes do."""


@pytest.mark.parametrize("name", OWN_CLASSES)
def test_wrapper_raises_at_construction(name: str) -> None:
    with pytest.raises(NotImplementedError, match=r"'w' is a tensor subclass that wraps others \(a Scaled\)"):
        getattr(optim, name)([("w", scaled())])


def test_refused_group_leaves_the_optimizer_as_it_was() -> None:
    plain = nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([plain], lr=0.5)
    with pytest.raises(NotImplementedError, match=r"parameter 0 of param_groups\[1\].*Scaled"):
        optimizer.add_param_group({"params": [scaled()]})
    plain.grad = torch.ones(3)
    optimizer.step()
    assert len(optimizer.param_groups) == 1
    assert torch.equal(plain.detach(), torch.full((3,), 0.5))


@pytest.mark.parametrize("name", [name for name in OWN_CLASSES if hasattr(torch.optim, name)])
def test_subclass_with_memory_of_its_own_is_stepped(name: str) -> None:
    start = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = Tagged(start.clone()), Tagged(start.clone())
    mine, torchs = (getattr(module, name)([p]) for module, p in ((optim, ours), (torch.optim, theirs)))
    for step in range(3):
        for param, optimizer in ((ours, mine), (theirs, torchs)):
            param.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(1 + step))
            optimizer.step()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=2e-5, atol=1e-6)
    assert type(ours) is Tagged
