"""Gradient clipping with torch's bits: one parallel read for the norm, and a parallel write only if it clips."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from .. import _C
from .in_backward import is_stepped_in_backward
from .kept import WHY_NOT_CLIPPED
from .sharded import over_groups, pieces
from .sharded.dtensors import is_dtensor, local_part, replicated, settle_gradient, sum_of_squares, whole_values

_torchs_clip_grad_norm_ = torch.nn.utils.clip_grad_norm_  # install(optim=True) puts the function below in its place


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips gradients with the bits of torch.nn.utils.clip_grad_norm_, in fewer passes over CPU gradients.

    It reads the gradients once, on all threads, and writes them only if it clips; torch's function always writes. An
    optimizer of drivetrain.optim clips without a write: see its `max_grad_norm`. Other norms, devices and layouts, and
    gradients of several dtypes, use torch's function.

    For DTensors on any device the 2-norm covers all ranks' parts and counts each distinct part once. It reduces partial
    sums in `.grad`. All ranks of the mesh must call it. Plain tensors among the parameters count once, as copies that
    every rank has. Likewise the 2-norm covers the parameters of all ranks under DistributedDataParallel's
    `expert_groups`, and all ranks must call it.

    Args:
        parameters: A tensor or tensors whose gradients are clipped.
        max_norm: The largest norm of all gradients together.
        norm_type: The norm's order. Orders other than 2.0 use torch's function.
        error_if_nonfinite: Raises if the norm is inf or nan, before anything changes.
        foreach: Passed to torch's function.

    Returns:
        The norm before clipping: a 0-dimensional tensor as from torch's function; a replicated DTensor for DTensors.

    Raises:
        NotImplementedError: step_in_backward() has stepped the parameters and left no gradient to clip. Also for
            another norm of parameters of `expert_groups`, and those that are DTensors or have sparse gradients.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    is_two = float(norm_type) == 2.0
    if over_groups.has_any(params):
        if not is_two:
            raise NotImplementedError(
                f"norm_type is {norm_type}, but clip_grad_norm_() computes only the 2-norm of parameters that some "
                "ranks hold, in expert_groups: pass 2.0."
            )
        return _clip_over_ranks(params, max_norm, error_if_nonfinite)
    if not torch.compiler.is_compiling() and all(isinstance(param, Tensor) for param in params):
        grads = [param.grad for param in params if param.grad is not None]
        if not grads and any(is_stepped_in_backward(param) for param in params):
            raise NotImplementedError(f"clip_grad_norm_() finds no gradient: {WHY_NOT_CLIPPED}")
        if is_two and any(is_dtensor(param) or is_dtensor(param.grad) for param in params):
            norm = _whole_norm(params) if pieces.have_whole_norms(params) else None
            with pieces.parts_with_gradients(params) as stand_ins:
                return _clip_over_ranks(stand_ins, max_norm, error_if_nonfinite, norm)
        norm = _clip_natively(params, grads, float(max_norm), foreach) if is_two else None
        if norm is not None:
            return norm
    # An empty generator gets torch's warning.
    return _torchs_clip_grad_norm_(params or parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def _clip_natively(params: list[Tensor], grads: list[Tensor], max_norm: float, foreach: bool | None) -> Tensor | None:
    """Clips by the 2-norm and returns it, or returns None and does nothing: torch's function must clip."""
    norm = _C.clip_norm(grads) if all(type(grad) is Tensor for grad in grads) else None
    if norm is None or not math.isfinite(norm):
        return None
    coefficient = max_norm / (norm + 1e-6)
    if not coefficient >= 1 and _C.multiply_gradients(grads, float(coefficient)) is None:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach)
    else:
        torch.autograd.graph.increment_version(grads)
    return norm


def _whole_norm(params: list[Tensor]) -> Tensor:
    """Returns the 2-norm with the bits of whole gradients. Gathers one at a time."""
    norms: dict[torch.dtype, list[Tensor]] = defaultdict(list)  # torch takes the norms of one dtype together
    for param in params:
        if param.grad is not None:
            norms[param.grad.dtype] += torch._foreach_norm([whole_values(param.grad, param)])  # as torch's function
    norm: Tensor = torch.linalg.vector_norm(torch.stack([*itertools.chain(*norms.values())]))
    return norm


@torch.no_grad()
def _clip_over_ranks(
    params: list[Tensor], max_norm: float, error_if_nonfinite: bool, norm: Tensor | None = None
) -> Tensor:
    """Clips where ranks hold different parameters, or parts of them. With DTensors the norm is a replicated one.

    norm: of all ranks' gradients; None: to be found.
    """
    for index, param in enumerate(params):
        settle_gradient(param, f"parameter {index} of clip_grad_norm_()".__str__)
    norm = sum_of_squares(params).sqrt() if norm is None else norm
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(  # torch's words
            "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    grads = [param.grad for param in params if param.grad is not None]
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if coefficient.is_cuda or coefficient < 1:
        factor = coefficient if coefficient.is_cuda else float(coefficient)
        torch._foreach_mul_([local_part(grad) for grad in grads], factor)
        torch.autograd.graph.increment_version([grad for grad in grads if is_dtensor(grad)])
    dtype = torch.promote_types(grads[0].real.dtype, torch.float32) if grads else torch.float32
    like = next((param for param in params if is_dtensor(param)), None)
    return norm.to(dtype) if like is None else replicated(norm.to(dtype), like)
