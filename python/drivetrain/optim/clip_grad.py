"""Gradient clipping by the norm: one read of the gradients, and a write only if it clips."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .. import _C
from . import deferral, pieces
from .clip_over_ranks import check_finite, clip_over_groups, clip_over_ranks
from .in_backward import is_stepped_in_backward
from .kept import WHY_NOT_CLIPPED
from .over_groups import has_any
from .sharded import is_dtensor


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips gradients as torch.nn.utils.clip_grad_norm_ does, with the 2-norm of CPU gradients in one read.

    torch's function multiplies all gradients even if the factor is 1; this one leaves them alone then. It sums the norm
    in float64 in an order that depends on sizes alone. An optimizer of drivetrain.optim clips without a write: see its
    `max_grad_norm`. Other norms, devices and layouts use torch's function.

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
        The norm before clipping: float32 [], or float64 for float64 gradients; a replicated DTensor for DTensors.

    Raises:
        NotImplementedError: step_in_backward() has stepped the parameters and left no gradient to clip. Also for
            another norm of parameters of `expert_groups`, and those that are DTensors or have sparse gradients.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if has_any(params):
        return clip_over_groups(params, max_norm, norm_type, error_if_nonfinite)
    if float(norm_type) == 2.0 and _C.deferrals_of(params):
        return deferral.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    grads = [param.grad for param in params if param.grad is not None]
    if not grads and any(is_stepped_in_backward(param) for param in params):
        raise NotImplementedError(f"clip_grad_norm_() finds no gradient: {WHY_NOT_CLIPPED}")
    if float(norm_type) == 2.0 and any(is_dtensor(param) or is_dtensor(param.grad) for param in params):
        with pieces.parts_with_gradients(params) as stand_ins:
            return clip_over_ranks(stand_ins, max_norm, error_if_nonfinite)
    if not grads or float(norm_type) != 2.0 or not all(map(_is_plain, grads)):
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = _C.sum_of_squares(grads) ** 0.5
    total = torch.tensor(norm, dtype=torch.promote_types(grads[0].real.dtype, torch.float32))
    if error_if_nonfinite:
        check_finite(total)
    coefficient = float(max_norm) / (norm + 1e-6)
    if not coefficient >= 1.0:
        with torch.no_grad():
            torch._foreach_mul_(grads, coefficient)
    return total


def _is_plain(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.device.type == "cpu" and grad.layout == torch.strided and grad.is_contiguous()
