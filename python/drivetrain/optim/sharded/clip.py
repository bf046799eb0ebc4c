"""Clips gradients where ranks hold different parameters, or parts of them."""

import torch
from torch import Tensor

from .dtensors import is_dtensor, local_part, replicated, settle_gradient, sum_of_squares


def clip_over_groups(params: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Clips parameters some of which are DistributedDataParallel's `expert_groups`'. All ranks must call it."""
    if float(norm_type) != 2.0:
        raise NotImplementedError(
            f"norm_type is {norm_type}, but clip_grad_norm_() computes only the 2-norm of parameters that some "
            "ranks hold, in expert_groups: pass 2.0."
        )
    return clip_over_ranks(params, max_norm, error_if_nonfinite)


@torch.no_grad()
def clip_over_ranks(params: list[Tensor], max_norm: float, error_if_nonfinite: bool) -> Tensor:
    """Clips where ranks hold different parameters, or parts of them. With DTensors the norm is a replicated one."""
    for index, param in enumerate(params):
        settle_gradient(param, f"parameter {index} of clip_grad_norm_()".__str__)
    norm = sum_of_squares(params).sqrt()
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(  # torch's words
            "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    grads = [param.grad for param in params if param.grad is not None]
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if coefficient.is_cuda or coefficient < 1:
        torch._foreach_mul_(
            [local_part(grad) for grad in grads], coefficient if coefficient.is_cuda else float(coefficient)
        )
        torch.autograd.graph.increment_version([grad for grad in grads if is_dtensor(grad)])
    dtype = torch.promote_types(grads[0].real.dtype, torch.float32) if grads else torch.float32
    like = next((param for param in params if is_dtensor(param)), None)
    return norm.to(dtype) if like is None else replicated(norm.to(dtype), like)
