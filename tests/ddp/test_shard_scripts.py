"""Runs what scripts do with DistributedDataParallel(shard=...) that they were not written for."""

import contextlib
import copy
import functools
import gc
import io
import os
import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

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
from drivetrain.ddp import state_server
from drivetrain.optim import full_state_dict
from effort import covering
from polling import wait_until
from ranks import run_on

OnRanks = Callable[..., list[Any]]
MODES = ("optimizer", "gradients")
pytestmark = pytest.mark.filterwarnings("default")  # torch warns about its own calls


def step(net: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    loss_of(net, at).backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- A module outlives its wrapper.


@run_on(2)
def test_a_module_can_be_wrapped_again_after_its_wrapper_is_gone() -> None:
    """New wrappers of a module train as the unsharded ones do, with a new optimizer or the one before."""
    makes, both = (OURS["AdamW"], TORCHS["AdamW"]), (False, True)
    changes = (("optimizer", "gradients"), ("gradients", "optimizer"), ("optimizer", None))
    for make, modes, keeps, overlaps in covering(2, makes, changes, both, both):
        result = []
        for shards in (modes, (None, None)):
            model = Odd()
            optimizer = None
            for at, shard in enumerate(shards):
                options = {} if shard is None else {"shard": shard, "overlap_gather": overlaps}
                net = DistributedDataParallel(model, **options)
                if optimizer is None or not keeps or None in modes:
                    optimizer = make(model.parameters())
                step(net, optimizer, 2 * at)
                step(net, optimizer, 2 * at + 1)
                del net
            result.append(model)
        expect_equal(*result, (modes, keeps, overlaps))


@run_on(2)
def test_a_wrapper_leaves_no_marks() -> None:
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


@run_on(2)
def test_two_wrappers_of_a_module_are_refused() -> None:
    net = DistributedDataParallel(Odd(), shard="optimizer")
    with pytest.raises(RuntimeError, match="delete it before its module is wrapped again"):
        DistributedDataParallel(net.module, shard="optimizer")


@run_on(2)
def test_parameters_can_be_unfrozen() -> None:
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


@run_on(2)
def test_edits_of_kept_gradients_have_the_results_of_whole_ones() -> None:
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


# ---- Files.


def trained_on(
    net: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], make: Any, tolerance: float = 0.0
) -> None:
    """Compares a step of the optimizer and a step of a new one that has loaded the state."""
    fresh = make(net.parameters())
    fresh.load_state_dict(state)
    before = [value.clone() for value in values_of(net)]
    ends = []
    for each in (optimizer, fresh):
        with torch.no_grad():
            torch._foreach_copy_(list(net.parameters()), before)
        step(net, each, 3)
        ends.append([value.clone() for value in values_of(net)])
    torch.testing.assert_close(*ends, rtol=tolerance, atol=tolerance)


def saved_by(save: Callable[[Any, Any], None], values: Any) -> Any:
    save(values, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True) if save is torch.save else pickle.load(file)


def save_alone(folder: Path, savers: int) -> None:
    """One rank saves whole, plain states while the others train on."""
    makes = (OURS["AdamW"], TORCHS["AdamW"], TORCHS["SGD"], drivetrain.optim.Adafactor)
    for make, mode, saver in covering(2, makes, MODES, range(savers)):
        net, optimizer = train(make, Odd(), shard=mode)
        path = folder / f"{makes.index(make)}-{mode}-{saver}"
        if dist.get_rank() == saver:
            torch.save(optimizer.state_dict(), path)
            assert_plain(pickle.loads(pickle.dumps(optimizer.state_dict())), optimizer)
        expected = copy.deepcopy(full_state_dict(optimizer, None))
        step(net, optimizer, 2)
        dist.barrier()
        found = torch.load(path, weights_only=True)
        assert_plain(found, optimizer)
        torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)


def assert_plain(state_dict: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for key, values in state_dict["state"].items():
        assert all(type(value) is torch.Tensor for value in values.values())
        whole = [value for value in values.values() if value.ndim == params[key].ndim]
        assert all(value.shape[0] in (1, params[key].shape[0]) for value in whole if value.ndim)


def save_on_all() -> None:
    """All ranks save at once, each its own file of whole states, in 8 bits, too."""
    for options in ({}, {"state_bits": 8, "min_8bit_size": 0}):
        make = functools.partial(drivetrain.optim.AdamW, lr=1e-2, **options)
        net, optimizer = train(make, Odd(), shard="gradients")
        loaded = saved_by(torch.save, optimizer.state_dict())
        assert_plain(loaded, optimizer)
        # Codes are stored again with scales that may differ in their last bit.
        trained_on(net, optimizer, loaded, make, tolerance=1e-5 if options else 0.0)


def save_during_looks(folder: Path) -> None:
    """The others look at their own states, which puts parts in the place of parameters, while one rank saves."""
    for mode in MODES:
        net, optimizer = train(OURS["AdamW"], Odd(), shard=mode)
        done = folder / f"done-{mode}"
        dist.barrier()
        if dist.get_rank() == 0:
            for _ in range(20):
                assert_plain(pickle.loads(pickle.dumps(optimizer.state_dict())), optimizer)
            done.touch()
        deadline = time.monotonic() + 60
        while not done.exists() and time.monotonic() < deadline:
            optimizer.state_dict()
        assert done.exists()
        del net


def save_over(master_addr: str) -> None:
    with mock.patch.dict(os.environ, {"MASTER_ADDR": master_addr}):
        net, optimizer = train(OURS["AdamW"], Odd(), shard="optimizer")
    assert_plain(saved_by(torch.save, optimizer.state_dict()), optimizer)
    dist.barrier()
    del net


@run_on(2)
def test_states_that_cannot_be_saved_whole_raise() -> None:
    """What cannot be saved whole raises, and says why."""
    net, optimizer = train(OURS["AdamW"], Odd(), shard="gradients")
    kept = optimizer.state_dict()
    dist.barrier()
    with mock.patch.object(state_server, "_LIMIT_S", 0.2):
        dist.barrier()
        _name_what_is_missing(net, optimizer, kept)


def _name_what_is_missing(net: Any, optimizer: torch.optim.Optimizer, kept: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        sharding = net._sharding
        sharding.steps.begin(optimizer)
        with pytest.raises(TypeError, match="and a step has not ended"):
            pickle.dumps(kept)
        sharding.steps.end()  # now this rank is one step ahead
        with pytest.raises(TypeError, match=r"rank 1 has no such rows: .*has not finished step 4 after"):
            pickle.dumps(kept)
    dist.barrier()
    if dist.get_rank() == 1:
        for _ in range(2):
            net._sharding.steps.begin(optimizer)
            net._sharding.steps.end()
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(TypeError, match=r"it has begun step 5, and the rows of step 4 are gone.*full_state_dict"):
            pickle.dumps(kept)
    dist.barrier()
    loaded = OURS["AdamW"](net.parameters())
    loaded.load_state_dict(full_state_dict(optimizer, None))
    with pytest.raises(TypeError, match="the optimizer has not stepped yet"):
        pickle.dumps(loaded.state_dict())
    dist.barrier()
    if dist.get_rank() == 1:
        net._sharding.states._close()
    dist.barrier()
    if dist.get_rank() == 0:
        net._sharding.steps.begin(optimizer)
        net._sharding.steps.end()
        with pytest.raises(TypeError, match=r"rank 1 does not answer .*: it may have ended"):
            pickle.dumps(kept)
    dist.barrier()


@run_on(2)
def test_states_of_strangers_raise() -> None:
    """A connection without the key gets nothing. The next request is answered, and no copy of the rows stays."""

    def has_copy() -> bool:
        return any(type(one) is io.BytesIO and not one.closed and one.getvalue() for one in gc.get_objects())

    net, optimizer = train(OURS["AdamW"], Odd(), shard="optimizer")
    if dist.get_rank() == 0:
        for message in (b"", bytes(7), (1 << 40).to_bytes(8, "big") + bytes(40), (60).to_bytes(8, "big") + bytes(60)):
            with socket.create_connection(net._sharding.states._addresses[1], timeout=30) as connection:
                connection.recv(32)
                connection.sendall(message)
                with contextlib.suppress(OSError):  # A server that has read enough resets the connection.
                    connection.shutdown(socket.SHUT_WR)
                    assert connection.recv(1) == b""
        assert_plain(pickle.loads(pickle.dumps(optimizer.state_dict())), optimizer)
    dist.barrier()
    wait_until(lambda: not has_copy(), "end of the copy that was sent", 5)


def test_one_rank_saves_whole_states(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(save_alone, tmp_path, 2)
    on_ranks(save_on_all)
    on_ranks(save_during_looks, tmp_path)
    on_ranks(save_over, "::1")
    on_ranks(save_over, "no-such-host.invalid")


def test_one_of_four_ranks_saves_whole_states(on_four_ranks: OnRanks, tmp_path: Path) -> None:
    """Some ranks have no rows of small parameters, and rules gather the states of those."""
    on_four_ranks(save_alone, tmp_path, 1)


@run_on(2)
def test_a_file_never_gets_a_part_of_a_state() -> None:
    """No part of a gradient, and no copy of a part of a state, gets into a file in silence."""
    for make in (OURS["AdamW"], TORCHS["AdamW"]):
        net, optimizer = train(make, Odd(), shard="gradients")
        states = optimizer.state_dict()["state"]
        loss_of(net, 0).backward()
        for values in (
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
        trained_on(net, optimizer, saved_by(torch.save, whole), make)


@run_on(2)
def test_remainders_of_masters_are_gathered() -> None:
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
