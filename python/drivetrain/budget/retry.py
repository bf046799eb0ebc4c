"""What it takes to run a training step once more, or as if it had never been: telling that it ran out of memory, and
undoing what it began."""

import gc
from collections.abc import Callable
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


# What a plan puts into a module's attributes: in the place of its call, and of a compiled forward.
_OURS = ("_compiled_call_impl", "forward")


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
        self.put_back()
        if len(self._states) > 1:
            torch.cuda.empty_cache()

    def put_back(self) -> None:
        for param, grad, values in self._grads:
            param.grad = grad
            if grad is not None and values is not None:
                with torch.no_grad():
                    grad.copy_(values)
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.cuda.set_rng_state_all(self._states[1])


class Before:
    """A model as it was before anything was planned: what `Undo` has, buffers with their counts of writes, and what
    stands in the place of its modules' calls. Parameters are not copied: an optimizer's steps stay."""

    def __init__(self, model: nn.Module) -> None:
        self._undo = Undo(model)
        self._ours = [
            (vars(module), {name: vars(module)[name] for name in _OURS if name in vars(module)})
            for module in model.modules()
        ]
        self._buffers = [
            (module._buffers, name, buffer, buffer._version, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()  # those a step cannot write
        ]
        self._grads = [param.grad for param in model.parameters() if param.grad is not None]
        self._versions = [grad._version for grad in self._grads]

    def put_back(self) -> None:
        """Begins a part again that an interrupt ends: whoever is told of the first one finds the model whole."""
        for step in (self._take_ours_out, self._undo.put_back, self._put_buffers_back, self._put_versions_back):
            _surely(step)

    def _take_ours_out(self) -> None:
        for attributes, found in self._ours:
            for name in _OURS:
                if name in found:
                    attributes[name] = found[name]
                else:
                    attributes.pop(name, None)

    def _put_buffers_back(self) -> None:
        for buffers, name, buffer, version, values in self._buffers:
            buffers[name] = buffer
            if buffer.shape != values.shape:
                continue  # a lazy module's, which has been made
            with torch.no_grad():
                buffer.copy_(values)
            torch._C._autograd._unsafe_set_version_counter((buffer,), (version,))

    def _put_versions_back(self) -> None:
        torch._C._autograd._unsafe_set_version_counter(tuple(self._grads), tuple(self._versions))


def _surely(step: Callable[[], None]) -> None:
    """Runs it to its end, however often that is interrupted."""
    while True:
        try:
            step()
        except KeyboardInterrupt:
            continue
        return
