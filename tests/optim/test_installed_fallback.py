"""Tests that install(optim=True) breaks nothing: torch's own step takes over where ours cannot step."""

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drivetrain
from drivetrain.optim import left_to_torch
from optim_cases import TORCHS, TORCHS_SCALER

STAYS = "stays torch's own class"


def params_in_one_memory() -> list[nn.Parameter]:
    memory = torch.arange(12.0).reshape(4, 3)
    return [nn.Parameter(memory), nn.Parameter(memory[:2])]


def a_parameter_twice() -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(12.0).reshape(4, 3))] * 2


def steps(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], count: int = 3) -> list[Tensor]:
    for step in range(count):
        for param in params:
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return [param.detach() for param in params]


def quietly(function: Any, *args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("make", [params_in_one_memory, a_parameter_twice])
@pytest.mark.parametrize("name", TORCHS)
def test_what_only_torch_can_step_is_stepped_by_torch(name: str, make: Any) -> None:
    ours, theirs = make(), make()
    mine, torchs = getattr(torch.optim, name)(ours, lr=0.1), TORCHS[name](theirs, lr=0.1)
    assert type(mine) is not type(torchs)
    with pytest.warns(UserWarning, match=f"torch.optim.{name} {STAYS}: parameter \\d of") as warned:
        steps(mine, ours)
    assert len([each for each in warned if STAYS in str(each.message)]) == 1  # of three steps
    steps(torchs, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    assert len([line for line in left_to_torch.constructed if line.startswith(f"torch.optim.{name} {STAYS}")]) == 1


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_training_goes_on_where_our_steps_end(name: str) -> None:
    """Keeps the states, the scheduler's wrapped step and hooks, which run once per step."""
    ours, theirs = ([nn.Parameter(torch.ones(4, 3))] for _ in range(2))
    mine = getattr(torch.optim, name)(ours, lr=0.1, weight_decay=0.1)
    torchs = TORCHS[name](theirs, lr=0.1, weight_decay=0.1)
    hooked = []
    for optimizer, params in ((mine, ours), (torchs, theirs)):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer.register_step_pre_hook(lambda *_: hooked.append("pre"))
        optimizer.register_step_post_hook(lambda *_: hooked.append("post"))
        steps(optimizer, params)
        scheduler.step()
        view = nn.Parameter(params[0].data[:2])
        params.append(view)
        quietly(optimizer.add_param_group, {"params": [view], "lr": -0.1})  # torch does not check it here
        quietly(steps, optimizer, params)
        scheduler.step()
        quietly(steps, optimizer, params)
    assert hooked == ["pre", "post"] * 18
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert mine.state_dict()["param_groups"] == torchs.state_dict()["param_groups"]


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")  # torch's SGD
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "ASGD"])
def test_differentiable_steps(name: str) -> None:
    def gradients(cls: type[torch.optim.Optimizer]) -> list[Tensor | None]:
        param, lr = torch.full((3,), 2.0, requires_grad=True), torch.tensor(0.1, requires_grad=True)
        stepped = param.clone()
        optimizer = cls([stepped], lr=lr, differentiable=True)  # type: ignore[call-arg]
        stepped.grad = param.square()
        optimizer.step()
        stepped.sum().backward()
        return [param.grad, lr.grad]

    with pytest.warns(UserWarning, match=f"torch.optim.{name} {STAYS}: .*differentiable=True"):
        ours = gradients(getattr(torch.optim, name))
    expected = gradients(TORCHS[name])
    assert expected[0] is not None
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)  # torch's ASGD does not differentiate by lr
        if a is not None and b is not None:
            assert torch.equal(a, b)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("is_pickled", [True, False])
def test_copies_stay_torchs_too(is_pickled: bool) -> None:
    params = params_in_one_memory()
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    quietly(steps, optimizer, params)
    copied = pickle.loads(pickle.dumps(optimizer)) if is_pickled else copy.deepcopy(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(copied, copied.param_groups[0]["params"])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_a_scaler_skips_torchs_steps_after_an_overflow(fused: bool, clips: bool) -> None:
    def train(cls: Any, scaler: torch.amp.GradScaler) -> tuple[list[Tensor], float]:
        params = params_in_one_memory()
        optimizer = cls(params, lr=0.1, fused=fused)
        for step in range(4):
            optimizer.zero_grad()
            loss = sum((param * param).sum() for param in params) * (math.inf if step == 1 else 1)
            scaler.scale(loss).backward()  # type: ignore[arg-type]
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 0.5)
            quietly(scaler.step, optimizer)
            scaler.update()
        return [param.detach() for param in params], scaler.get_scale()

    ours, scale = train(torch.optim.AdamW, torch.amp.GradScaler("cpu", init_scale=256.0))
    theirs, expected_scale = train(TORCHS["AdamW"], TORCHS_SCALER("cpu", init_scale=256.0))
    assert scale == expected_scale
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("installed")
def test_torchs_errors_are_torchs() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = torch.optim.Adam(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients, please consider SparseAdam"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"state_bits": 16}, {"zero_grads_in_step": True}])
def test_options_that_torch_lacks_keep_our_errors(options: dict[str, Any]) -> None:
    params = params_in_one_memory()
    optimizer = torch.optim.AdamW(params, **options)
    with pytest.raises(ValueError, match="share memory"):
        steps(optimizer, params)


def test_without_install_our_classes_raise() -> None:
    params = params_in_one_memory()
    with pytest.raises(ValueError, match="share memory"):
        steps(drivetrain.optim.SGD(params), params)
    with pytest.raises(NotImplementedError, match="differentiable=True"):
        drivetrain.optim.SGD(params, differentiable=True)
