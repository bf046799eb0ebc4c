"""What it takes to run a training step once more: telling that it ran out of memory, and undoing what it began."""

import gc
from typing import Any

import torch
from torch import nn


def is_out_of_memory(error: BaseException) -> bool:
    """torch's error of a device, or of the host's allocator, which has no class of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)


def first_line(error: BaseException) -> str:
    """What it says, without the stack that torch's may have."""
    return str(error).splitlines()[0] if str(error) else "out of memory"


class Undo:
    """A model's gradients and the random states as they are now. Gradients that there are already are copied."""

    def __init__(self, model: nn.Module) -> None:
        self._grads = [(param, None if param.grad is None else param.grad.clone()) for param in model.parameters()]
        self._states: list[Any] = [torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._states.append(torch.cuda.get_rng_state_all())

    def __call__(self) -> None:
        """Puts them back, once; frees what a step that failed has left in reference cycles."""
        gc.collect()
        for param, grad in self._grads:
            param.grad = grad
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.cuda.set_rng_state_all(self._states[1])
            torch.cuda.empty_cache()
