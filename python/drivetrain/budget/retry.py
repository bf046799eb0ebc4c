"""Undoes training steps that were run for a profile, and recognizes steps that ran out of memory."""

import gc
from collections.abc import Callable

import torch
from torch import nn

_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: ",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "could not create a memory object",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether torch or Python ran out of memory. Some errors of torch for that have no class of their own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _OUT_OF_MEMORY_TEXTS)


def first_line(error: BaseException) -> str:
    """Returns the message without the native stack that torch may append."""
    return str(error).splitlines()[0] if str(error) else "out of memory"


# The attributes of a module that a plan replaces: the call, and the forward of a compiled region.
_REPLACED = ("_compiled_call_impl", "forward")


class Undo:
    """Restores gradients and torch's random states to what they were at construction. Copies existing gradients."""

    def __init__(self, model: nn.Module) -> None:
        grads = [(param, param.grad) for param in model.parameters()]
        self._grads = [(param, grad, None if grad is None else grad.clone()) for param, grad in grads]
        self._rng_state = torch.get_rng_state()
        self._cuda_rng_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def __call__(self) -> None:
        """Restores the state, and frees the reference cycles that a failed step left."""
        gc.collect()
        self.restore()
        if self._cuda_rng_states is not None:
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Restores the state. Gradients keep their memory."""
        for param, grad, values in self._grads:
            param.grad = grad
            if grad is not None and values is not None:
                with torch.no_grad():
                    grad.copy_(values)
        torch.set_rng_state(self._rng_state)
        if self._cuda_rng_states is not None:
            torch.cuda.set_rng_state_all(self._cuda_rng_states)


class ModelSnapshot:
    """Restores a model to its state before planning: gradients, random states, buffers with their version counters, and
    the calls of its modules. It does not copy parameters, so steps of an optimizer stay."""

    def __init__(self, model: nn.Module) -> None:
        self._undo = Undo(model)
        self._attributes = [
            (vars(module), {name: vars(module)[name] for name in _REPLACED if name in vars(module)})
            for module in model.modules()
        ]
        self._buffers = [
            (module._buffers, name, buffer, buffer._version, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()  # a step cannot write inference tensors
        ]
        self._grads = [param.grad for param in model.parameters() if param.grad is not None]
        self._versions = [grad._version for grad in self._grads]

    def restore(self) -> None:
        """Restores everything, and repeats a part that an interrupt ends, so that the model is always complete."""
        for step in (self._restore_attributes, self._undo.restore, self._restore_buffers, self._restore_versions):
            _run_to_end(step)

    def _restore_attributes(self) -> None:
        for attributes, found in self._attributes:
            for name in _REPLACED:
                if name in found:
                    attributes[name] = found[name]
                else:
                    attributes.pop(name, None)

    def _restore_buffers(self) -> None:
        for buffers, name, buffer, version, values in self._buffers:
            buffers[name] = buffer
            if buffer.shape != values.shape:
                continue  # a lazy module has initialized it
            with torch.no_grad():
                buffer.copy_(values)
            torch._C._autograd._unsafe_set_version_counter((buffer,), (version,))

    def _restore_versions(self) -> None:
        torch._C._autograd._unsafe_set_version_counter(tuple(self._grads), tuple(self._versions))


def _run_to_end(step: Callable[[], None]) -> None:
    """Runs a function until it returns, however often KeyboardInterrupt ends it."""
    while True:
        try:
            step()
        except KeyboardInterrupt:
            continue
        return
