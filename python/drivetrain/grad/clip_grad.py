"""Clipping gradients by their norm in one read, and no write where nothing is clipped."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .. import _C
from ..optim.in_backward import WHY_NOT_CLIPPED, is_stepped_in_backward
from ..optim.sharded import is_dtensor, local_part, replicated, settle_gradient, sum_of_squares


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_; the 2-norm of CPU gradients in one read, at the speed of memory.

    torch's function always multiplies all gradients, by 1 if need be; this one leaves them alone then. The norm is
    summed in float64 in an order that depends on sizes alone. An optimizer of drivetrain.optim clips without even the
    write: see its `max_grad_norm`. Other norms, devices and layouts go to torch's function.

    Of DTensors (on any device) the 2-norm is over all ranks' parts, each distinct one counted once, and partial sums
    are reduced, in `.grad`. All ranks of their mesh must call it; parameters that are no DTensors may be among them,
    and count as what every rank has.

    Args:
        parameters: tensors whose gradients are clipped, or one.
        max_norm: the norm that all gradients together shall have at most.
        norm_type: 2.0, or another norm.
        error_if_nonfinite: raises if the norm is inf or nan, before anything changes.
        foreach: for torch's function.

    Returns:
        the norm before clipping: float32 [], float64 for float64 gradients; of DTensors a replicated one.

    Raises:
        NotImplementedError: backward has stepped the parameters (step_in_backward()) and left nothing to clip.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    if not grads and any(is_stepped_in_backward(param) for param in params):
        raise NotImplementedError(f"clip_grad_norm_() finds no gradient: {WHY_NOT_CLIPPED}")
    if any(is_dtensor(param) for param in params) and float(norm_type) == 2.0:
        return _clip_over_mesh(params, max_norm, error_if_nonfinite)
    if not grads or float(norm_type) != 2.0 or not all(map(_is_plain, grads)):
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = _C.sum_of_squares(grads) ** 0.5
    total = torch.tensor(norm, dtype=torch.promote_types(grads[0].real.dtype, torch.float32))
    if error_if_nonfinite:
        _check_finite(total)
    coefficient = float(max_norm) / (norm + 1e-6)
    if not coefficient >= 1.0:
        with torch.no_grad():
            torch._foreach_mul_(grads, coefficient)
    return total


@torch.no_grad()
def _clip_over_mesh(params: list[Tensor], max_norm: float, error_if_nonfinite: bool) -> Tensor:
    """The same where some parameters are DTensors; the norm is a replicated DTensor."""
    for index, param in enumerate(params):
        settle_gradient(param, f"parameter {index} of clip_grad_norm_()".__str__)
    norm = sum_of_squares(params).sqrt()
    if error_if_nonfinite:
        _check_finite(norm)
    grads = [param.grad for param in params if param.grad is not None]
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if coefficient.is_cuda or coefficient < 1:
        torch._foreach_mul_(
            [local_part(grad) for grad in grads], coefficient if coefficient.is_cuda else float(coefficient)
        )
        torch.autograd.graph.increment_version([grad for grad in grads if is_dtensor(grad)])
    dtype = torch.promote_types(grads[0].real.dtype, torch.float32) if grads else torch.float32
    return replicated(norm.to(dtype), next(param for param in params if is_dtensor(param)))


def _check_finite(norm: Tensor) -> None:
    if not torch.isfinite(norm):
        raise RuntimeError(
            "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )


def _is_plain(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.device.type == "cpu" and grad.layout == torch.strided and grad.is_contiguous()
