"""Tests Muon groups with `beta2` against NorMuon as its authors implement it, over layouts, formats and ranks."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_muon_ranks import expect_equal, parameters, train, values, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim._muon import _zeropower_via_newtonschulz

import drivetrain
from drivetrain import optim
from optim_cases import assert_updates_agree, copies, make_params, set_grads
from ranks import run_on

SHAPES: list[Any] = [(64, 48), (48, 64), (32, 32), (1, 7), (7, 1), (1, 1), (48, 64), (129, 31), (0, 4)]
STATES = {"momentum_buffer", "second_momentum_buffer"}
POLYNOMIAL = (3.4445, -4.775, 2.0315)


def reference_step(param: Tensor, grad: Tensor, state: dict[str, Tensor], lr: float, beta2: float) -> None:
    """Steps as github.com/zichongli5/NorMuon, with weight decay 0.1, Nesterov's momentum 0.95 and five iterations."""
    buffer = state["momentum_buffer"].lerp_(grad, 0.05)
    update = _zeropower_via_newtonschulz(grad.lerp(buffer, 0.95), POLYNOMIAL, 5, 1e-7).float()
    before = update.norm()
    state["second_momentum_buffer"].lerp_(update.square().mean(-1, keepdim=True), 1 - beta2)
    update = update / (state["second_momentum_buffer"].sqrt() + 1e-10)
    update = update * (before / (update.norm() + 1e-10))
    scale = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
    param.mul_(1 - lr * 0.1).sub_(lr * scale * update)


@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_steps_are_the_references(beta2: float, is_transposed: bool) -> None:
    params = make_params(shapes=SHAPES)
    if is_transposed:
        params = [param.detach().t().contiguous().t().requires_grad_() for param in params]
    twins = copies(params)
    states = [
        {"momentum_buffer": torch.zeros_like(p), "second_momentum_buffer": torch.zeros(p.shape[0], 1)} for p in twins
    ]
    optimizer = optim.Muon([{"params": params, "beta2": beta2}], lr=0.02)
    for _ in range(4):
        for param, twin in zip(params, twins, strict=True):  # One step's differences must not count in the next.
            param.detach().copy_(twin.detach())
        before = copies(params)
        set_grads(params)
        optimizer.step()
        for param, twin, state in zip(params, twins, states, strict=True):
            if param.numel():
                with torch.no_grad():
                    reference_step(twin, param.grad, state, 0.02, beta2)
        assert_updates_agree(params, twins, before, 0.03)
        for param, state in zip(params, states, strict=True):
            assert optimizer.state[param].keys() == STATES
            wanted = state["second_momentum_buffer"]
            difference = optimizer.state[param]["second_momentum_buffer"] - wanted
            assert difference.norm() <= 0.05 * wanted.norm()  # squares of values that differ as updates do


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_get_one_length_and_heads_keep_theirs(heads: int, dtype: torch.dtype) -> None:
    """With beta2 = 0 all rows of a head have one length, and its norm is the one of the step without beta2."""
    found = []
    for entries in ({}, {"beta2": 0.0}):
        param = torch.zeros(96, 40, dtype=dtype, requires_grad=True)
        param.grad = values((96, 40), 0).to(dtype) * torch.arange(1, 97).unsqueeze(1)
        optim.Muon([{"params": [param], "num_heads": heads, **entries}], lr=1.0, weight_decay=0.0).step()
        found.append(param.detach().double().view(heads, -1, 40))
    plain, equal = found
    lengths = equal.norm(dim=2)
    torch.testing.assert_close(lengths, lengths.mean(1, keepdim=True).expand_as(lengths), rtol=0.01, atol=0)
    torch.testing.assert_close(equal.norm(dim=(1, 2)), plain.norm(dim=(1, 2)), rtol=0.01, atol=0)
    assert plain.norm(dim=2).std() > 0.05 * plain.norm(dim=2).mean()


def test_gradients_of_zeros_leave_finite_values() -> None:
    param = torch.ones(6, 4, requires_grad=True)
    optimizer = optim.Muon([{"params": [param], "beta2": 0.9}], lr=0.5)
    for scale in (0.0, 1.0):
        param.grad = values((6, 4), 1) * scale
        param.grad[2] = 0
        optimizer.step()
        assert param.isfinite().all()
    torch.testing.assert_close(param[2].detach(), torch.full((4,), 0.95**2))


@pytest.mark.parametrize("precision", [{"state_bits": 8, "min_8bit_size": 0}, {"state_bits": 16}, {"master_bits": 24}])
def test_a_loaded_state_takes_equal_steps(precision: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if "master_bits" in precision else torch.float32
    params = make_params(dtype, [(30, 40), (64, 64), (3, 3)])
    others = copies(params)
    ours, loaded = (optim.Muon([{"params": p, "beta2": 0.9}], lr=0.02, **precision) for p in (params, others))
    set_grads(params)
    ours.step()
    loaded.load_state_dict(copy.deepcopy(ours.state_dict()))
    for other, param in zip(others, params, strict=True):
        other.detach().copy_(param.detach())
    for _ in range(2):
        set_grads(params, others)
        ours.step()
        loaded.step()
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)
        wanted = {8: torch.float32, 16: torch.bfloat16}.get(precision.get("state_bits", 0), dtype)
        assert ours.state[param]["second_momentum_buffer"].dtype == wanted


def test_beta2_comes_and_goes() -> None:
    """A group steps as Muon without it, and begins its means again with zeros."""
    params = make_params(shapes=[(30, 40)])
    others = copies(params)
    ours, theirs = optim.Muon(params), optim.Muon(others)
    for beta2 in (None, 0.9, None):
        for param, other in zip(params, others, strict=True):
            other.detach().copy_(param.detach())
        ours.param_groups[0]["beta2"] = beta2
        set_grads(params, others)
        ours.step()
        theirs.step()
        assert torch.equal(params[0], others[0]) == (beta2 is None)


@pytest.mark.parametrize("beta2", [1.0, -0.1, math.nan, "x"])
def test_a_beta2_out_of_range_raises(beta2: Any) -> None:
    with pytest.raises(ValueError, match=f"beta2 is {beta2!r}, expected a number from 0 up to 1, or None"):
        optim.Muon([{"params": [torch.ones(2, 2).requires_grad_()], "beta2": beta2}])


def test_complex_matrices_are_refused() -> None:
    param = torch.ones(2, 2, dtype=torch.complex64, requires_grad=True)
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="Muon does not support complex parameters"):
        optim.Muon([{"params": [param], "beta2": 0.9}]).step()


# ---- Ranks.


def of_group(params: list[Any], **options: Any) -> optim.Muon:
    return optim.Muon([{"params": params, "beta2": 0.9}], **options)


@run_on(2)
def test_ranks_that_share_matrices_keep_the_bits() -> None:
    shapes = [(64, 48), (48, 64), (32, 32), (7, 1), (129, 31)]
    shared, alone = parameters(shapes), parameters(shapes)
    ours, theirs = of_group(shared, process_group=dist.group.WORLD), of_group(alone)
    train(shared, ours)
    train(alone, theirs)
    expect_equal(shared, ours, alone, theirs)


@run_on(2)
def test_ranks_that_hold_rows_gather_matrices() -> None:
    """The norm of a matrix depends on all of its rows, so ranks step whole matrices."""
    mesh = init_device_mesh("cpu", (2,))
    shapes = [(64, 48), (48, 64), (7, 3)]
    shared: list[Any] = [
        nn.Parameter(distribute_tensor(values(shape, seed), mesh, [Shard(0)])) for seed, shape in enumerate(shapes)
    ]
    alone = parameters(shapes)
    ours, theirs = of_group(shared), of_group(alone)
    train(shared, ours)
    train(alone, theirs)
    for one, other in zip(shared, alone, strict=True):
        assert torch.equal(whole(one), other)


@run_on(2)
def test_beta2_comes_and_goes_where_ranks_hold_rows() -> None:
    mesh = init_device_mesh("cpu", (2,))
    shared: list[Any] = [nn.Parameter(distribute_tensor(values((64, 48), 0), mesh, [Shard(0)]))]
    alone = parameters([(64, 48)])
    ours, theirs = optim.Muon(shared), optim.Muon(alone)
    for beta2 in (None, 0.9, None, 0.5):
        ours.param_groups[0]["beta2"] = theirs.param_groups[0]["beta2"] = beta2
        train(shared, ours, steps=2)
        train(alone, theirs, steps=2)
        assert torch.equal(whole(shared[0]), alone[0])


@run_on(2)
def test_ranks_that_share_matrices_have_one_beta2() -> None:
    for of_rank_1 in (None, 0.5):
        params = parameters([(8, 6)])
        before = params[0].detach().clone()
        params[0].grad = torch.ones(8, 6)
        optimizer = optim.Muon(params, process_group=dist.group.WORLD)
        optimizer.param_groups[0]["beta2"] = of_rank_1 if dist.get_rank() == 1 else 0.9
        with pytest.raises(ValueError, match=r"or shapes, layouts or options differ\. Nothing has changed"):
            optimizer.step()
        assert torch.equal(params[0], before)


@run_on(2)
def test_sharded_states_train_as_whole_ones_do() -> None:
    found = []
    for options in ({}, {"shard": "optimizer"}, {"shard": "gradients"}):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(24, 40, bias=False), nn.Tanh(), nn.Linear(40, 24, bias=False))
        model = drivetrain.DistributedDataParallel(net, **options)  # type: ignore[arg-type]
        optimizer = of_group(list(model.parameters()), lr=0.05)
        for step in range(3):
            model(values((8, 24), 10 * step + dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([whole(param) for param in net.parameters()])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
