"""Clipping gradients by their norm in one read, and no write where nothing is clipped."""

from collections.abc import Iterable

import torch
from torch import Tensor

from . import _C
from .optim.in_backward import WHY_NOT_CLIPPED, is_stepped_in_backward


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

    Args:
        parameters: tensors whose gradients are clipped, or one.
        max_norm: the norm that all gradients together shall have at most.
        norm_type: 2.0, or another norm.
        error_if_nonfinite: raises if the norm is inf or nan, before anything changes.
        foreach: for torch's function.

    Returns:
        the norm before clipping: float32 [], float64 for float64 gradients.

    Raises:
        NotImplementedError: backward has stepped the parameters (step_in_backward()) and left nothing to clip.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    if not grads and any(is_stepped_in_backward(param) for param in params):
        raise NotImplementedError(f"clip_grad_norm_() finds no gradient: {WHY_NOT_CLIPPED}")
    if not grads or float(norm_type) != 2.0 or not all(map(_is_plain, grads)):
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = _C.sum_of_squares(grads) ** 0.5
    total = torch.tensor(norm, dtype=torch.promote_types(grads[0].real.dtype, torch.float32))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    coefficient = float(max_norm) / (norm + 1e-6)
    if not coefficient >= 1.0:
        with torch.no_grad():
            torch._foreach_mul_(grads, coefficient)
    return total


def _is_plain(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.device.type == "cpu" and grad.layout == torch.strided and grad.is_contiguous()
