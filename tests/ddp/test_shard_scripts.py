"""Runs what scripts do with DistributedDataParallel(shard=...) that they were not written for."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shard_cases import OURS, TORCHS, Odd, expect_close, expect_equal, loss_of, train, values_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import drivetrain
from drivetrain import DistributedDataParallel
from drivetrain.optim import full_state_dict

OnRanks = Callable[..., list[Any]]
MODES = ("optimizer", "gradients")
pytestmark = pytest.mark.filterwarnings("default")  # torch warns about its own calls


def step(net: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    loss_of(net, at).backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- A module outlives its wrapper.


def wrap_again() -> None:
    """New wrappers of a module train as the unsharded ones do, with a new optimizer or the one before."""
    for make in (OURS["AdamW"], TORCHS["AdamW"]):
        for modes in (("optimizer", "gradients"), ("gradients", "optimizer"), ("optimizer", None)):
            for keeps in (False, True) if None not in modes else (False,):
                for overlaps in (False, True):
                    result = []
                    for shards in (modes, (None, None)):
                        model = Odd()
                        optimizer = None
                        for at, shard in enumerate(shards):
                            options = {} if shard is None else {"shard": shard, "overlap_gather": overlaps}
                            net = DistributedDataParallel(model, **options)
                            if optimizer is None or not keeps:
                                optimizer = make(model.parameters())
                            step(net, optimizer, 2 * at)
                            step(net, optimizer, 2 * at + 1)
                            del net
                        result.append(model)
                    expect_equal(*result, (modes, keeps, overlaps))


def leave_no_marks() -> None:
    """A wrapper that is gone leaves no hooks and no watched dicts, and a new optimizer steps whole parameters."""
    model = Odd()
    for mode in MODES:
        net = DistributedDataParallel(model, shard=mode, overlap_gather=True)
        step(net, OURS["AdamW"](model.parameters()), 0)
        del net
    DistributedDataParallel(model)  # collects the ones before
    assert all(type(part._parameters) is dict and not part._forward_pre_hooks for part in model.modules())
    assert not any(param._backward_hooks for param in model.parameters())
    optimizer = OURS["AdamW"](model.parameters())
    for at in range(2):
        step(model, optimizer, at)
    assert not any(isinstance(value, DTensor) for state in optimizer.state.values() for value in state.values())


def refuse_two() -> None:
    net = DistributedDataParallel(Odd(), shard="optimizer")
    with pytest.raises(RuntimeError, match="delete it before its module is wrapped again"):
        DistributedDataParallel(net.module, shard="optimizer")


def unfreeze() -> None:
    result = []
    for options in ({}, {"shard": "gradients"}):
        model = Odd()
        model.embed.weight.requires_grad_(False)
        net = DistributedDataParallel(model, **options)
        optimizer = OURS["AdamW"](model.parameters())
        step(net, optimizer, 0)
        model.embed.weight.requires_grad_(True)
        net = None
        net = DistributedDataParallel(model, **options)
        step(net, optimizer, 1)
        result.append(model)
    expect_equal(*result, "unfrozen")


def test_a_module_can_be_wrapped_again_after_its_wrapper_is_gone(on_ranks: OnRanks) -> None:
    on_ranks(wrap_again)
    on_ranks(leave_no_marks)
    on_ranks(refuse_two)
    on_ranks(unfreeze)


# ---- Gradients.


def tripled(param: nn.Parameter) -> None:
    param.grad.data = param.grad.data * 3


def decayed(param: nn.Parameter) -> None:
    param.grad.add_(param.detach(), alpha=0.5)


def normalized(param: nn.Parameter) -> None:
    param.grad.data.div_(2)
    param.grad += 0.1 * param.data
    param.grad.mul_(torch.full_like(param, 0.5))


def cut(param: nn.Parameter) -> None:
    param.grad.data = torch.where(param.grad > 0, param.grad, 0 * param.grad)


def from_whole(param: nn.Parameter) -> None:
    param.grad.data = param.detach() * 2


def compare_edits() -> None:
    for edit in (tripled, decayed, normalized, cut, from_whole):

        def each(net: Any, optimizer: Any, at: int, edit: Callable[[nn.Parameter], None] = edit) -> None:
            loss_of(net, at).backward()
            for param in net.parameters():
                if param.grad is not None:
                    edit(param)
            optimizer.step()
            optimizer.zero_grad()

        expected, _ = train(OURS["SGD"], Odd(), each=each)
        found, _ = train(OURS["SGD"], Odd(), each=each, shard="gradients")
        expect_close(found, expected, edit.__name__)
    net = DistributedDataParallel(Odd(), shard="gradients")
    loss_of(net, 0).backward()
    with pytest.raises(TypeError, match=r"rows that DistributedDataParallel\(shard=\.\.\.\) keeps of \[37, 24\]"):
        net.module.embed.weight.grad.data = torch.zeros(3)


def test_edits_of_kept_gradients_have_the_results_of_whole_ones(on_ranks: OnRanks) -> None:
    on_ranks(compare_edits)


# ---- Files.


def refuse_parts() -> None:
    """No part of a state or gradient gets into a file in silence, however the script took it."""
    for make in (OURS["AdamW"], TORCHS["AdamW"]):
        net, optimizer = train(make, Odd(), shard="gradients")
        states = optimizer.state_dict()["state"]
        loss_of(net, 0).backward()
        for values in (
            states,
            copy.deepcopy(states),
            [value.cpu().clone() for state in states.values() for value in state.values()],
            [param.grad for param in net.parameters()],
            [param.grad * 2 for param in net.parameters() if param.grad is not None],
        ):
            with pytest.raises(TypeError, match=r"Call drivetrain\.optim\.full_state_dict\(optimizer\) on every rank"):
                torch.save(values, io.BytesIO())
            with pytest.raises(TypeError, match="full_state_dict"):
                pickle.dumps(values)
        optimizer.zero_grad()
        whole = full_state_dict(optimizer, None)
        torch.save(whole, file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        fresh = make(net.parameters())
        fresh.load_state_dict(loaded)
        before = [value.clone() for value in values_of(net)]
        ends = []
        for each in (optimizer, fresh):
            with torch.no_grad():
                torch._foreach_copy_(list(net.parameters()), before)
            step(net, each, 3)
            ends.append([value.clone() for value in values_of(net)])
        torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_a_file_never_gets_a_part_of_a_state(on_ranks: OnRanks) -> None:
    on_ranks(refuse_parts)


def gather_remainders() -> None:
    """Remainders of master weights are 16-bit integers, which gloo cannot gather."""
    for kind in (*MODES, "fully_shard"):
        torch.manual_seed(5)
        model = nn.Linear(6, 7).bfloat16()
        net = fully_shard(model) if kind == "fully_shard" else DistributedDataParallel(model, shard=kind)
        optimizer = drivetrain.optim.AdamW(net.parameters(), lr=1e-2, master_bits=32)
        for at in range(2):
            net(torch.full((2, 6), 1.0 + at).bfloat16()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.manual_seed(5)
        whole = nn.Linear(6, 7).bfloat16()
        alone = drivetrain.optim.AdamW(whole.parameters(), lr=1e-2, master_bits=32)
        for at in range(2):
            whole(torch.full((2, 6), 1.0 + at).bfloat16()).square().sum().backward()
            alone.step()
            alone.zero_grad()
        expected = [state["param_remainder"] for state in alone.state_dict()["state"].values()]
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        by_torch = get_optimizer_state_dict(net, optimizer, options=options).get("state")
        found = [state["param_remainder"] for state in full_state_dict(optimizer, None)["state"].values()]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        if dist.get_rank() == 0:
            found = [by_torch[name.split("module.")[-1]]["param_remainder"] for name in ("weight", "bias")]
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_remainders_of_masters_are_gathered(on_ranks: OnRanks) -> None:
    on_ranks(gather_remainders)
