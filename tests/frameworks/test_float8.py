"""Tests training of torchao's float8 linear layers, emulated on the CPU, with drivetrain's optimizers."""

import copy
import importlib.util

import pytest
import torch
from torch import Tensor, nn

from drivetrain import optim
from optim_cases import OWN_CLASSES

# torchao's own imports emit warnings of several kinds.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        not importlib.util.find_spec("torchao"),
        reason="torchao is not installed: pip install 'drivetrain[frameworks]'",
    ),
]


def float8(model: nn.Module, all_gather: bool = False) -> nn.Module:
    """Converts the linear layers of a copy. With `all_gather` their weights are the subclass that FSDP gathers."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=all_gather)
    return convert_to_float8_training(copy.deepcopy(model), config=config)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 16, bias=False)).to(dtype)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[float]:
    torch.manual_seed(1)
    dtype = next(net.parameters()).dtype
    inputs, targets = torch.randn(16, 32, dtype=dtype), torch.randn(16, 16, dtype=dtype)
    losses = []
    for _ in range(steps):
        loss = (net(inputs) - targets).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(net: nn.Module) -> list[Tensor]:
    return [param.detach() for param in net.parameters()]


@pytest.mark.parametrize("name", OWN_CLASSES)
def test_float8_linears_train_as_with_torchs_class(name: str) -> None:
    ours = float8(model())
    losses = train(ours, getattr(optim, name)(ours.parameters(), lr=1e-3))
    assert all(type(layer).__name__ == "Float8Linear" for layer in ours if not isinstance(layer, nn.ReLU))
    if hasattr(torch.optim, name):
        theirs = float8(model())
        torch.testing.assert_close(losses, train(theirs, getattr(torch.optim, name)(theirs.parameters(), lr=1e-3)))
        torch.testing.assert_close(values(ours), values(theirs), rtol=1e-4, atol=1e-5)
    else:
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float8_linears_with_compressed_states(dtype: torch.dtype) -> None:
    """A bfloat16 weight with its remainder follows the float32 weight, whose forward rounds it to bfloat16."""
    ours, theirs = float8(model(dtype)), float8(model(dtype).float())
    options = {"master_bits": 32} if dtype == torch.bfloat16 else {}
    optimizer = optim.AdamW(ours.parameters(), lr=1e-3, state_bits=8, min_8bit_size=0, **options)
    losses = train(ours, optimizer)
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3))
    torch.testing.assert_close(losses, expected, rtol=0.02, atol=0)
    assert losses[-1] < losses[0]
    assert all(param.dtype == dtype for param in ours.parameters())


@pytest.mark.parametrize("name", OWN_CLASSES)
def test_weights_that_fsdp_gathers_in_float8_raise_at_construction(name: str) -> None:
    net = float8(model(), all_gather=True)
    with pytest.raises(NotImplementedError, match=r"parameter 0 of .*\(a WeightWithDynamicFloat8CastTensor\)"):
        getattr(optim, name)(net.parameters())
