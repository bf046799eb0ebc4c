"""Tests overlap_gather: every use of parameters that the wrapper can see waits for the other ranks' rows."""

import copy
import gc
import inspect
import io
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shard_cases import (
    OURS,
    TORCHS,
    WITH_SUMS,
    Odd,
    alone_before_a_step,
    expect_close,
    expect_equal,
    loss_of,
    train,
    transports,
)
from torch import Tensor, nn

import drivetrain
from drivetrain import DistributedDataParallel
from drivetrain.ddp import sharding
from ranks import run_on

OnRanks = Callable[..., list[Any]]
MODES = ("optimizer", "gradients")
pytestmark = pytest.mark.filterwarnings("default")  # torch warns about its own calls
LATE_S = 0.05


@pytest.fixture(autouse=True)
def _small_buckets(on_ranks: OnRanks, on_four_ranks: OnRanks, request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks gather a bucket per parameter or two, so that a use of one leaves others in progress."""
    asks_for = inspect.signature(request.function).parameters
    calls = [on_ranks, on_four_ranks] if "on_four_ranks" in asks_for else [on_ranks]
    for call in calls:
        call(divide_into, 1024)
    yield
    for call in calls:
        call(divide_into, sharding._BUCKET_BYTES)


def divide_into(bucket_bytes: int) -> None:
    sharding._BUCKET_BYTES = bucket_bytes


@run_on(2, 4)
def test_steps_have_the_bits_of_the_unsharded_wrapper() -> None:
    for transport in transports():
        for make in (OURS["AdamW"], TORCHS["SGD"]):
            expected, _ = train(make, Odd(), transport=transport)
            for mode in MODES:
                found, _ = train(make, Odd(), transport=transport, shard=mode, overlap_gather=True)
                assert len(found._sharding._buckets) > 3
                assert found._sharding.gathers.pending  # the last step's
                expect_equal(found, expected, (transport, mode))
                assert not found._sharding.gathers.pending
    expected, _ = train(WITH_SUMS["clipped AdamW"], Odd())
    found, _ = train(WITH_SUMS["clipped AdamW"], Odd(), shard="gradients", overlap_gather=True)
    expect_close(found, expected, "clipped", rtol=1e-4, atol=1e-5)


def watch_forwards() -> list[list[int]]:
    """Returns how many gathers were in progress when each layer began, and after the forward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    net = DistributedDataParallel(model, shard="optimizer", overlap_gather=True)
    optimizer = OURS["AdamW"](net.parameters())
    under_way: list[int] = []
    for layer in model:
        layer.register_forward_hook(lambda *_: under_way.append(len(net._sharding.gathers.pending)))
    found = []
    for _ in range(2):
        net(torch.ones(2, 32)).sum().backward()
        found.append([*under_way, len(net._sharding.gathers.pending)])
        under_way.clear()
        optimizer.step()
    return found


def test_a_layer_waits_for_its_own_bucket(on_ranks: OnRanks) -> None:
    assert on_ranks(watch_forwards) == [[[0, 0, 0, 0, 0], [3, 2, 1, 0, 0]]] * 2


# ---- Uses, on rank 0 while rank 1 has not stepped yet.


class Keeps(nn.Module):
    """Keeps its parameter past nn.Module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 8))
        self.kept = [self.weight]

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(hidden, self.kept[0]), self.kept[0].t())


class Reads(nn.Module):
    """Reads parameters past the forward of their owner, and past their owner's attributes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)  # reads out_proj.weight without a call
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.keeps = Keeps()
        self.table = nn.Embedding(20, 8)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = self.keeps(self.recurrent(hidden * self.scales[0])[0]) * self.scales[1]
        return nn.functional.linear(hidden, self.table.weight)


TOKENS = torch.arange(20).reshape(2, 10)


def step_late(mode: str | None, transport: str, **options: Any) -> tuple[Any, Any]:
    net = DistributedDataParallel(Reads(), transport=transport, shard=mode, **options)
    optimizer = OURS["AdamW"](net.parameters())
    net(TOKENS + 0).square().mean().backward()
    if dist.get_rank() == 1:
        time.sleep(LATE_S)
    optimizer.step()
    return net, optimizer


def saved(net: Any) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(net.module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded.table._parameters) is dict
    return [*loaded.parameters(), loaded(TOKENS)]


def copied(net: Any) -> list[Tensor]:
    made = copy.deepcopy(net.module)
    assert type(made.table._parameters) is dict
    return [*made.parameters(), made(TOKENS)]


def averaged(net: Any) -> list[Tensor]:
    average = torch.optim.swa_utils.AveragedModel(net.module)
    return list(average.parameters())


def stepped_by_another(net: Any, optimizer: Any) -> list[Tensor]:
    """Optimizers keep references to parameters, of which any step may read some."""
    held = optimizer.param_groups[0]["params"]
    other = nn.Parameter(torch.zeros(3))
    other.grad = torch.ones(3)
    torch.optim.SGD([other], lr=0.1).step()
    return [param.detach() for param in held]


def waited(net: Any, optimizer: Any) -> list[Tensor]:
    net.wait_for_parameters()
    return [param.detach() for param in optimizer.param_groups[0]["params"]]


USES: dict[str, Callable[[Any, Any], Any]] = {
    "state_dict": lambda net, _: list(net.state_dict().values()),
    "parameters": lambda net, _: list(net.parameters()),
    "forward": lambda net, _: [net(TOKENS)],
    "forward of the module": lambda net, _: [net.module(TOKENS)],
    "evaluation": lambda net, _: [torch.no_grad()(net.module.eval())(TOKENS)],
    "attribute": lambda net, _: [net.module.table.weight, net.module.attention.out_proj.weight],
    "names": lambda net, _: [dict(net.module.table._parameters)["weight"], net.module.table._parameters.get("weight")],
    "functional call": lambda net, _: [
        torch.func.functional_call(net.module, dict(net.module.named_parameters()), (TOKENS,))
    ],
    "torch.save": lambda net, _: saved(net),
    "deepcopy": lambda net, _: copied(net),
    "average": lambda net, _: averaged(net),
    "step of another optimizer": stepped_by_another,
    "wait_for_parameters": waited,
}


@run_on(2)
def test_uses_wait_for_the_rows_of_other_ranks() -> None:
    for transport in transports():
        plain, optimizer = step_late(None, transport)
        for name, use in USES.items():
            net, steps = step_late("optimizer", transport, overlap_gather=True)
            assert net._sharding.gathers.pending
            found = use(net, steps)
            plain.train()
            expected = use(plain, optimizer)
            assert len(found) == len(expected)
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b), (transport, name)
            net.wait_for_parameters()


@run_on(2)
def test_wrappers_that_end() -> None:
    """The rank that deletes its wrapper waits until the other ranks have its rows."""
    for transport in transports():
        plain, _ = step_late(None, transport)
        expected = [param.detach().clone() for param in plain.parameters()]
        net, optimizer = step_late("gradients", transport, overlap_gather=True)
        if dist.get_rank() == 0:
            del net, optimizer
            gc.collect()
        else:
            assert all(torch.equal(a, b) for a, b in zip(net.parameters(), expected, strict=True))


@run_on(2)
def test_a_step_without_another_rank_raises() -> None:
    if (alone := alone_before_a_step(overlap_gather=True)) is None:
        return
    net, optimizer = alone

    def step_and_read() -> None:
        optimizer.step()
        net.state_dict()

    for _ in range(2):  # the rows are still missing
        with pytest.raises(RuntimeError, match="rank 1 has already deleted its DistributedDataParallel"):
            step_and_read()
    with pytest.warns(UserWarning, match="parameters of a deleted wrapper were not gathered"):
        net._sharding._finish()


@run_on(2)
def test_what_gathers_do_not_support_raises() -> None:
    with pytest.raises(ValueError, match="overlap_gather is given and shard is None"):
        DistributedDataParallel(Odd(), overlap_gather=True)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    net, _ = train(OURS["AdamW"], Odd(), shard="optimizer", overlap_gather=True, process_group=alone)
    assert type(net.module.embed._parameters) is dict
    net.wait_for_parameters()


@run_on(2)
def test_windows_and_moves_between_steps() -> None:
    """Schedule-free steps move parameters outside of steps; windows step at their end."""
    nets = []
    for options in ({}, {"shard": "gradients", "overlap_gather": True}):
        net = DistributedDataParallel(Odd(), **options)
        optimizer = drivetrain.optim.AdamWScheduleFree(net.parameters(), lr=1e-2)
        for _ in range(2):
            with drivetrain.accumulate(net, optimizer, 1) as window:
                window.backward(loss_of(net, 0), weight=2)
            optimizer.eval()
            optimizer.train()
        nets.append(net)
    expect_equal(nets[1], nets[0], "windows")
