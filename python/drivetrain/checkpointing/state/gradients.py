"""Saves and restores gradients that a step has not used yet."""

import weakref
from typing import Any

import torch
from torch import Tensor

from ...grad import main_grads
from ...optim.sharded.dtensors import is_dtensor


class Gradients:
    """Follows which gradients of one optimizer were written since its last step.

    Gradients that a step has used are of no further use, and most scripts let them stand until the next zero_grad().
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._used: list[tuple[weakref.ref[Tensor], int] | None] = []  # each gradient and its version after the step
        self._handle: Any = None

    def open(self) -> None:
        self._handle = self._optimizer.register_step_post_hook(self._remember)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def state(self) -> list[Any]:
        """Returns a list with an element per parameter: a collected gradient, the dtype of one of zeros, or None."""
        params = self._params()
        grads = [param.grad for param in params]
        if all(grad is None for grad in grads):
            return []
        if all(grad is None or _is_zero(grad) for grad in grads):  # ends at the first that is not
            return [None if grad is None else grad.dtype for grad in grads]
        # Freed gradients count as used.
        if len(self._used) == len(grads) and all(
            grad is None or (used is not None and used[0]() is grad and used[1] == grad._version)
            for grad, used in zip(grads, self._used, strict=True)
        ):
            return []
        for kept, index in main_grads._kept_of(params):
            if kept.native.residual(index) is not None:
                raise NotImplementedError(
                    "a checkpoint inside of an accumulation window cannot hold main gradients of 24 bits. Call "
                    "Checkpointer.step() after the step of the optimizer only, or use main_grads(bits=32)"
                )
        return [None if grad is None else grad.detach() for grad in grads]

    def check(self, state: list[Any]) -> None:
        """Raises ValueError if the state is of other parameters."""
        shapes = [tuple(param.shape) for param in self._params()]
        saved = [tuple(grad.shape) if isinstance(grad, Tensor) else None for grad in state]
        if state and (len(saved) != len(shapes) or any(s not in (None, t) for s, t in zip(saved, shapes, strict=True))):
            raise ValueError("optimizer has other parameters than in the checkpoint, which holds their gradients")

    def restore(self, state: list[Any]) -> None:
        """Restores what `state` returned, on each parameter's device."""
        for param, saved in zip(self._params(), state, strict=False):
            if saved is None:
                continue
            if is_dtensor(saved) and not is_dtensor(param):  # DistributedDataParallel(shard="gradients")
                param.grad = saved
                continue
            place = getattr(param, "main_grad", None)
            is_tensor = isinstance(saved, Tensor)
            if place is None:
                place = torch.zeros_like(param, dtype=saved.dtype if is_tensor else saved)
            with torch.no_grad():
                place.copy_(saved) if is_tensor else place.zero_()
            param.grad = place

    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def _remember(self, *_: Any) -> None:
        grads = (param.grad for param in self._params())
        self._used = [None if grad is None else (weakref.ref(grad), grad._version) for grad in grads]


def _is_zero(grad: Tensor) -> bool:
    if is_dtensor(grad):  # A look at the whole would communicate, and ranks must agree.
        return False
    return not bool((grad._values() if grad.is_sparse else grad).any())
