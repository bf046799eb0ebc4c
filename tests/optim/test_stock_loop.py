"""Tests unscaling and clipping of a stock loop: gradients, norms, states and errors have torch's bits."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import drivetrain
from drivetrain import optim
from drivetrain.amp import GradScaler
from effort import rounds
from optim_cases import assert_same, make_params
from stock_loops import SCALE, TORCHS_CLIP, Loop, adamw, assert_same_bits, both, references, set_scaled_grads

OPTIMIZERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "adamw": adamw,
    "adamw_fused": lambda params: optim.AdamW(params, fused=True),
    "adamw_low_bits": lambda params: optim.AdamW(
        params, state_bits=None if params[0].dtype == torch.float64 else 8, rounding="stochastic", min_8bit_size=256
    ),
    "sgd_momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": optim.Adagrad,
    "rmsprop": optim.RMSprop,
    "lion": optim.Lion,
    "lamb": optim.LAMB,
    "adafactor": optim.Adafactor,
    "own_clipping": lambda params: optim.AdamW(params, max_grad_norm=0.3),
    "own_zeroing": lambda params: optim.AdamW(params, zero_grads_in_step=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [0.5, 1e4, None])
def test_the_stock_loop_has_torchs_bits(which: str, dtype: torch.dtype, max_norm: float | None, isa: str) -> None:
    ours, theirs = references(dtype, OPTIMIZERS[which])
    for step in range(5):
        set_scaled_grads(ours, theirs, bad=(math.inf, math.nan)[step % 2] if step in (1, 3) else None)

        def tail(loop: Loop, step: int = step) -> Any:
            norm = None
            if step != 4:  # the last step leaves unscaling to the scaler's step
                loop.scaler.unscale_(loop.optimizer)
                norm = max_norm and loop.clip(loop.params, max_norm)
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
            return norm

        both(ours, theirs, tail)
        if which not in ("own_clipping", "own_zeroing", "adamw_fused") or step != 4:
            assert_same_bits(ours, theirs)
        both(ours, theirs, lambda loop, step=step: loop.optimizer.zero_grad(set_to_none=step % 2 == 0))
        if which not in ("own_clipping", "own_zeroing", "adamw_fused") or step != 4:
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_clipping_without_a_scaler_has_torchs_bits(dtype: torch.dtype, max_norm: float) -> None:
    ours, theirs = references(dtype, init_scale=1.0)
    for _ in range(3):
        set_scaled_grads(ours, theirs)
        both(ours, theirs, lambda loop: loop.clip(iter(loop.params), max_norm))
        both(ours, theirs, lambda loop: loop.optimizer.step())
        assert_same_bits(ours, theirs)
    both(ours, theirs, lambda loop: loop.scaler.unscale_(loop.optimizer))  # float16 raises torch's error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_on_many_threads_have_torchs_bits(dtype: torch.dtype) -> None:
    """Each thread computes norms of its own. torch's function computes them one after the other."""
    torch.set_num_threads(4)
    sizes = [1, 7, 300_001, 64, 0, 1031, 100_000, 17]
    params = [torch.randn(size).to(dtype).requires_grad_() for size in sizes]
    ours, theirs = Loop(True, params, adamw), Loop(False, copy.deepcopy(params), adamw)
    for _ in range(5):
        set_scaled_grads(ours, theirs)
        both(ours, theirs, lambda loop: loop.scaler.unscale_(loop.optimizer))
        both(ours, theirs, lambda loop: loop.clip(loop.params, 1.0))
        both(ours, theirs, lambda loop: loop.scaler.step(loop.optimizer))
        both(ours, theirs, lambda loop: loop.scaler.update())
        assert_same_bits(ours, theirs)


def test_hooks_on_steps_see_torchs_gradients() -> None:
    ours, theirs = references()
    seen: dict[bool, list[Any]] = {True: [], False: []}
    for loop in (ours, theirs):
        for register in (loop.optimizer.register_step_pre_hook, loop.optimizer.register_step_post_hook):
            register(lambda optimizer, *_, loop=loop: seen[loop.is_ours].append(loop.params[-1].grad.clone()))
    for unscales in (True, False):
        set_scaled_grads(ours, theirs)
        for loop in (ours, theirs):
            if unscales:
                loop.scaler.unscale_(loop.optimizer)
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
    torch.testing.assert_close(seen[True], seen[False], rtol=0, atol=0)
    assert len(seen[True]) == 4


def test_a_dispatch_mode_sees_torchs_gradients() -> None:
    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.norms: list[float] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if "norm" in str(func):
                self.norms += [float(each) for each in (result if isinstance(result, (list, tuple)) else [result])]
            return result

    ours, theirs = references()
    set_scaled_grads(ours, theirs)
    seen = []
    for loop in (ours, theirs):
        loop.scaler.unscale_(loop.optimizer)
        with Watch() as watch:
            loop.clip(loop.params, 1.0)
        seen.append(watch.norms)
    assert seen[0] == seen[1]
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize(
    "grad",
    [
        lambda p: p.detach().clone().to_sparse(),
        lambda p: torch.ones(1).expand(3, 700).mul(1),
        lambda p: torch.ones(700, 3).T,
        lambda p: torch.ones(3, 1400)[:, ::2],
    ],
    ids=["sparse", "expanded", "transposed", "strided"],
)
def test_unusual_gradients_have_torchs_bits(grad: Callable[[Tensor], Tensor]) -> None:
    ours, theirs = references(make=lambda params: optim.SGD(params, lr=0.1))
    for _ in range(2):
        for loop in (ours, theirs):
            for param in loop.params:
                param.grad = torch.ones_like(param)
            loop.params[-1].grad = grad(loop.params[-1])
        both(ours, theirs, lambda loop: loop.scaler.unscale_(loop.optimizer))
        both(ours, theirs, lambda loop: loop.scaler.step(loop.optimizer))
        both(ours, theirs, lambda loop: loop.scaler.update())
        assert_same(ours.params, theirs.params, rtol=0, atol=0)
        for a, b in zip(ours.params, theirs.params, strict=True):
            torch.testing.assert_close(a.grad.to_dense(), b.grad.to_dense(), rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
def test_dense_layouts_have_torchs_bits(layout: str) -> None:
    def parameter() -> Tensor:
        torch.manual_seed(1)
        if layout == "transposed":
            return torch.empty_strided((4, 6), (1, 4)).normal_().requires_grad_()
        return torch.randn(3, 4, 5, 6).contiguous(memory_format=torch.channels_last).requires_grad_()

    ours, theirs = Loop(True, [parameter()], adamw), Loop(False, [parameter()], adamw)
    for step in range(3):
        for loop in (ours, theirs):
            torch.manual_seed(step)
            (loop.params[0].square() * torch.rand(loop.params[0].shape) * loop.scaler.get_scale()).sum().backward()
            loop.scaler.unscale_(loop.optimizer)
            loop.clip(loop.params, 0.5)
        both(ours, theirs, lambda loop: loop.scaler.step(loop.optimizer))
        both(ours, theirs, lambda loop: loop.scaler.update())
        assert_same_bits(ours, theirs)
        both(ours, theirs, lambda loop: loop.optimizer.zero_grad())


# ---- Clipping: several optimizers, parts, errors.


def two_optimizers() -> tuple[list[Any], list[Any]]:
    sides = []
    params = make_params()
    for is_ours in (True, False):
        own = params if is_ours else [param.detach().clone().requires_grad_() for param in params]
        loop = Loop(is_ours, own, lambda params: optim.AdamW(params[:4], lr=0.01))
        sides.append([loop, optim.SGD(own[4:], lr=0.1)])
    return sides[0], sides[1]


@pytest.mark.parametrize("clipped", ["all", "each", "one", "part", "across", "twice", "doubled", "frozen"])
@pytest.mark.parametrize("bad", [None, math.inf])
def test_several_optimizers_under_one_scaler(clipped: str, bad: float | None) -> None:
    (ours, _), (theirs, _) = sides = two_optimizers()
    second = {loop.is_ours: optimizer for loop, optimizer in sides}
    extra = {loop.is_ours: torch.ones(3, requires_grad=True) for loop, _ in sides}
    parts: dict[str, list[Callable[[Loop], list[Tensor]]]] = {
        "all": [lambda loop: loop.params],
        "each": [lambda loop: loop.params[:4], lambda loop: loop.params[4:]],
        "one": [lambda loop: loop.params[4:]],
        "part": [lambda loop: loop.params[2:3]],
        "across": [lambda loop: loop.params[2:6]],
        "twice": [lambda loop: loop.params, lambda loop: loop.params],
        "doubled": [lambda loop: loop.params + loop.params[-1:]],
        "frozen": [lambda loop: [*loop.params, extra[loop.is_ours]]],  # a parameter of no optimizer
    }
    for _ in range(3):
        set_scaled_grads(ours, theirs, bad=bad)
        for loop in (ours, theirs):
            extra[loop.is_ours].grad = torch.ones(3)
            loop.scaler.unscale_(loop.optimizer)
            loop.scaler.unscale_(second[loop.is_ours])
        for part in parts[clipped]:
            both(ours, theirs, lambda loop, part=part: loop.clip(part(loop), 0.3))
        for loop in (ours, theirs):
            loop.scaler.step(loop.optimizer)
            loop.scaler.step(second[loop.is_ours])
            loop.scaler.update()
        states = [second[is_ours].state_dict()["state"] for is_ours in (True, False)]
        torch.testing.assert_close(*states, rtol=0, atol=0)
        assert_same_bits(ours, theirs)
        torch.testing.assert_close(extra[True].grad, extra[False].grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("norm_type", [1.0, 2, math.inf])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("error_if_nonfinite", [False, True])
@pytest.mark.parametrize("bad", [None, math.nan, 1e30, 1e-33, 0.0])
def test_clipping_is_torchs(norm_type: float, foreach: bool | None, error_if_nonfinite: bool, bad: float) -> None:
    """1e30 overflows in the square, and gradients of 1e-33 underflow there."""
    params = [torch.randn(3, 700).requires_grad_(), torch.randn(5).requires_grad_()]
    ours, theirs = Loop(True, params, adamw), Loop(False, copy.deepcopy(params), adamw)
    for loop in (ours, theirs):
        for param in loop.params:
            param.grad = torch.ones_like(param) if bad is None else torch.full_like(param, bad)
        loop.scaler.unscale_(loop.optimizer)
    arguments = {"norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite, "foreach": foreach}
    both(ours, theirs, lambda loop: loop.clip(loop.params, 0.25, **arguments))
    both(ours, theirs, lambda loop: loop.scaler.step(loop.optimizer))
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("scale", [1000.0, 0.5, 2.0**-3, 1.0, 2.0**40])
def test_any_scale_has_torchs_bits(scale: float) -> None:
    ours, theirs = references(init_scale=scale)
    for _ in range(3):
        set_scaled_grads(ours, theirs)
        both(ours, theirs, lambda loop: loop.scaler.unscale_(loop.optimizer))
        both(ours, theirs, lambda loop: loop.clip(loop.params, 0.5))
        both(ours, theirs, lambda loop: loop.scaler.step(loop.optimizer))
        both(ours, theirs, lambda loop: loop.scaler.update())
        assert_same_bits(ours, theirs)


def test_clipping_an_empty_generator_warns_as_torch_does() -> None:
    with pytest.warns(UserWarning, match="empty generator"):
        assert optim.clip_grad_norm_((param for param in ()), 1.0).item() == 0.0
    assert optim.clip_grad_norm_([], 1.0).item() == 0.0
    lone = torch.full((3,), 2.0, requires_grad=True)
    lone.grad = torch.full((3,), 2.0)
    assert optim.clip_grad_norm_(lone, 1.0).item() == pytest.approx(math.sqrt(12))
    assert lone.grad.norm().item() == pytest.approx(1.0)


def test_clipping_in_a_whole_compiled_graph() -> None:
    """It is torch's own function there, which torch.compile() can trace."""
    ours, theirs = (torch.full((3,), 2.0, requires_grad=True) for _ in range(2))
    ours.grad, theirs.grad = torch.full((3,), 2.0), torch.full((3,), 2.0)
    norm = torch.compile(optim.clip_grad_norm_, backend="eager", fullgraph=True)([ours], 1.0)
    assert torch.equal(norm, TORCHS_CLIP([theirs], 1.0))
    assert torch.equal(ours.grad, theirs.grad)


# ---- Wrong orders, and what is left behind.


ORDERS: dict[str, list[Callable[[Loop], Any]]] = {
    "unscale_ twice": [lambda o: o.scaler.unscale_(o.optimizer)] * 2,
    "unscale_ after step": [lambda o: o.scaler.step(o.optimizer), lambda o: o.scaler.unscale_(o.optimizer)],
    "step twice": [lambda o: o.scaler.step(o.optimizer)] * 2,
    "step by hand": [lambda o: o.scaler.unscale_(o.optimizer), lambda o: o.optimizer.step()],
    "closure": [lambda o: o.scaler.unscale_(o.optimizer), lambda o: o.scaler.step(o.optimizer, closure=lambda: 1.0)],
    "zero first": [
        lambda o: o.scaler.unscale_(o.optimizer),
        lambda o: o.optimizer.zero_grad(set_to_none=False),
        lambda o: o.scaler.step(o.optimizer),
    ],
    "remove first": [
        lambda o: o.scaler.unscale_(o.optimizer),
        lambda o: o.optimizer.zero_grad(),
        lambda o: o.scaler.step(o.optimizer),
    ],
    "no step": [lambda o: o.scaler.unscale_(o.optimizer), lambda o: o.scaler.update()],
    "pickle": [lambda o: o.scaler.unscale_(o.optimizer), lambda o: pickle.dumps(o.scaler) and None],
    "private flags": [
        lambda o: o.scaler.unscale_(o.optimizer),
        lambda o: {str(key): flag.item() for key, flag in o.scaler._found_inf_per_device(o.optimizer).items()},
        lambda o: o.scaler._found_inf_per_device(o.optimizer)[torch.device("cpu")],
    ],
    "save and load": [
        lambda o: o.scaler.unscale_(o.optimizer),
        lambda o: o.optimizer.load_state_dict(o.optimizer.state_dict()),
    ],
    "new group": [
        lambda o: o.scaler.unscale_(o.optimizer),
        lambda o: o.optimizer.add_param_group({"params": [with_grad()]}),
        lambda o: o.scaler.step(o.optimizer),
    ],
    "own divisor": [
        lambda o: o.scaler.unscale_(o.optimizer),
        lambda o: setattr(o.optimizer, "grad_scale", torch.tensor(4.0)),
        lambda o: o.optimizer.step(),
        lambda o: delattr(o.optimizer, "grad_scale"),
    ],
    "error in step": [
        lambda o: o.scaler.unscale_(o.optimizer),
        lambda o: o.optimizer.param_groups[0].update(lr="fast"),
        lambda o: o.scaler.step(o.optimizer),
        lambda o: o.optimizer.param_groups[0].update(lr=0.1),
        lambda o: o.scaler.step(o.optimizer),
    ],
    "swapped tensors": [
        lambda o: o.scaler.unscale_(o.optimizer),
        lambda o: torch.utils.swap_tensors(o.params[-1], torch.ones(3, 700).requires_grad_()),
        lambda o: o.scaler.step(o.optimizer),
    ],
}


def with_grad() -> Tensor:
    param = torch.ones(2, requires_grad=True)
    param.grad = torch.ones(2)
    return param


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bad", [None, math.inf])
def test_any_order_does_what_torch_does(order: str, bad: float | None) -> None:
    ours, theirs = references()
    set_scaled_grads(ours, theirs, bad=bad)
    for act in ORDERS[order]:
        both(ours, theirs, act)
    both(ours, theirs, lambda loop: loop.scaler.update())
    assert_same_bits(ours, theirs)


ACTS: dict[str, Callable[[Loop], Any]] = {
    "backward": lambda o: sum(param.square().sum() * o.scaler.get_scale() for param in o.params).backward(),
    "unscale": lambda o: o.scaler.unscale_(o.optimizer),
    "clip": lambda o: o.clip(o.params, 0.5),
    "clip part": lambda o: o.clip(o.params[-2:], 0.5),
    "step": lambda o: o.scaler.step(o.optimizer),
    "step by hand": lambda o: o.optimizer.step(),
    "update": lambda o: o.scaler.update(),
    "zero": lambda o: o.optimizer.zero_grad(set_to_none=False),
    "remove": lambda o: o.optimizer.zero_grad(),
    "look": lambda o: None if o.params[-1].grad is None else o.params[-1].grad.clone(),
    "write": lambda o: None if o.params[-1].grad is None else o.params[-1].grad.mul_(1.7).sum(),
    "replace": lambda o: setattr(o.params[-1], "grad", torch.ones_like(o.params[-1])),
}


@settings(max_examples=rounds(50, whole=150), deadline=None)
@given(st.lists(st.sampled_from([*ACTS]), min_size=3, max_size=14))
def test_any_sequence_does_what_torch_does(acts: list[str]) -> None:
    torch.manual_seed(0)
    ours, theirs = references(make=lambda params: optim.SGD(params, lr=0.01, momentum=0.5))
    both(ours, theirs, ACTS["backward"])
    for act in acts:
        both(ours, theirs, ACTS[act])
    assert_same_bits(ours, theirs)


def test_a_copied_optimizer_has_torchs_bits() -> None:
    ours, theirs = references()
    for loop in (ours, theirs):
        loop.optimizer = copy.deepcopy(loop.optimizer)
        loop.params = loop.optimizer.param_groups[0]["params"]
    set_scaled_grads(ours, theirs)
    both(ours, theirs, lambda loop: loop.scaler.unscale_(loop.optimizer))
    both(ours, theirs, lambda loop: loop.clip(loop.params, 0.5))
    both(ours, theirs, lambda loop: loop.scaler.step(loop.optimizer))
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("shared", ["one tensor", "overlapping views"])
def test_gradients_that_share_memory_are_multiplied_twice_as_by_torch(shared: str) -> None:
    ours, theirs = (Loop(is_ours, [torch.ones(900).requires_grad_() for _ in range(2)], adamw) for is_ours in (1, 0))
    for loop in (ours, theirs):
        memory = torch.linspace(1, 2, 1000) * SCALE
        for at, param in enumerate(loop.params):
            param.grad = memory[:900] if shared == "one tensor" else memory[at * 100 : at * 100 + 900]
        if shared == "one tensor":
            loop.params[1].grad = loop.params[0].grad
    both(ours, theirs, lambda loop: loop.scaler.unscale_(loop.optimizer))
    both(ours, theirs, lambda loop: loop.clip(loop.params, 0.5))
    both(ours, theirs, lambda loop: loop.scaler.step(loop.optimizer))
    assert_same_bits(ours, theirs)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", ["ours", "torch", "torch_views"])
def test_under_data_parallel(kind: str) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    sides = []
    for is_ours in (True, False):
        module = copy.deepcopy(plain)
        if kind == "ours":
            model: nn.Module = drivetrain.DistributedDataParallel(module)
        else:
            model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=kind == "torch_views")
        sides.append((Loop(is_ours, list(module.parameters()), adamw), model))
    (ours, _), (theirs, _) = sides
    for step in range(4):
        for loop, model in sides:
            torch.manual_seed(step)
            loop.scaler.scale(model(torch.randn(5, 6)).square().sum()).backward()
            loop.scaler.unscale_(loop.optimizer)
        both(ours, theirs, lambda loop: loop.clip(loop.params, 0.5))
        both(ours, theirs, lambda loop: loop.scaler.step(loop.optimizer))
        both(ours, theirs, lambda loop: loop.scaler.update())
        assert_same_bits(ours, theirs)
        if step != 1:  # and once without zeros: backward adds
            both(ours, theirs, lambda loop: loop.optimizer.zero_grad(set_to_none=False))


def test_an_unedited_loop_gets_ours_after_install() -> None:
    drivetrain.install(optim=True)
    try:
        assert torch.amp.GradScaler is torch.GradScaler is GradScaler
        assert torch.nn.utils.clip_grad_norm_ is optim.clip_grad_norm_ is drivetrain.clip_grad_norm_
        assert issubclass(GradScaler, torch.amp.grad_scaler.GradScaler)
        test_clipping_is_torchs(2, None, False, 1e30)
    finally:
        drivetrain.uninstall()
    assert torch.amp.GradScaler is torch.GradScaler is torch.amp.grad_scaler.GradScaler
    assert torch.nn.utils.clip_grad_norm_ is TORCHS_CLIP
