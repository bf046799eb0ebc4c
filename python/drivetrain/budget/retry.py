"""Undoes the steps that planning runs, and recognizes those that ran out of memory, or free parameters too early."""

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

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
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # parameters, buffers, modules and hooks
PLAIN = (bool, int, float, str, type(None))  # the types of a module's attributes that planning restores


def random_states() -> Callable[[], None]:
    """Returns a function that restores torch's random states of now."""
    of_cpu = torch.get_rng_state()
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore() -> None:
        torch.set_rng_state(of_cpu)
        if of_cuda is not None:
            torch.cuda.set_rng_state_all(of_cuda)

    return restore


class Undo:
    """Restores gradients and torch's random states to what they were at construction. Copies existing gradients."""

    def __init__(self, model: nn.Module) -> None:
        grads = [(param, param.grad) for param in model.parameters()]
        self._grads = [(param, grad, None if grad is None else grad.clone()) for param, grad in grads]
        self._restore_random_states = random_states()

    def __call__(self) -> None:
        """Restores the state, and frees the reference cycles that a failed step left. Gradients keep their memory."""
        gc.collect()
        for param, grad, values in self._grads:
            param.grad = grad
            if grad is not None and values is not None:
                grad.detach().copy_(values)
        self._restore_random_states()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


class ModelSnapshot:
    """Restores a model to its state before planning.

    This covers gradients, random states, buffers with their version counters, and the calls of its modules. It also
    covers attributes of modules that are numbers or texts. It keeps gradients without a copy, so the steps of planning
    must begin without any. It does not copy parameters, so steps of an optimizer stay.
    """

    def __init__(self, model: nn.Module) -> None:
        self._grads = [(param, param.grad) for param in model.parameters()]
        # A view may lie in memory that the next backward writes, such as a bucket of DistributedDataParallel.
        self._views = [
            (grad, grad._version, grad.clone()) for _, grad in self._grads if grad is not None and grad._is_view()
        ]
        self._calls = [
            (vars(module), {name: vars(module)[name] for name in _REPLACED if name in vars(module)})
            for module in model.modules()
        ]
        self._attributes = [
            (vars(module), {name: value for name, value in vars(module).items() if type(value) in PLAIN})
            for module in model.modules()
        ]
        self._buffers = [
            (module._buffers, name, buffer, buffer._version, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()  # a step cannot write inference tensors
        ]
        self._restore_random_states = random_states()

    def restore(self) -> None:
        """Restores everything, and repeats a part that an interrupt ends, so that the model is always complete."""
        for step in (self._restore_calls, self.restore_values):
            is_done = False
            while not is_done:
                with suppress(KeyboardInterrupt):
                    step()
                    is_done = True

    def restore_values(self) -> None:
        """Restores everything but the calls, which a plan has replaced."""
        for param, grad in self._grads:
            param.grad = grad
        for grad, version, values in self._views:
            _write(grad, version, values)
        self._restore_random_states()
        for attributes, found in self._attributes:
            attributes.update(found)
        for buffers, name, buffer, version, values in self._buffers:
            buffers[name] = buffer
            if buffer.shape == values.shape:  # else a lazy module has initialized it
                _write(buffer, version, values)

    def _restore_calls(self) -> None:
        for attributes, found in self._calls:
            for name in _REPLACED:
                if name in found:
                    attributes[name] = found[name]
                else:
                    attributes.pop(name, None)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restores a model and all random states at the end, but for the calls of its modules, which a plan replaces.

    Besides what `ModelSnapshot` restores, modules get back every attribute, and their lists, dicts and sets get back
    their elements. Tensors that they keep, and are no parameters or buffers, are not copied.
    """
    from ..checkpointing.state import rng  # imports more than a plan needs

    snapshot, states = ModelSnapshot(model), rng.capture_host()
    kept = [(vars(module), dict(vars(module))) for module in model.modules()]
    contents = [
        (value, copy.copy(value))
        for _, attributes in kept
        for name, value in attributes.items()
        if type(value) in (list, dict, set) and name not in OF_EVERY_MODULE
    ]
    try:
        yield
    finally:
        for attributes, before in kept:
            calls = {name: attributes[name] for name in _REPLACED if name in attributes}
            attributes.clear()
            attributes.update(before | calls)
        for value, content in contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
        snapshot.restore_values()
        rng.restore_host(states)


def drop_gradients(model: nn.Module) -> None:
    """Leaves the parameters without gradients."""
    for param in model.parameters():
        param.grad = None


def _write(tensor: torch.Tensor, version: int, values: torch.Tensor) -> None:
    """Writes values without leaving a trace in the version counter."""
    tensor.detach().copy_(values)  # an interrupt might leave torch.no_grad() in force
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def refuse_resharding(model: nn.Module) -> None:
    """Raises NotImplementedError if fully_shard() frees the gathered parameters of a module after its forward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    sharded = {name: module for name, module in model.named_modules() if isinstance(module, fsdp.FSDPModule)}
    for name, module in sharded.items():
        is_inside = any(name != other and (not other or name.startswith(f"{other}.")) for other in sharded)
        if _reshards(module, is_inside):
            where = f"module {name!r}" if name else "the model"
            raise NotImplementedError(
                f"{where} is under fully_shard() with reshard_after_forward, which frees parameters that the budget "
                "reads again in backward. Give fully_shard() reshard_after_forward=False (or call "
                "model.set_reshard_after_forward(False)), or use drivetrain.checkpoint() for its blocks."
            )


def _reshards(module: Any, is_inside: bool) -> bool:
    """Returns whether a module reshards after forward. torch has no public way to ask."""
    state = module._get_fsdp_state()
    # By default the outermost module keeps its parameters. torch determines it in the first forward.
    is_root = not is_inside if state._is_root is None else state._is_root
    if is_root and state._auto_reshard_after_forward:
        return False
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(group is not None and group.post_forward_mesh_info is not None for group in groups)
