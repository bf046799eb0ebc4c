"""Tests what works around a step of our optimizers as around torch's: hooks, profiles, averages, swaps, compilation.

The tests cover:

* hooks: step (pre, post, global), state_dict (pre, post, prepended), load_state_dict (pre, post), and their removal
* the profiler's record of a step; zero_grad; AveragedModel (SWA and EMA, SWALR); swap_in_optimizer_params_and_state;
  swap_tensors; a step inside torch.compile
* parameters on several devices (where there is a GPU)
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import drivetrain
from optim_db_cases import assert_same, classes, make_params, names, pair, references, set_grads, steps

# ---- Hooks and other features around a step.


@names
def test_step_hooks(name: str) -> None:
    calls: list[str] = []
    optimizer = classes(name)[0](make_params())
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre")),
        optimizer.register_step_post_hook(lambda *_: calls.append("post")),
    ]
    steps(1, optimizer)
    assert calls == ["global pre", "pre", "post", "global post"]
    for handle in handles:
        handle.remove()
    steps(1, optimizer)
    assert len(calls) == 4
    optimizer.register_step_pre_hook(lambda _, args, kwargs: ((*args, lambda: 7.0), kwargs))
    assert optimizer.step() == 7.0


@names
def test_state_dict_hooks(name: str) -> None:
    optimizer = classes(name)[0](make_params())
    steps(1, optimizer)
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("pre"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("first"), prepend=True)
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"more": 1})
    removed = optimizer.register_state_dict_post_hook(lambda _, state: state.clear())
    removed.remove()
    state = optimizer.state_dict()
    assert calls == ["first", "pre"]
    assert state.pop("more") == 1
    calls.clear()
    optimizer.register_load_state_dict_pre_hook(lambda _, s: calls.append("load pre"))
    optimizer.register_load_state_dict_pre_hook(lambda _, s: {**s, "param_groups": s["param_groups"]}, prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("load post"))
    optimizer.load_state_dict(state)
    assert calls == ["load pre", "load post"]


@names
def test_the_profiler_sees_the_step(name: str) -> None:
    optimizer = classes(name)[0](make_params())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        steps(1, optimizer)
        optimizer.zero_grad()
    seen = {event.name for event in profile.events()}
    assert {f"Optimizer.step#{name}.step", f"Optimizer.zero_grad#{name}.zero_grad"} <= seen


@names
@pytest.mark.parametrize("average", ["swa", "ema"])
def test_averaged_models(name: str, average: str) -> None:
    averages = []
    for cls in classes(name):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 1))
        multi_avg_fn = swa_utils.get_ema_multi_avg_fn(0.9) if average == "ema" else None
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=multi_avg_fn)
        optimizer = cls(model.parameters(), lr=0.01)
        data = torch.randn(5, 8, 4)
        for batch in data:
            optimizer.zero_grad()
            model(batch).pow(2).sum().backward()
            optimizer.step()
            averaged.update_parameters(model)
        swa_utils.update_bn(data, averaged)
        averages.append(averaged.state_dict())
    assert_same(*averages, {"rtol": 1e-4, "atol": 1e-5})


@contextmanager
def swapped_in(optimizer: torch.optim.Optimizer, params: dict[str, Tensor], state: dict[str, Any]) -> Iterator[None]:
    swap = getattr(torch.optim, "swap_in_optimizer_params_and_state", None)
    if swap is None:
        pytest.skip(f"torch {torch.__version__} has no swap_in_optimizer_params_and_state")
    with swap(optimizer, params, state):
        yield


@names
def test_parameters_and_state_may_be_swapped_in(name: str) -> None:
    optimizer, torch_optimizer, params, torch_params = pair(name, lr=0.01)
    if name == "SGD":
        optimizer.param_groups[0]["momentum"] = torch_optimizer.param_groups[0]["momentum"] = 0.5
    steps(2, optimizer, torch_optimizer)
    before = [references(params), copy.deepcopy(optimizer.state_dict())]
    results = []
    for each, own in ((optimizer, params), (torch_optimizer, torch_params)):
        torch.manual_seed(1)
        others = {str(i): p for i, p in enumerate(references(own))}
        state = copy.deepcopy(each.state_dict())
        with swapped_in(each, others, state):
            steps(1, each)
        results.append([list(others.values()), state["state"]])
    assert_same(*results)
    assert_same([params, optimizer.state_dict()], before, {"rtol": 0, "atol": 0})


@names
def test_tensors_may_be_swapped_under_it(name: str) -> None:
    optimizer, torch_optimizer, params, torch_params = pair(name, lr=0.01)
    steps(2, optimizer, torch_optimizer)
    for param, torch_param in zip(params, torch_params, strict=True):
        new = torch.randn_like(param)
        param.grad = torch_param.grad = None
        torch.utils.swap_tensors(param, new.clone().requires_grad_())
        torch.utils.swap_tensors(torch_param, new.clone().requires_grad_())
    steps(2, optimizer, torch_optimizer)
    assert_same(params, torch_params)


@names
def test_inside_torch_compile(name: str) -> None:
    optimizer, torch_optimizer, params, torch_params = pair(name, lr=0.01)
    set_grads(params, torch_params)

    def step(scale: Tensor) -> Tensor:
        optimizer.step()
        return scale * 2

    assert torch.compile(step, backend="eager")(torch.ones(())) == 2
    torch_optimizer.step()
    steps(2, optimizer, torch_optimizer)
    assert_same(params, torch_params)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"step outside of compiled graphs: call step\(\) outside"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(()))
    torch._dynamo.reset()


def test_a_scaler_inside_torch_compile() -> None:
    optimizer, torch_optimizer, params, torch_params = pair("AdamW", lr=0.01)
    scaler = drivetrain.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    set_grads(params, torch_params)
    for param in params:
        param.grad *= 4  # type: ignore[operator]

    @torch.compile(backend="eager")
    def step() -> None:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*Dynamo does not know how to trace")
        step()
    torch_optimizer.step()
    assert_same(params, torch_params)
    torch._dynamo.reset()


@pytest.mark.gpu
@names
def test_parameters_on_several_devices(name: str) -> None:
    ours, theirs = classes(name)
    params = [
        p.detach().to(device).requires_grad_() for p, device in zip(make_params(), ("cpu", "cuda", "cpu"), strict=True)
    ]
    torch_params = references(params)
    optimizer, torch_optimizer = ours(params), theirs(torch_params)
    for _ in range(3):
        for param, torch_param in zip(params, torch_params, strict=True):
            param.grad = torch.randn_like(param)
            torch_param.grad = param.grad.clone()
        optimizer.step()
        torch_optimizer.step()
    assert_same(params, torch_params)
