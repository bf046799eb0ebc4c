"""Sums the squares of this rank's gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C


def local_sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    """Sums the squares of plain tensors on one device: float64 [] there."""
    grads = [grad for grad in grads if grad.numel() > 0]
    if all(grad.device.type == "cpu" and grad.is_contiguous() for grad in grads):
        return torch.tensor(_C.sum_of_squares(grads), dtype=torch.float64)
    dtype = torch.float64 if grads[0].real.dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(grads, 2, dtype)).double().square().sum()
