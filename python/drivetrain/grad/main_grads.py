"""Main gradients: those of 16-bit parameters, accumulated in more bits than the parameters have."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from .. import _C
from ..optim.sharded import is_dtensor

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def main_grads(model: nn.Module, bits: int = 32) -> None:
    """Accumulates the gradients of the model's 16-bit parameters in more bits: `bits=32` in float32, exactly; 24, of
    bfloat16 parameters, in bfloat16 with 8 bits beside it.

    In 16 bits what a micro-batch adds is rounded to the sum's last bit, and from some number of them on adds nothing.
    Here a C++ hook adds each micro-gradient in float32 as soon as backward has it, and frees it: two copies of a
    gradient exist for one parameter at a time. Call it once the model has its dtype and device, before wrapping it into
    DistributedDataParallel.

    * 32: `.grad` is the float32 gradient (`grad_dtype` says so), 4 bytes per parameter. Optimizers of drivetrain.optim
      read it as it is; so do norms and clipping. Under DDP it crosses the wire in float32.
    * 24: `.grad` is bfloat16 as ever, and another byte per parameter keeps what rounding it leaves out from one
      micro-gradient to the next (see `float32_grad`). Optimizers and DDP's wire take the bfloat16 half without a cast.
      Whoever writes `.grad` (a reduction, a scaler) drops the byte.

    `.grad` and its memory stay: zero_grad(set_to_none=True) frees nothing, and the next backward overwrites what a kept
    reference to a `.grad` shows (clone it). Under drivetrain's DDP that memory is the arena's.

    Megatron-LM's names are there too: `param.main_grad` is that memory. A layer that adds to it by itself sets
    `param.grad_added_to_main_grad`; the gradient that autograd brings is then dropped. Such layers need
    zero_grad(set_to_none=False): they add to what is there.

    Gradients of backward(create_graph=True) and sparse ones are autograd's own business, and keep its accumulation.

    Args:
        model: has parameters in bfloat16 or float16; those in other dtypes, and frozen ones, stay as they are. Main
            gradients live as long as it, so give the model itself, not a list of modules made for the call.
        bits: 32 or 24.

    Raises:
        ValueError: bits is neither; 24 for float16 parameters; the model has no 16-bit parameter, or some of their
            gradients are there already.
        RuntimeError: the model is wrapped already, or has main gradients.
        NotImplementedError: a parameter is a DTensor.
    """
    if bits not in (32, 24):
        raise ValueError(f"bits is {bits}, expected 32 or 24")
    if any(isinstance(module, TorchDistributedDataParallel) for module in model.modules()):
        raise RuntimeError("call main_grads() before wrapping the model into DistributedDataParallel, not after")
    named = [
        (name, param)
        for name, param in model.named_parameters()
        if param.requires_grad and param.dtype in _SIXTEEN_BITS
    ]
    if not named:
        raise ValueError("the model has no bfloat16 or float16 parameter that requires a gradient")
    for name, param in named:
        if _kept_of([param]):
            raise RuntimeError(f"parameter {name!r} has a main gradient already")
        if param.grad is not None:
            raise ValueError(f"parameter {name!r} has a gradient already: call zero_grad() first")
        if is_dtensor(param):
            raise NotImplementedError(
                f"parameter {name!r} is a DTensor, whose gradients others keep: under fully_shard() leave parameters "
                "in float32 and give it mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
                "reduce_dtype=torch.float32), which adds gradients in float32, too."
            )
        if bits == 24 and param.dtype != torch.bfloat16:
            raise ValueError(f"bits is 24 and parameter {name!r} is {param.dtype}, expected torch.bfloat16: use 32")
    _kept[model] = _MainGrads([param for _, param in named], torch.float32 if bits == 32 else torch.bfloat16)


def float32_grad(param: Tensor) -> Tensor:
    """A gradient as a new float32 tensor of the parameter's shape: with the 8 bits that a main gradient of 24 keeps
    beside `.grad`, as long as nobody else has written that.

    Raises:
        ValueError: the parameter has no gradient.
    """
    if param.grad is None:
        raise ValueError(f"a parameter of shape {tuple(param.shape)} has no gradient")
    for kept, index in _kept_of([param]):
        residual = kept.native.residual(index)
        if residual is not None:
            return _C.optim_load_param(param.grad, torch.as_strided(residual, param.grad.shape, param.grad.stride()))
    return param.grad.detach().to(torch.float32, copy=True)


class _MainGrads:
    """Of one model."""

    def __init__(self, params: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.index_of = {id(param): index for index, param in enumerate(params)}
        self.params = params
        main = [_place_for(param, dtype) for param in params]
        for param, place in zip(params, main, strict=True):
            param.grad_dtype = dtype
            param.main_grad = place  # type: ignore[attr-defined]
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self.native = _C.MainGrads(params, main, _tells_if_added(params))

    def move_to(self, param: Tensor, place: Tensor) -> None:
        self.native.move_to(self.index_of[id(param)], place)
        param.main_grad = place  # type: ignore[attr-defined]


def _place_for(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros laid out as autograd lays out gradients: as the parameter where that is dense, else row by row."""
    like = torch.zeros_like(param, dtype=dtype)
    return like if like.stride() == param.stride() else torch.zeros(param.shape, dtype=dtype, device=param.device)


def _tells_if_added(params: Sequence[Tensor]) -> Callable[[int], bool]:
    def was_added(index: int) -> bool:
        param: Any = params[index]
        if not getattr(param, "grad_added_to_main_grad", False):
            return False
        param.grad_added_to_main_grad = False
        return True

    return was_added


_kept: WeakKeyDictionary[nn.Module, _MainGrads] = WeakKeyDictionary()


def _kept_of(params: Iterable[Tensor]) -> list[tuple[_MainGrads, int]]:
    """Whose main gradients these are, and their places there; without those that have none."""
    return [
        (kept, kept.index_of[id(param)]) for param in params for kept in _kept.values() if id(param) in kept.index_of
    ]


def keep_in_arena(reducer: _C.Reducer, params: Sequence[Tensor]) -> bool:
    """Lets the main gradients of a reducer's parameters lie where it reduces them; returns whether there are any."""
    with_main = [(place, param) for place, param in enumerate(params) if _kept_of([param])]
    if not with_main:
        return False

    def move(places: list[Tensor | None]) -> None:
        for place, param in with_main:
            for kept, _ in _kept_of([param]):
                to = places[place]
                assert to is not None, "sparse gradients have no main gradients"
                kept.move_to(param, to)

    move(reducer.gradient_places())
    reducer.set_on_moved(move)
    return True
