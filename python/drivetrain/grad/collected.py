"""Reads and divides the gradients that an accumulation has collected."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..optim.sharded.dtensors import is_dtensor, summed


def holds_anything(grads: list[Tensor]) -> bool:
    """Returns whether any gradient has a nonzero element. Waits once per device, not once per gradient.

    DTensors are looked at on all of their ranks, which must call it together.
    """
    counts: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        values = grad._values() if grad.is_sparse else grad
        if is_dtensor(values):
            local = values.to_local().count_nonzero().view(1)
            count = summed(local, values.device_mesh, range(values.device_mesh.ndim)).view(())
        else:
            count = values.count_nonzero()
        counts.setdefault(grad.device, []).append(count)
    return any(bool(torch.stack(on_device).any()) for on_device in counts.values())


def divide(params: Iterable[Tensor], divisor: float) -> None:
    """Divides gradients by `divisor`. 0 leaves them alone: nothing was added, and they are zeros."""
    grads = [param.grad for param in params if param.grad is not None]
    if grads and divisor not in (0.0, 1.0):
        with torch.no_grad():
            torch._foreach_div_(grads, divisor)
