"""Main gradients: accumulates the gradients of 16-bit parameters in more than 16 bits."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from .. import _C
from ..optim.sharded.dtensors import is_dtensor

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def main_grads(model: nn.Module, bits: int = 32) -> None:
    """Accumulates the gradients of the model's 16-bit parameters in 32 or 24 bits.

    In 16 bits each addition is rounded to the sum's last bit, and later micro-batches may add nothing. With main
    gradients a C++ hook adds each micro-batch's gradient in float32 as soon as backward has it, and frees it. Two
    copies of a gradient exist for one parameter at a time. Call this once the model has its dtype and device, before
    wrapping it into DistributedDataParallel.

    * 32: `.grad` is a float32 gradient (`grad_dtype` is float32) and takes 4 bytes per parameter. Optimizers of
        drivetrain.optim, norms and clipping read it directly. DistributedDataParallel communicates it in float32.
    * 24: `.grad` stays bfloat16, for bfloat16 parameters, and another byte per parameter keeps its rounding error from
        one micro-batch to the next (see `float32_grad`). Optimizers and DistributedDataParallel use the bfloat16 half
        without a cast. Writing `.grad`, as a reduction or a scaler does, drops the byte.

    `.grad` and its memory stay: zero_grad(set_to_none=True) frees nothing. The next backward overwrites a kept
    reference to a `.grad`, so clone it. Under drivetrain's DistributedDataParallel the memory is part of the flat
    gradient buffer. Under shard="gradients" ranks keep float32 rows instead, and nothing of what follows holds.

    Megatron-LM's names exist too: `param.main_grad` is that memory. A layer that adds to it sets
    `param.grad_added_to_main_grad`, and the gradient from autograd is then dropped. Such layers need
    zero_grad(set_to_none=False).

    autograd accumulates sparse gradients and gradients of backward(create_graph=True).

    Args:
        model: Has bfloat16 or float16 parameters that require a gradient. Other parameters are left alone. Main
            gradients live as long as this object, so pass the model itself.
        bits: 32 or 24.

    Raises:
        ValueError: `bits` is neither 32 nor 24, or 24 with float16 parameters. The model has no 16-bit parameter, or
            one of them has a gradient.
        RuntimeError: The model is wrapped already or has main gradients.
        NotImplementedError: A parameter is a DTensor.
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
                f"parameter {name!r} is a DTensor, whose gradients others keep. Under fully_shard() leave parameters "
                "in float32 and give it mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
                "reduce_dtype=torch.float32), which adds gradients in float32 as well."
            )
        if bits == 24 and param.dtype != torch.bfloat16:
            raise ValueError(f"bits is 24 and parameter {name!r} is {param.dtype}, expected torch.bfloat16: use 32")
    _kept[model] = _MainGrads([param for _, param in named], torch.float32 if bits == 32 else torch.bfloat16)


def float32_grad(param: Tensor) -> Tensor:
    """Returns a gradient as a new float32 tensor of the parameter's shape.

    Includes the 8 bits that a 24-bit main gradient keeps in addition to `.grad`, unless `.grad` was written since.

    Args:
        param: A parameter with a gradient.

    Raises:
        ValueError: The parameter has no gradient.
    """
    if param.grad is None:
        raise ValueError(f"param is a tensor of shape {tuple(param.shape)} without a gradient")
    for kept, index in _kept_of([param]):
        residual = kept.native.residual(index)
        if residual is not None:
            return _C.optim_load_param(param.grad, torch.as_strided(residual, param.grad.shape, param.grad.stride()))
    return param.grad.detach().to(torch.float32, copy=True)


class _MainGrads:
    """The main gradients of one model."""

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
    """Returns zeros in the layout of autograd's gradients: the parameter's if that is dense, else row-major."""
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
    """Returns the main gradients that hold these parameters, and the parameters' indices there."""
    return [
        (kept, kept.index_of[id(param)]) for param in params for kept in _kept.values() if id(param) in kept.index_of
    ]


def is_kept(param: Tensor) -> bool:
    """Returns whether main_grads() keeps this parameter's gradients."""
    return bool(_kept_of([param]))


def keep_in_buffer(reducer: _C.Reducer, params: Sequence[Tensor]) -> bool:
    """Moves the main gradients of a reducer's parameters into its flat gradient buffer; returns whether any exist."""
    with_main = [(place, param) for place, param in enumerate(params) if _kept_of([param])]
    if not with_main:
        return False

    def move(places: list[Tensor | None]) -> None:
        for place, param in with_main:
            for kept, _ in _kept_of([param]):
                to = places[place]
                assert to is not None, "sparse gradients have no main gradients"
                kept.move_to(param, to)

    move(reducer.gradient_views())
    reducer.set_on_moved(move)
    return True


def leave_to_rows(params: Sequence[Tensor]) -> None:
    """Ends main gradients whose wrapper keeps rows of float32 gradients, and adds to these alone.

    autograd then converts each micro-batch's gradient to float32, and the wrapper frees it once it is reduced. No
    memory for gradients of all rows stays, so that `main_grad` is None.

    Raises:
        NotImplementedError: A main gradient has 24 bits, or belongs to a parameter that is not among `params`.
    """
    reduced = {id(param) for param in params}
    found = {id(kept): kept for kept, _ in _kept_of(params)}
    for kept in found.values():
        for param in kept.params:
            if param.main_grad.dtype != torch.float32:  # type: ignore[attr-defined]
                raise NotImplementedError(
                    "main_grads(bits=24) does not go together with shard='gradients', whose ranks add gradients in "
                    "float32: pass bits=32, or shard='optimizer'."
                )
            if id(param) not in reduced:
                raise NotImplementedError(
                    f"a parameter of shape {tuple(param.shape)} has a main gradient and is not reduced, which "
                    "shard='gradients' does not support: freeze or ignore it before main_grads()."
                )
    for model in [model for model, kept in _kept.items() if id(kept) in found]:
        for param in _kept.pop(model).params:
            param.main_grad = None  # type: ignore[attr-defined]
