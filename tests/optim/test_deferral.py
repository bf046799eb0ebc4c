"""Tests gradients that wait for the step: they have torch's bits, whatever looks at them or holds them in between."""

import copy
import ctypes
import gc
import io
import math
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import drivetrain
from deferral_cases import SCALE, Loop, adamw, assert_same_bits, both, references, set_scaled_grads
from drivetrain import _C, optim
from drivetrain.amp import GradScaler
from effort import rounds
from optim_cases import assert_same, make_params

OPTIMIZERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "adamw": adamw,
    "adamw_fused": lambda params: optim.AdamW(params, fused=True),
    "adamw_low_bits": lambda params: optim.AdamW(
        params,
        state_bits=None if params[0].dtype == torch.float64 else 8,
        rounding="stochastic",
        min_8bit_size=256,
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
one_pass = pytest.mark.parametrize("which", [*OPTIMIZERS][:7])


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


@one_pass
@pytest.mark.parametrize("scaled", [True, False])
def test_no_gradient_is_written(which: str, scaled: bool) -> None:
    ours, _ = references(make=OPTIMIZERS[which])
    for _ in range(2):
        set_scaled_grads(ours)
        grads = [param.grad.clone() for param in ours.params]
        addresses = [param.grad.data_ptr() for param in ours.params]
        if scaled:
            ours.scaler.unscale_(ours.optimizer)
        ours.clip(ours.params, 1.0)
        assert ours.is_waiting()
        ours.scaler.step(ours.optimizer) if scaled else ours.optimizer.step()
        assert ours.is_waiting()
        for grad, address in zip(grads, addresses, strict=True):
            stored = (ctypes.c_float * grad.numel()).from_address(address) if address else []
            assert list(stored) == grad.flatten().tolist()
        if scaled:
            ours.scaler.update()
        ours.optimizer.zero_grad()
        assert not ours.is_waiting()
        assert all(param.grad is None for param in ours.params)


def test_one_read_serves_the_norm_and_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = references()
    set_scaled_grads(ours)
    ours.scaler.unscale_(ours.optimizer)
    ours.clip(ours.params, 1.0)

    def refuse(*_: object) -> None:
        raise AssertionError("a second search")

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", refuse)
    (deferral,) = _C.deferrals_of(ours.params)
    assert deferral.were_finite()
    ours.scaler.step(ours.optimizer)
    assert not ours.scaler.last_step_skipped


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_clipping_without_a_scaler_has_torchs_bits(dtype: torch.dtype, max_norm: float) -> None:
    ours, theirs = references(dtype, init_scale=1.0)
    for _ in range(3):
        set_scaled_grads(ours, theirs)
        both(ours, theirs, lambda loop: loop.clip(iter(loop.params), max_norm))
        assert ours.is_waiting()
        both(ours, theirs, lambda loop: loop.optimizer.step())
        assert_same_bits(ours, theirs)
    both(ours, theirs, lambda loop: loop.scaler.unscale_(loop.optimizer))  # float16 raises torch's error


def test_every_thread_count_has_torchs_norm() -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            params = [torch.randn(70_001, 3).requires_grad_(), torch.randn(5).requires_grad_()]
            ours, theirs = Loop(True, params, adamw), Loop(False, copy.deepcopy(params), adamw)
            set_scaled_grads(ours, theirs)
            both(ours, theirs, lambda loop: loop.scaler.unscale_(loop.optimizer))
            both(ours, theirs, lambda loop: loop.clip(loop.params, 1.0))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_on_many_threads_have_torchs_bits(dtype: torch.dtype) -> None:
    """Each thread computes norms of its own. torch's function computes them one after the other."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        sizes = [1, 7, 300_001, 64, 0, 1031, 100_000, 17]
        params = [torch.randn(size).to(dtype).requires_grad_() for size in sizes]
        ours, theirs = Loop(True, params, adamw), Loop(False, copy.deepcopy(params), adamw)
        for _ in range(5):
            set_scaled_grads(ours, theirs)
            both(ours, theirs, lambda loop: loop.scaler.unscale_(loop.optimizer))
            both(ours, theirs, lambda loop: loop.clip(loop.params, 1.0))
            assert ours.is_waiting()
            both(ours, theirs, lambda loop: loop.scaler.step(loop.optimizer))
            both(ours, theirs, lambda loop: loop.scaler.update())
            assert_same_bits(ours, theirs)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("offset", [0, 3])
def test_many_gradients_are_zeroed_to_their_ends(offset: int) -> None:
    """More than 32 MiB are zeroed past the cache, in whole lines of it."""
    params = [torch.ones(size).requires_grad_() for size in (9_000_001, 5, 70_003)]
    optimizer, scaler = adamw(params), GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for param in params:
        memory = torch.ones(param.numel() + offset)
        # Unlike a slice, the gradient is no view. Once the loop is over, it alone refers to its memory.
        param.grad = torch.empty(0).set_(memory, offset, param.shape, (1,))
    del memory
    scaler.unscale_(optimizer)
    assert _C.deferrals_of(params)
    optimizer.zero_grad(set_to_none=False)
    for param in params:
        assert param.grad is not None
        assert not param.grad.any()


# ---- Whoever looks sees what torch shows.


def in_a_thread(look: Callable[[], Any]) -> Any:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(look()))
    thread.start()
    thread.join(timeout=60)
    return seen[0]


def saved(value: object) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def elements_at(grad: Tensor) -> list[float]:
    return list((ctypes.c_float * grad.numel()).from_address(grad.data_ptr()))


def accumulate(param: Tensor) -> None:
    (param * torch.linspace(0, 1, param.shape[-1])).sum().backward()


def accumulate_natively(param: Tensor) -> None:
    torch.autograd.backward([param.square().sum()], [torch.tensor(3.0)])


def replace(param: Tensor, grad: Tensor | None) -> None:
    param.grad = grad


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "repr": lambda p: repr(p.grad),
    "norm": lambda p: p.grad.norm(),
    "foreach": lambda p: torch._foreach_norm([p.grad])[0],
    "numpy": lambda p: torch.tensor(p.grad.numpy().copy()),
    "array": lambda p: torch.tensor(np.asarray(p.grad)),
    "tolist": lambda p: p.grad.tolist(),
    "item": lambda p: p.grad[0, 0].item(),
    "data_ptr": lambda p: elements_at(p.grad),
    "dlpack": lambda p: torch.from_dlpack(p.grad).clone(),
    "numpy_dlpack": lambda p: torch.tensor(np.from_dlpack(p.grad).copy()),
    "storage": lambda p: p.grad.untyped_storage().tolist(),
    "data": lambda p: p.grad.data.clone(),
    "detach": lambda p: p.grad.detach().clone(),
    "deepcopy": lambda p: copy.deepcopy(p).grad,
    "pickle": lambda p: pickle.loads(pickle.dumps(p.grad)),
    "save": lambda p: saved(p.grad),
    "version": lambda p: p.grad._version,
    "getattr": lambda p: getattr(p, "grad").clone(),  # noqa: B009
    "getter": lambda p: torch.Tensor.grad.__get__(p).clone(),
    "under_inference_mode": torch.inference_mode()(lambda p: float(p.grad.norm())),
    "thread": lambda p: in_a_thread(lambda: p.grad.norm()),
    "native_function": lambda p: torch.nn.utils.parameters_to_vector([p.grad]),
    "total_norm": lambda p: torch.nn.utils.get_total_norm([p.grad]),
    "write": lambda p: p.grad.mul_(2),
    "write_by_numpy": lambda p: p.grad.numpy().__setitem__((0, 0), 7.0),
    "clip_value": lambda p: nn.utils.clip_grad_value_([p], 0.1),
    "own_norm": lambda p: drivetrain.clip_grad_norm_([p], 1e9) > 0,
    "sum_of_squares": lambda p: _C.sum_of_squares([p.grad]),
    "accumulate": accumulate,
    "accumulate_natively": accumulate_natively,
    "accumulate_in_a_thread": lambda p: in_a_thread(lambda: accumulate_natively(p)),
    "replace": lambda p: replace(p, torch.ones_like(p)),
    "remove": lambda p: replace(p, None),
    "move_data": lambda p: setattr(p, "data", p.data.clone()),
    "freeze": lambda p: p.requires_grad_(False) is p,
    "torch_optimizer": lambda p: torch.optim.SGD([p], lr=0.1).step(),
    "torch_zero_grad": lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(set_to_none=False),
    "second_optimizer": lambda p: optim.SGD([p], lr=0.1).step(),
    "second_zero_grad": lambda p: optim.SGD([p], lr=0.1).zero_grad(),
    "collect": lambda p: gc.collect() * 0,
    "nothing": lambda p: None,
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("when", ["after unscale_", "after clip", "after step", "after two"])
def test_whoever_looks_sees_torchs_gradient(look: str, when: str) -> None:
    ours, theirs = references()
    for _ in range(2):
        set_scaled_grads(ours, theirs)
        both(ours, theirs, lambda loop: loop.scaler.unscale_(loop.optimizer))
        assert ours.is_waiting()
        if when in ("after unscale_", "after two"):
            both(ours, theirs, lambda loop: LOOKS[look](loop.params[-1]))
        both(ours, theirs, lambda loop: loop.clip(loop.params, 1.0))
        if when in ("after clip", "after two"):
            both(ours, theirs, lambda loop: LOOKS[look](loop.params[-1]))
        both(ours, theirs, lambda loop: loop.scaler.step(loop.optimizer))
        if when == "after step":
            both(ours, theirs, lambda loop: LOOKS[look](loop.params[-1]))
        both(ours, theirs, lambda loop: loop.scaler.update())
        assert_same_bits(ours, theirs)
        both(ours, theirs, lambda loop: [param.requires_grad_() for param in loop.params] and None)


def test_hooks_on_steps_see_torchs_gradients() -> None:
    ours, theirs = references()
    seen: dict[bool, list[Any]] = {True: [], False: []}
    for loop in (ours, theirs):
        for register in (loop.optimizer.register_step_pre_hook, loop.optimizer.register_step_post_hook):
            register(lambda optimizer, *_, loop=loop: seen[loop.defers].append(loop.params[-1].grad.clone()))
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


# ---- References from before are not seen later, so that gradients with one are multiplied at once.


class Holder:
    """Holds a tensor and other things."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


HOLDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "name": (lambda p: p.grad, Tensor.clone),
    "object": (lambda p: Holder(p.grad), lambda held: held.tensor.clone()),
    "view": (lambda p: p.grad[:2], Tensor.clone),
    "transposed": (lambda p: p.grad.T, Tensor.clone),
    "detached": (lambda p: p.grad.detach(), Tensor.clone),
    "data": (lambda p: p.grad.data, Tensor.clone),
    "numpy": (lambda p: p.grad.numpy(), lambda held: torch.tensor(held)),
    "dlpack": (lambda p: torch.from_dlpack(p.grad), Tensor.clone),
    "capsule": (lambda p: p.grad.__dlpack__(), lambda held: torch.from_dlpack(held).clone()),
    "storage": (lambda p: p.grad.untyped_storage(), lambda held: held.tolist()),
    "weakref": (lambda p: weakref.ref(p.grad), lambda held: held().clone()),
    "weak_callback": (lambda p: weakref.WeakKeyDictionary({Keyed(p.grad): 1}), lambda held: len(held)),
    "saved_for_backward": (
        lambda p: (torch.ones(700, requires_grad=True) * p.grad).sum(),
        lambda held: torch.autograd.grad(held, held.grad_fn.next_functions[0][0].next_functions[0][0].variable)[0],
    ),
}


class Keyed:
    """Has a gradient as an attribute, and can be weakly referenced."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad


@pytest.mark.parametrize("hold", HOLDS)
def test_whoever_holds_a_gradient_sees_it_multiplied(hold: str) -> None:
    take, look = HOLDS[hold]
    ours, theirs = references()
    set_scaled_grads(ours, theirs)
    held = {loop.defers: take(loop.params[-1]) for loop in (ours, theirs)}
    both(ours, theirs, lambda loop: loop.scaler.unscale_(loop.optimizer))
    if hold != "weak_callback":  # nothing holds the gradient there
        assert not ours.is_waiting()
    if hold != "saved_for_backward":  # torch raises: the gradient was modified in place
        both(ours, theirs, lambda loop: look(held[loop.defers]))
    both(ours, theirs, lambda loop: loop.clip(loop.params, 1.0))
    both(ours, theirs, lambda loop: look(held[loop.defers]))
    both(ours, theirs, lambda loop: loop.scaler.step(loop.optimizer))
    assert_same_bits(ours, theirs)


def test_gradients_in_foreign_memory_do_not_wait() -> None:
    ours, _ = references()
    set_scaled_grads(ours)
    memory = np.full((3, 700), SCALE, dtype=np.float32)
    ours.params[-1].grad = torch.from_numpy(memory)
    ours.scaler.unscale_(ours.optimizer)
    assert (memory == 1.0).all()


def test_gradients_in_one_buffer_do_not_wait() -> None:
    ours, _ = references()
    buffer = torch.full((sum(param.numel() for param in ours.params),), SCALE)
    for param, part in zip(ours.params, buffer.split([param.numel() for param in ours.params]), strict=True):
        param.grad = part.view_as(param)
    del part
    ours.scaler.unscale_(ours.optimizer)
    assert (buffer == 1.0).all()


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
def test_dense_layouts_wait(layout: str) -> None:
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
        assert ours.is_waiting()
        both(ours, theirs, lambda loop: loop.scaler.step(loop.optimizer))
        both(ours, theirs, lambda loop: loop.scaler.update())
        assert_same_bits(ours, theirs)
        both(ours, theirs, lambda loop: loop.optimizer.zero_grad())


# ---- Clipping: several optimizers, parts, errors.


def two_optimizers() -> tuple[list[Any], list[Any]]:
    sides = []
    params = make_params()
    for defers in (True, False):
        own = params if defers else [param.detach().clone().requires_grad_() for param in params]
        loop = Loop(defers, own, lambda params: optim.AdamW(params[:4], lr=0.01))
        sides.append([loop, optim.SGD(own[4:], lr=0.1)])
    return sides[0], sides[1]


@pytest.mark.parametrize("clipped", ["all", "each", "one", "part", "across", "twice", "doubled", "frozen"])
@pytest.mark.parametrize("bad", [None, math.inf])
def test_several_optimizers_under_one_scaler(clipped: str, bad: float | None) -> None:
    (ours, _), (theirs, _) = sides = two_optimizers()
    second = {loop.defers: optimizer for loop, optimizer in sides}
    extra = {loop.defers: torch.ones(3, requires_grad=True) for loop, _ in sides}
    parts: dict[str, list[Callable[[Loop], list[Tensor]]]] = {
        "all": [lambda loop: loop.params],
        "each": [lambda loop: loop.params[:4], lambda loop: loop.params[4:]],
        "one": [lambda loop: loop.params[4:]],
        "part": [lambda loop: loop.params[2:3]],
        "across": [lambda loop: loop.params[2:6]],
        "twice": [lambda loop: loop.params, lambda loop: loop.params],
        "doubled": [lambda loop: loop.params + loop.params[-1:]],
        "frozen": [lambda loop: [*loop.params, extra[loop.defers]]],  # a parameter of no optimizer
    }
    for _ in range(3):
        set_scaled_grads(ours, theirs, bad=bad)
        for loop in (ours, theirs):
            extra[loop.defers].grad = torch.ones(3)
            loop.scaler.unscale_(loop.optimizer)
            loop.scaler.unscale_(second[loop.defers])
        for part in parts[clipped]:
            both(ours, theirs, lambda loop, part=part: loop.clip(part(loop), 0.3))
        for loop in (ours, theirs):
            loop.scaler.step(loop.optimizer)
            loop.scaler.step(second[loop.defers])
            loop.scaler.update()
        states = [second[defers].state_dict()["state"] for defers in (True, False)]
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
    "replace": lambda o: replace(o.params[-1], torch.ones_like(o.params[-1])),
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


def test_a_freed_parameter_leaves_the_others_waiting() -> None:
    ours, _ = references()
    set_scaled_grads(ours, bad=math.inf)
    ours.scaler.unscale_(ours.optimizer)
    freed = weakref.ref(ours.params[-1])
    ours.params.pop()
    ours.optimizer.param_groups[0]["params"].pop()
    gc.collect()
    assert freed() is None
    assert ours.is_waiting()
    ours.scaler.step(ours.optimizer)  # The inf was in the parameter that is gone.
    ours.scaler.update()
    assert ours.scaler.last_step_skipped


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


def test_readers_on_many_threads_see_one_multiplication() -> None:
    for _ in range(20):
        ours, theirs = references()
        set_scaled_grads(ours, theirs)
        both(ours, theirs, lambda loop: loop.scaler.unscale_(loop.optimizer))
        barrier, seen = threading.Barrier(4), []

        def look(ours: Loop = ours, barrier: threading.Barrier = barrier, seen: list[list[Tensor]] = seen) -> None:
            barrier.wait(timeout=60)
            seen.append([param.grad.clone() for param in ours.params])

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        barrier.wait(timeout=60)
        ours.scaler.step(ours.optimizer)
        for thread in threads:
            thread.join(timeout=60)
        theirs.scaler.step(theirs.optimizer)
        for grads in seen:
            assert_same(grads, [param.grad for param in theirs.params], rtol=0, atol=0)
        assert_same(ours.params, theirs.params, rtol=0, atol=0)
