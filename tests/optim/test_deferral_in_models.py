"""Tests gradients that wait for the step under data parallelism, after install(), and with autograd's own metadata."""

import copy

import pytest
import torch
from torch import nn

import drivetrain
from deferral_cases import SCALE, TORCHS_CLIP, Loop, adamw, assert_same_bits, both
from drivetrain import _C, optim
from drivetrain.amp import GradScaler

# ---- Metadata moves when an optimizer is made; torch's must survive.


def test_autograd_keeps_what_it_knew_of_a_parameter() -> None:
    param = torch.ones(3, requires_grad=True)
    said: list[str] = []
    param.register_hook(lambda grad: said.append("hook"))
    param.register_post_accumulate_grad_hook(lambda param: said.append("post"))
    param.grad_dtype = torch.float64
    param.grad = torch.full((3,), 2.0, dtype=torch.float64)
    grad, leaf = param.grad, (param * 2).grad_fn.next_functions[0][0]
    with torch.autograd.forward_ad.dual_level():
        optim.SGD([param], lr=1.0)
        assert param.grad is grad
        assert param.is_leaf
        assert param.requires_grad
        assert param.grad_dtype == torch.float64
        assert (param * 2).grad_fn.next_functions[0][0] is leaf
    (param * 3).sum().backward()
    assert said == ["hook", "post"]
    assert grad.tolist() == [5.0, 5.0, 5.0]
    param.register_hook(lambda grad: said.append("later"))
    (param * 3).sum().backward()
    assert said == ["hook", "post", "hook", "later", "post"]
    param.requires_grad_(False)
    assert not (param * 3).requires_grad


def test_views_and_other_tensors_keep_their_metadata() -> None:
    base = torch.ones(4, requires_grad=True)
    view = base.detach()[1:].requires_grad_()
    ours = Loop(True, [view], lambda params: optim.SGD(params, lr=1.0))
    view.grad = torch.full((3,), SCALE)
    ours.scaler.unscale_(ours.optimizer)
    assert view.grad.tolist() == [1.0, 1.0, 1.0]
    ours.scaler.step(ours.optimizer)
    assert view.tolist() == [0.0, 0.0, 0.0]
    assert base.tolist() == [1.0, 0.0, 0.0, 0.0]


# ---- Data parallel.


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", ["ours", "torch", "torch_views"])
def test_under_data_parallel(kind: str) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    sides = []
    for defers in (True, False):
        module = copy.deepcopy(plain)
        if kind == "ours":
            model: nn.Module = drivetrain.DistributedDataParallel(module)
        else:
            model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=kind == "torch_views")
        sides.append((Loop(defers, list(module.parameters()), adamw), model))
    (ours, _), (theirs, _) = sides
    for step in range(4):
        for loop, model in sides:
            torch.manual_seed(step)
            loop.scaler.scale(model(torch.randn(5, 6)).square().sum()).backward()
            loop.scaler.unscale_(loop.optimizer)
        assert ours.is_waiting() == (kind == "torch")  # the other two have one buffer for many gradients
        both(ours, theirs, lambda loop: loop.clip(loop.params, 0.5))
        both(ours, theirs, lambda loop: loop.scaler.step(loop.optimizer))
        both(ours, theirs, lambda loop: loop.scaler.update())
        if step == 2:  # and once without a look, and once without zeros: backward adds
            assert_same_bits(ours, theirs)
        if step != 1:
            both(ours, theirs, lambda loop: loop.optimizer.zero_grad(set_to_none=False))
    assert_same_bits(ours, theirs)


# ---- An unedited script.


def test_an_unedited_loop_defers_after_install() -> None:
    drivetrain.install(optim=True)
    try:
        assert torch.amp.GradScaler is torch.GradScaler is GradScaler
        assert torch.nn.utils.clip_grad_norm_ is optim.clip_grad_norm_
        assert issubclass(GradScaler, torch.amp.grad_scaler.GradScaler)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            scaler.scale(model(torch.randn(2, 4)).sum()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            assert _C.deferrals_of(list(model.parameters()))
            optimizer.zero_grad()
    finally:
        drivetrain.uninstall()
    assert torch.amp.GradScaler is torch.GradScaler is torch.amp.grad_scaler.GradScaler
    assert torch.nn.utils.clip_grad_norm_ is TORCHS_CLIP
