"""Locates running code and tensors in a model, for error messages."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from ..frames import self_of, stack_of, users_line


@_disable_dynamo  # it warns of sys._getframe, which it cannot trace
def here() -> str:
    """Returns where this thread runs, such as "in layer9.mlp of GPT (gpt/model.py:88 in forward)".

    The name is the one that the innermost module has within the outermost. Outside of modules the text is
    "at gpt/model.py:88 in forward".
    """
    line = users_line(stack_of(sys._getframe(1)))
    modules = _modules_called()
    if not modules:
        return f"at {line}"
    inner, outer = modules[0], modules[-1]
    name = next((name for name, module in outer.named_modules() if module is inner), "")
    return f"in {name} of {type(outer).__name__} ({line})" if name else f"in {type(inner).__name__} ({line})"


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function for messages: the class of its module, or its own name."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return type(owner).__name__
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name.rpartition("<locals>.")[2]


def owner_of(tensor: Tensor) -> str:
    """Names the parameter or buffer of a module being called that shares the tensor's storage; "" if none."""
    for module in reversed(_modules_called()):
        owner = owner_in(module, tensor)
        if owner:
            return f"{owner} of {type(module).__name__}"
    return ""


def owner_in(module: nn.Module, tensor: Tensor) -> str:
    """Names the parameter or buffer of a module that shares a tensor's storage: "parameter 'up.weight'"; "" if none."""
    storage = tensor.untyped_storage().data_ptr()
    for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, owned in named:
            if owned.untyped_storage().data_ptr() == storage:
                return f"{kind} {name!r}"
    return ""


def is_running_statistic(tensor: Tensor) -> bool:
    """Returns whether the tensor is a buffer of a normalization module that is being called in training mode.

    Autograd saves these buffers and the forward updates them, but no gradient depends on them. Instance normalization
    saves copies.
    """
    storage, may_be_copy = tensor.untyped_storage().data_ptr(), tensor.dim() == 1 and not tensor.requires_grad
    return any(
        (may_be_copy and isinstance(module, _InstanceNorm))
        or any(buffer.untyped_storage().data_ptr() == storage for buffer in module.buffers(recurse=False))
        for module in _modules_called()
        if isinstance(module, _NormBase) and module.training
    )


@_disable_dynamo
def _modules_called() -> list[nn.Module]:
    """Returns the modules whose methods this thread is in, the innermost first."""
    selves = [self_of(frame) for frame in stack_of(sys._getframe(1))]
    return [module for module in selves if isinstance(module, nn.Module)]
