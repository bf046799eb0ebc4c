"""What it takes to run a training step once more: telling that it ran out of memory, and undoing what it began."""

import gc
from typing import Any

import torch
from torch import nn

_OTHER_WORDS = (
    "DefaultCPUAllocator: ",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "could not create a memory object",
)


def is_out_of_memory(error: BaseException) -> bool:
    """torch's error of a device, or another of its errors that has no class of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OTHER_WORDS)


def first_line(error: BaseException) -> str:
    """What it says, without the stack that torch's may have."""
    return str(error).splitlines()[0] if str(error) else "out of memory"


class Undo:
    """A model's gradients and torch's random states as they are now. Gradients that there are already are copied."""

    def __init__(self, model: nn.Module) -> None:
        grads = [(param, param.grad) for param in model.parameters()]
        self._grads = [(param, grad, None if grad is None else grad.clone()) for param, grad in grads]
        self._states: list[Any] = [torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._states.append(torch.cuda.get_rng_state_all())

    def __call__(self) -> None:
        """Puts them back, gradients into their memory; frees what a step that failed has left in reference cycles."""
        gc.collect()
        for param, grad, values in self._grads:
            param.grad = grad
            if grad is not None and values is not None:
                with torch.no_grad():
                    grad.copy_(values)
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.cuda.set_rng_state_all(self._states[1])
            torch.cuda.empty_cache()
