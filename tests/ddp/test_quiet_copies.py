"""Checks that copies of a wrapper, and wrappers with init_sync=False, communicate in their first backward only."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.swa_utils import AveragedModel

from ddp_cases import assert_equal_on_ranks, inputs, message_of, normed_net, trained_grads
from drivetrain import DistributedDataParallel as DDP

OnRanks = Callable[..., list[Any]]
TRANSPORTS = ("shm", "torch")


def loaded(model: nn.Module) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "file": loaded,
    "average": lambda model: AveragedModel(model).module,
    "unsynchronized": lambda model: type(model)(normed_net(), init_sync=False),
    "several": lambda model: [copy.deepcopy(copy.deepcopy(model)) for _ in range(2)][-1],
}


def copies_on_one_rank() -> None:
    """One rank copies, evaluates and stores a copy between steps, which no other rank notices."""
    for transport in TRANSPORTS:
        for on in (0, 1):
            ours, theirs = DDP(normed_net(), transport=transport), TorchDDP(normed_net())
            for make in COPIES.values():
                if dist.get_rank() == on:
                    copied = make(ours)
                    with torch.no_grad():
                        copied.module.eval()(inputs())
                    copied.eval()
                    assert copied.state_dict().keys() == ours.state_dict().keys()
                    with copied.no_sync():
                        copied.module(inputs()).sum().backward()
                    loaded(copied)
                for mine, expected in zip(trained_grads(ours), trained_grads(theirs), strict=True):
                    assert torch.equal(mine, expected)


def copies_that_all_ranks_train() -> None:
    for transport in TRANSPORTS:
        ours, theirs = DDP(normed_net(), transport=transport), TorchDDP(normed_net())
        trained_grads(ours)
        trained_grads(theirs)
        if dist.get_rank() == 0:
            copy.deepcopy(ours)  # numbers wrappers on this rank alone
        for how in COPIES:
            copied, expected = COPIES[how](ours), COPIES[how](theirs)
            held, x = [], inputs()
            for model in (copied, expected):
                with model.no_sync():  # accumulates before it has connected
                    model(x).sum().backward()
                held.append([p.grad for p in model.parameters()])
            for model in (copied, expected):
                torch.manual_seed(dist.get_rank())
                model(torch.randn(6, 10)).square().sum().backward()
            for mine, kept, theirs_p in zip(copied.parameters(), held[0], expected.parameters(), strict=True):
                assert torch.equal(mine.grad, theirs_p.grad), how
                assert mine.grad is kept  # as under torch, what the script holds stays `.grad`
            assert_equal_on_ranks([p.grad for p in copied.parameters()])
            if how != "unsynchronized":  # which takes the default
                assert copied._get_ddp_logging_data()["transport"].startswith(transport)
            for mine, other in zip(trained_grads(copied), trained_grads(expected), strict=True):
                assert torch.equal(mine, other)


def copy_with_join() -> None:
    for wrap in (TorchDDP, DDP):
        model = wrap(normed_net(), init_sync=False)
        with model.join():
            for _ in range(1 + dist.get_rank()):
                model(inputs()).sum().backward()


def one_rank_trains_a_copy() -> str:
    """One rank trains its copy while the other goes on with the original. Both end, with an error that says why."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    del group
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    ours = DDP(nn.Linear(10, 3))
    ours(inputs()).sum().backward()
    model = copy.deepcopy(ours) if dist.get_rank() == 0 else ours
    return message_of(RuntimeError, lambda: model(inputs()).sum().backward())


def unfrozen_on_one_rank() -> None:
    """A group of one rank trains an unfrozen parameter as torch does, without a warning."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    found = []
    for wrap in (TorchDDP, DDP):
        module = normed_net()
        module[0].requires_grad_(False)
        model = wrap(module, process_group=groups[dist.get_rank()])
        trained_grads(model)
        module[0].requires_grad_(True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(trained_grads(model))
    assert len(found[1]) == 6
    for mine, expected in zip(*found, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize(
    "function", [copies_on_one_rank, copies_that_all_ranks_train, copy_with_join, unfrozen_on_one_rank]
)
def test_as_torch(on_ranks: OnRanks, function: Callable[[], None]) -> None:
    on_ranks(function)


def test_a_rank_that_trains_its_copy_alone_says_what_it_waits_for(on_ranks: OnRanks) -> None:
    trains_copy, trains_original = on_ranks(one_rank_trains_a_copy)
    assert "first communicates in its first backward" in trains_copy
    assert "the first backward of a copied wrapper" in trains_original
