"""Tests rules whose state has scalars or that change during training, and the names that torch.optim has."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import drivetrain
from drivetrain import _C, optim
from optim_cases import assert_same, copies, make_params, set_grads
from precision_cases import everything, same_bits

# Options under which 40 steps pass every phase of a rule: RAdam's rectification, ASGD's averaging, Rprop's bounds.
PHASES: dict[str, dict[str, Any]] = {
    "Adadelta": {"rho": 0.7},
    "Adamax": {"betas": (0.8, 0.9)},
    "RAdam": {"betas": (0.8, 0.95), "weight_decay": 0.1},
    "NAdam": {"betas": (0.8, 0.95), "momentum_decay": 0.05},
    "ASGD": {"lambd": 0.05, "t0": 10.0, "weight_decay": 0.1},
    "Rprop": {"step_sizes": (0.005, 0.02)},
}
phases = pytest.mark.parametrize("name", PHASES)
SCALARS = {"NAdam": ["mu_product"], "ASGD": ["eta", "mu"]}
scalars = pytest.mark.parametrize("name", SCALARS)


def pair(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    params = make_params(dtype)
    others = copies(params)
    chosen = PHASES[name] | options
    return getattr(optim, name)(params, **chosen), getattr(torch.optim, name)(others, **chosen), params, others


def state_of(optimizer: Any, param: Tensor) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in optimizer.state[param].items()}


def test_every_class_of_torch_is_here() -> None:
    theirs = {name for name, value in vars(torch.optim).items() if inspect.isclass(value)} - {"Optimizer"}
    assert theirs <= set(optim.__all__)
    for name in theirs:
        assert issubclass(getattr(optim, name), getattr(torch.optim, name))
    assert optim.LBFGS is torch.optim.LBFGS
    assert optim.SparseAdam is torch.optim.SparseAdam


def test_install_leaves_torchs_own_classes() -> None:
    before = torch.optim.LBFGS, torch.optim.SparseAdam
    try:
        names = drivetrain.install(optim=True)
        assert "torch.optim.NAdam" in names
        assert torch.optim.NAdam is optim.NAdam
        assert not [name for name in names if name.endswith(("LBFGS", "SparseAdam"))]
        assert (torch.optim.LBFGS, torch.optim.SparseAdam) == before
    finally:
        drivetrain.uninstall()
    assert torch.optim.NAdam is not optim.NAdam


@phases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_runs_follow_torchs_while_options_change(name: str, dtype: torch.dtype) -> None:
    """Schedulers change the learning rate and the momentum in every step."""
    optimizer, torch_optimizer, params, torch_params = pair(name, dtype)
    lr = optimizer.param_groups[0]["lr"]
    for step in range(40):
        for each in (optimizer, torch_optimizer):
            (group,) = each.param_groups
            group["lr"] = lr * (1 + 0.5 * (step % 5))
            if "betas" in group:
                group["betas"] = (0.8 + 0.01 * (step % 7), group["betas"][1])
        set_grads(params, torch_params)
        optimizer.step()
        torch_optimizer.step()
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
        assert_same(params, torch_params, **tolerance)
        for param, other in zip(params, torch_params, strict=True):
            for entry, value in torch_optimizer.state[other].items():
                torch.testing.assert_close(optimizer.state[param][entry], value, **tolerance)
                # Later steps start from the same values, so that differences do not add up.
                optimizer.state[param][entry].copy_(value)
            param.detach().copy_(other.detach())


@phases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_states_go_to_torch_and_back(name: str, dtype: torch.dtype) -> None:
    ours, theirs = getattr(optim, name), getattr(torch.optim, name)
    optimizer, torch_optimizer, params, torch_params = pair(name, dtype)
    for _ in range(3):
        set_grads(params, torch_params)
        optimizer.step()
        torch_optimizer.step()
    from_torch, to_torch = ours(copies(torch_params)), theirs(copies(params))
    from_torch.load_state_dict(copy.deepcopy(torch_optimizer.state_dict()))
    to_torch.load_state_dict(copy.deepcopy(optimizer.torch_state_dict()))
    made = [from_torch, torch_optimizer, to_torch, optimizer]
    for _ in range(2):
        set_grads(*(each.param_groups[0]["params"] for each in made))
        for each in made:
            each.step()
    tolerance = {torch.bfloat16: 4e-2, torch.float32: 1e-5, torch.float64: 1e-6}[dtype]
    for one, other in ((from_torch, torch_optimizer), (to_torch, optimizer)):
        pairs = [each.param_groups[0]["params"] for each in (one, other)]
        assert_same(*pairs, rtol=tolerance, atol=tolerance)
    # Through torch's class, which casts scalars to the dtype of the parameter, and back.
    back = ours(copies(to_torch.param_groups[0]["params"]))
    back.load_state_dict(to_torch.state_dict())
    for param in back.param_groups[0]["params"]:
        for scalar in SCALARS.get(name, []):
            assert back.state[param][scalar].dtype in (torch.float32, torch.float64)
        param.grad = torch.randn_like(param)
    back.step()


@scalars
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_leaves_scalars(name: str, dtype: torch.dtype) -> None:
    params = make_params(dtype)
    optimizer = getattr(optim, name)(params, max_grad_norm=1.0, **PHASES[name])
    set_grads(params)
    optimizer.step()
    before = copy.deepcopy(everything(optimizer))
    set_grads(params)
    params[-1].grad.view(-1)[0] = float("inf")
    with pytest.warns(UserWarning, match="the step was left out"):
        optimizer.step()
    assert all(same_bits(a, b) for a, b in zip(everything(optimizer), before, strict=True))
    set_grads(params)
    optimizer.step()
    assert all(optimizer.state[param]["step"] == 2 for param in params)


@scalars
def test_parameters_have_their_own_scalars(name: str) -> None:
    """A parameter that joins late has other scalars than its neighbors, in one group and one step."""
    optimizer, torch_optimizer, params, torch_params = pair(name)
    for step in range(6):
        set_grads(params, torch_params)
        for own in (params, torch_params):
            for late in own[1::2]:
                late.grad = late.grad if step > 2 else None
        optimizer.step()
        torch_optimizer.step()
    assert_same(params, torch_params, rtol=1e-5, atol=1e-5)
    for param, other in zip(params, torch_params, strict=True):
        for scalar in SCALARS[name]:
            assert optimizer.state[param][scalar] == torch_optimizer.state[other][scalar]


@scalars
@pytest.mark.parametrize(
    "value", [torch.ones(2), torch.ones((), dtype=torch.int64), torch.ones((), dtype=torch.bfloat16), 1.0, "one"]
)
def test_a_scalar_that_is_no_number_is_named(name: str, value: Any) -> None:
    optimizer, _, params, _ = pair(name)
    set_grads(params)
    optimizer.step()
    scalar = SCALARS[name][-1]
    optimizer.state[params[-1]][scalar] = value
    before = [param.detach().clone() for param in params]
    with pytest.raises(TypeError, match=f"its state (has no tensor )?'{scalar}'"):
        optimizer.step()
    assert all(torch.equal(param, other) for param, other in zip(params, before, strict=True))


@scalars
def test_a_state_without_its_scalars_is_refused(name: str) -> None:
    optimizer, _, params, _ = pair(name)
    set_grads(params)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][1][SCALARS[name][0]]
    with pytest.raises(ValueError, match=f"parameter 1 .* its state has no '{SCALARS[name][0]}', which {name} needs"):
        optimizer.load_state_dict(saved)


def test_rprop_starts_complex_step_sizes_as_torch() -> None:
    outcomes = []
    for cls in (optim.Rprop, torch.optim.Rprop):
        torch.manual_seed(0)
        param = torch.randn(9, dtype=torch.complex64).requires_grad_()
        optimizer = cls([param], lr=0.5)
        for _ in range(3):
            param.grad = torch.randn(9, dtype=torch.complex64)
            optimizer.step()
        outcomes.append((param.detach(), optimizer.state[param]["step_size"]))
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


# ---- Schedule-free AdamW.


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {}),
        (torch.float32, {"state_bits": 8, "min_8bit_size": 0}),
        (torch.bfloat16, {"master_bits": 32, "state_bits": 32}),
        (torch.float16, {"master_bits": 32, "state_bits": 32}),
    ],
)
def test_eval_moves_to_the_average_and_train_back(dtype: torch.dtype, options: dict[str, Any]) -> None:
    param = torch.randn(40, 30).to(dtype).requires_grad_()
    start = param.detach().double()
    optimizer = optim.AdamWScheduleFree([param], lr=0.01, betas=(0.9, 0.99), **options)
    x = z = start.clone()
    weights = 0.0
    average_of_z = torch.zeros_like(start)
    for _ in range(6):
        param.grad = torch.randn_like(param)
        optimizer.step()
        z = optim.precision.without_blocks(optimizer.state[param])["z"].double()
        weight = optimizer.state[param]["weight_sum"].item() - weights
        weights += weight
        average_of_z += weight * z
    x = average_of_z / weights
    y = optimizer.float32_value(param).double() if dtype != torch.float64 else param.detach().clone()
    tolerance = {"rtol": 1e-3, "atol": 2e-2} if options.get("state_bits") == 8 else {"rtol": 1e-5, "atol": 1e-5}
    optimizer.eval()
    at_x = optimizer.float32_value(param).double()
    torch.testing.assert_close(at_x, x, **tolerance)
    torch.testing.assert_close(y, 0.1 * z + 0.9 * at_x, rtol=1e-5, atol=1e-5)
    optimizer.eval()  # has no further effect
    assert torch.equal(at_x, optimizer.float32_value(param).double())
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]: the optimizer is in evaluation mode: call its train"):
        optimizer.step()
    loaded = optim.AdamWScheduleFree([param.detach().clone().requires_grad_()])
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, loaded):
        each.train()
        back = each.float32_value(each.param_groups[0]["params"][0]).double()
        torch.testing.assert_close(back, y, rtol=1e-5, atol=1e-5)
    param.grad = torch.randn_like(param)
    optimizer.step()


def test_a_beta_of_zero_has_no_average() -> None:
    with pytest.raises(ValueError, match=r"betas\[0\] is 0"):
        optim.AdamWScheduleFree(make_params(), betas=(0.0, 0.9))


def test_scalars_are_known_by_name() -> None:
    assert _C.optim_scalars("asgd") == ["eta", "mu"]
    assert _C.optim_scalars("adam") == []
    assert set(_C.optim_scalar_names()) == {"mu_product", "eta", "mu", "weight_sum", "lr_max"}
