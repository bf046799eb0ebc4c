"""Tests the parts of a step around its rule: unscaling, overflow checks, clipping and zeroing; and drivetrain.amp."""

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import drivetrain
from drivetrain import _C, optim
from drivetrain.amp import GradScaler
from effort import covering
from optim_cases import TOLERANCES, assert_same, copies, make_params, set_grads
from reference.lamb import LAMB

OPTIMIZERS = {
    "adamw": (optim.AdamW, torch.optim.AdamW, {}),
    "sgd_momentum": (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (optim.Adagrad, torch.optim.Adagrad, {}),
    "lamb": (optim.LAMB, LAMB, {"lr": 1e-2}),
}
both = pytest.mark.parametrize("which", OPTIMIZERS)
on_devices = pytest.mark.usefixtures("device")


def snapshot(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy([optimizer.state_dict(), [p for group in optimizer.param_groups for p in group["params"]]])


def assert_unchanged(optimizer: torch.optim.Optimizer, before: Any) -> None:
    torch.testing.assert_close(snapshot(optimizer), before, rtol=0, atol=0, equal_nan=True)


def pair(which: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    ours, theirs, shared = OPTIMIZERS[which]
    params = make_params(dtype)
    torch_params = copies(params)
    return ours(params, **shared, **options), theirs(torch_params, **shared), params, torch_params


def scale_grads(params: list[Tensor], factor: float) -> None:
    for param in params:
        param.grad.mul_(factor)


NORMS = (0.5, 1e4, math.inf)


@pytest.mark.parametrize(
    ("dtype", "which", "max_norm", "zero"), covering(2, list(TOLERANCES), list(OPTIMIZERS), NORMS, [False, True])
)
def test_one_pass_is_unscale_clip_step_and_zero_one_after_the_other(
    which: str, dtype: torch.dtype, max_norm: float, zero: bool, isa: str
) -> None:
    """Compares bits. 16-bit parameters are compared with a step on gradients that were scaled in float32."""
    ours_class, torch_class, shared = OPTIMIZERS[which]
    params = make_params(dtype)
    plain_params, torch_params = copies(params), copies(params)
    ours = ours_class(params, max_grad_norm=max_norm, zero_grads_in_step=zero, **shared)
    plain, theirs = ours_class(plain_params, **shared), torch_class(torch_params, **shared)
    is_wide = dtype in (torch.float32, torch.float64)
    wide = dtype if is_wide else torch.float32
    for _ in range(3):
        set_grads(params)
        grads, versions = [p.grad.clone() for p in params], [p.grad._version for p in params]
        ours.grad_scale = torch.tensor(4.0)
        ours.step()
        assert ours.grad_norm == pytest.approx(torch.cat([g.double().flatten() for g in grads]).norm().item() / 4)
        factor = 0.25 * min(1.0, max_norm / (ours.grad_norm + 1e-6))
        for grad, plain_param, torch_param in zip(grads, plain_params, torch_params, strict=True):
            plain_param.grad_dtype = wide
            plain_param.grad = grad.to(wide) * torch.tensor(factor, dtype=wide)
            torch_param.grad = plain_param.grad.to(dtype)
        plain.step()
        theirs.step()
        assert_same(params, plain_params, rtol=0, atol=0)
        if is_wide:
            assert_same(params, torch_params, **TOLERANCES[dtype])
        assert_same([p.grad for p in params], [p.grad * (not zero) for p in torch_params], rtol=0, atol=0)
        assert all(p.grad._version > version for p, version in zip(params, versions, strict=True))


@both
def test_without_a_factor_gradients_stay_as_they_are(which: str) -> None:
    ours, _, params, _ = pair(which, max_grad_norm=math.inf)
    set_grads(params)
    before = copies([p.grad for p in params])
    ours.step()
    assert_same([p.grad for p in params], before, rtol=0, atol=0)


@on_devices
@both
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "gradient_transposed", "holes"])
def test_any_layout(which: str, layout: str) -> None:
    ours, theirs, options = OPTIMIZERS[which]
    shape = (3, 4, 5, 6)
    param = torch.randn(shape)
    if layout == "channels_last":
        param = param.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        param = torch.randn(6, 5, 4, 3).permute(3, 2, 1, 0)
    elif layout == "holes":
        param = torch.randn(3, 4, 5, 12)[..., ::2]
    reference = param.clone().contiguous().requires_grad_()
    param.requires_grad_()
    grad = torch.randn(6, 5, 4, 3).permute(3, 2, 1, 0) if layout == "gradient_transposed" else torch.randn_like(param)
    param.grad, reference.grad = grad, grad.clone().contiguous()
    expected_norm = reference.grad.double().norm().item()
    optimizer = ours([param], max_grad_norm=0.1, zero_grads_in_step=True, **options)
    optimizer.step()
    torch.nn.utils.clip_grad_norm_([reference], 0.1)
    theirs([reference], **options).step()
    assert_same([param], [reference], rtol=1e-5, atol=1e-6)
    assert param.grad is grad
    assert not grad.any()
    assert optimizer.grad_norm == pytest.approx(expected_norm, rel=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("sizes", [(0,), (1,), (31, 33), (511, 16_385, 40_000)])
def test_the_norm_has_the_same_bits_on_every_machine(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    params = [torch.zeros(size, dtype=dtype).requires_grad_() for size in sizes]
    set_grads(params)
    norms = set()
    for isa in _C.available_isas():
        for count in (1, 2, 3):
            _C.force_isa(isa)
            torch.set_num_threads(count)
            optimizer = optim.SGD(params, lr=0.0, max_grad_norm=math.inf)
            optimizer.step()
            norms.add(optimizer.grad_norm)
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(torch.cat([p.grad.double() for p in params]).norm().item(), rel=1e-12)


@on_devices
def test_large_and_tiny_gradients_neither_overflow_nor_vanish() -> None:
    param = torch.zeros(3, requires_grad=True)
    for value in (3e38, 1e-38):
        param.grad = torch.full((3,), value)
        optimizer = optim.SGD([param], lr=0.0, max_grad_norm=math.inf)
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(math.sqrt(3) * value, rel=1e-6)


# ---- Clipping alone.


@on_devices
@pytest.mark.parametrize("dtype", [*TOLERANCES, torch.complex64])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clip_grad_norm_is_torchs(dtype: torch.dtype, max_norm: float, norm_type: float) -> None:
    sizes = (0, 1, 513, 40_000) if norm_type < math.inf else (1, 513)  # torch has no infinity norm of an empty tensor.
    params = [torch.randn(size, dtype=dtype).requires_grad_() for size in sizes]
    references, untouched = copies(params), torch.randn(3).requires_grad_()
    set_grads(params, references)
    ours = drivetrain.clip_grad_norm_(iter([*params, untouched]), max_norm, norm_type)
    theirs = torch.nn.utils.clip_grad_norm_(references, max_norm, norm_type)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=0)
    assert_same([p.grad for p in params], [p.grad for p in references], rtol=tolerance, atol=1e-6)


# ---- Overflows.


@both
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("zero", [False, True])
def test_an_overflow_changes_nothing(which: str, bad: float, zero: bool) -> None:
    ours, _, params, _ = pair(which, max_grad_norm=1.0, zero_grads_in_step=zero)
    set_grads(params)
    ours.step()
    set_grads(params)
    params[-1].grad[2, 699] = bad
    before = snapshot(ours)
    with pytest.warns(UserWarning, match="norm of the gradients is (inf|nan); the step was left out"):
        ours.step()
    assert ours.last_step_skipped
    assert_unchanged(ours, before)
    assert any(p.grad.any() for p in params) != zero  # The next backward must not add to non-finite values.
    set_grads(params)
    ours.step()
    assert not ours.last_step_skipped


def test_an_overflow_in_the_first_step_leaves_it_to_come() -> None:
    """SGD's first step differs from later ones: the buffer starts as the gradient, without dampening."""
    params = make_params()
    torch_params = copies(params)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    ours = optim.SGD(params, max_grad_norm=math.inf, **options)
    theirs = torch.optim.SGD(torch_params, **options)
    set_grads(params)
    params[-1].grad[0, 0] = math.nan
    with pytest.warns(UserWarning, match="left out"):
        ours.step()
    assert not ours.state
    for _ in range(2):
        set_grads(params, torch_params)
        ours.step()
        theirs.step()
    assert_same(params, torch_params, rtol=1e-5, atol=1e-6)


@on_devices
@both
@pytest.mark.parametrize("found", [1.0, 2.0, 0.5])
def test_found_inf_of_any_size(which: str, found: float) -> None:
    """torch's kernels compare found_inf with 1 alone, although a scaler passes the sum over devices."""
    ours, _, params, _ = pair(which)
    set_grads(params)
    ours.step()
    before = snapshot(ours)
    ours.grad_scale, ours.found_inf = torch.tensor(2.0), torch.tensor(found)
    ours.step()
    assert_unchanged(ours, before)
    ours.found_inf = torch.tensor(0.0)
    ours.step()
    assert not torch.equal(params[-1], before[1][-1])


@both
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_under_a_grad_scaler(which: str, scaler_class: type, unscale_first: bool, device: str) -> None:
    ours, theirs, params, torch_params = pair(which)
    options: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}
    scaler, torch_scaler = scaler_class(device, **options), torch.amp.GradScaler(device, **options)
    for step in range(8):
        set_grads(params, torch_params)
        if step in (2, 5, 6):
            params[-1].grad[0, 0] = torch_params[-1].grad[0, 0] = math.inf
        for each, optimizer, own in ((scaler, ours, params), (torch_scaler, theirs, torch_params)):
            scale_grads(own, each.scale(torch.ones(())).item())
            before = snapshot(optimizer)
            if unscale_first:
                each.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(own, 1.0)
            each.step(optimizer)
            each.update()
            if step in (2, 5, 6):
                assert_unchanged(optimizer, before)
        assert scaler.get_scale() == torch_scaler.get_scale()
        assert_same(params, torch_params, rtol=1e-5, atol=1e-6)
        if step not in (2, 5, 6):
            assert_same([p.grad for p in params], [p.grad for p in torch_params], rtol=1e-6, atol=0)
        if isinstance(scaler, GradScaler):
            assert scaler.last_step_skipped == (step in (2, 5, 6))


def test_a_users_own_grad_scale_is_multiplied_in(device: str) -> None:
    param, reference = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    ours, theirs = optim.SGD([param], lr=1.0), torch.optim.SGD([reference], lr=1.0, fused=True)
    for optimizer, own in ((ours, param), (theirs, reference)):
        scaler = torch.amp.GradScaler(device, init_scale=8.0)
        scaler.scale(own.sum()).backward()
        optimizer.grad_scale = torch.tensor(3.0)
        scaler.step(optimizer)
    assert_same([param], [reference], rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
def test_step_pre_hooks_see_what_they_see_under_torch(options: dict[str, bool], device: str) -> None:
    seen = []
    for cls in (optim.SGD, torch.optim.SGD):
        param = torch.ones(3, requires_grad=True)
        optimizer, scaler = cls([param], lr=1.0, **options), torch.amp.GradScaler(device, init_scale=8.0)
        optimizer.register_step_pre_hook(
            lambda optimizer, *_: seen.append(optimizer.param_groups[0]["params"][0].grad.tolist())
        )
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
    assert seen[0] == seen[1]


def test_who_unscales_follows_max_grad_norm(device: str) -> None:
    param = torch.ones(3, requires_grad=True)
    optimizer, scaler = optim.SGD([param], lr=1.0), GradScaler(device)
    assert not optimizer._step_supports_amp_scaling  # Lightning refuses to clip if this is true.
    optimizer.max_grad_norm = 1.0
    assert optimizer._step_supports_amp_scaling
    optimizer.max_grad_norm = None
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert not optimizer._step_supports_amp_scaling


def test_an_error_in_a_scaled_step_leaves_nothing_behind(device: str) -> None:
    param = torch.ones(3, requires_grad=True)
    optimizer, scaler = optim.SGD([param], lr=1.0), GradScaler(device)
    scaler.scale(param.sum()).backward()
    param.grad = torch.ones(1).expand(3)
    with pytest.raises((ValueError, RuntimeError), match=r"expanded gradient|more than one element"):
        scaler.step(optimizer)
    optimizer.grad_scale = optimizer.found_inf = None
    param.grad = torch.full((3,), math.inf)
    optimizer.step()  # A plain step does not check for overflows.
    assert not optimizer.last_step_skipped


def test_the_norm_of_an_overflow_is_there_to_be_logged(device: str) -> None:
    param = torch.ones(3, requires_grad=True)
    optimizer, scaler = optim.AdamW([param], max_grad_norm=1.0), torch.amp.GradScaler(device)
    scaler.scale(param.sum()).backward()
    param.grad[0] = math.inf
    scaler.step(optimizer)
    assert optimizer.grad_norm == math.inf
    assert optimizer.last_step_skipped


def test_our_scaler_searches_in_the_optimizers_own_read(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    param = torch.ones(3, requires_grad=True)
    optimizer, scaler = optim.AdamW([param], max_grad_norm=1.0), GradScaler(device)
    scaler.scale(param.sum()).backward()

    def refuse(*_: object) -> None:
        raise AssertionError("a pass of torch's over the gradients")

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", refuse)
    scaler.step(optimizer)
    assert optimizer.grad_norm == pytest.approx(math.sqrt(3), rel=1e-6)


class MegatronScale:
    """Updates a loss scale as Megatron-LM's DynamicGradScaler does."""

    def __init__(self, scale: float, growth_interval: int, min_scale: float, hysteresis: int) -> None:
        self.scale, self.interval, self.min_scale, self.hysteresis = scale, growth_interval, min_scale, hysteresis
        self.growth, self.patience = 0, hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.growth = 0
            self.patience -= 1
            if self.patience <= 0:
                self.scale = max(self.scale * 0.5, self.min_scale)
        else:
            self.growth += 1
            if self.growth == self.interval:
                self.growth, self.patience = 0, self.hysteresis
                self.scale *= 2.0


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("min_scale", [0.0, 2.0])
@pytest.mark.parametrize("saved", ["not", "state_dict", "pickle"])
def test_the_scales_course(hysteresis: int, min_scale: float, saved: str, device: str) -> None:
    reference = MegatronScale(16.0, 2, min_scale, hysteresis)
    options: dict[str, Any] = {"growth_interval": 2, "min_scale": min_scale, "hysteresis": hysteresis}
    scaler = GradScaler(device, 16.0, **options)
    param = torch.ones(1, requires_grad=True)
    optimizer = optim.SGD([param], lr=0.0)
    for step in range(40):
        overflow = bool(torch.rand(()) < 0.6)
        scaler.scale(torch.ones(()))
        param.grad = torch.full((1,), math.inf if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        reference.update(overflow)
        assert scaler.get_scale() == reference.scale, step
        if saved == "state_dict":
            state = scaler.state_dict()
            scaler = GradScaler(device)
            scaler.load_state_dict(state)
        elif saved == "pickle":
            scaler = pickle.loads(pickle.dumps(scaler))


def test_scaler_states_go_to_torch_and_back() -> None:
    ours, theirs = GradScaler("cpu", 8.0, min_scale=1.0, hysteresis=2), torch.amp.GradScaler("cpu", 32.0)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict()["scale"] == 8.0
    ours.load_state_dict(torch.amp.GradScaler("cpu", 32.0).state_dict())
    assert (ours.state_dict()["scale"], ours.state_dict()["min_scale"], ours.state_dict()["hysteresis"]) == (
        32.0,
        1.0,
        2,
    )
    assert GradScaler("cpu", enabled=False).state_dict() == {}


# ---- Careless users.


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_bad_max_grad_norm(value: float) -> None:
    param = torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match=f"max_grad_norm is {value}, expected a number above 0"):
        optim.AdamW([param], max_grad_norm=value)
    optimizer = optim.AdamW([param], max_grad_norm=1.0)
    with pytest.raises(ValueError, match="max_grad_norm"):
        optimizer.max_grad_norm = value
    assert optimizer.max_grad_norm == 1.0


@pytest.mark.parametrize(("options", "name"), [({"min_scale": -1.0}, "min_scale"), ({"hysteresis": 0}, "hysteresis")])
def test_bad_scaler_arguments(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*, expected"):
        GradScaler("cpu", **options)


@on_devices
def test_an_expanded_gradient_is_not_written() -> None:
    good, param = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    good.grad, param.grad = torch.ones(3), torch.ones(1).expand(3)
    optimizer = optim.SGD([good, param], lr=1.0, max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"parameter 1 of param_groups\[0\].*expanded gradient"):
        optimizer.step()
    assert_same([good, good.grad], [torch.ones(3), torch.ones(3)], rtol=0, atol=0)
    optimizer.max_grad_norm = None
    optimizer.step()
    assert_same([param], [torch.zeros(3)], rtol=0, atol=0)


@on_devices
@pytest.mark.parametrize("saved", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"])
def test_copies_keep_what_the_step_does(saved: Any) -> None:
    optimizer = saved(optim.AdamW([torch.ones(3, requires_grad=True)], max_grad_norm=2.0, zero_grads_in_step=True))
    assert (optimizer.max_grad_norm, optimizer.zero_grads_in_step) == (2.0, True)
    param = optimizer.param_groups[0]["params"][0]
    param.grad = torch.full((3,), 4.0)
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(4 * math.sqrt(3))
    assert not param.grad.any()


@on_devices
def test_parameters_without_a_gradient_do_not_count() -> None:
    params = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    optimizer = optim.AdamW(params, max_grad_norm=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        assert optimizer.grad_norm == 0.0
        params[0].grad = torch.ones(3)
        optimizer.step()
    assert optimizer.grad_norm == pytest.approx(math.sqrt(3))
