"""Records one forward and backward pass of a rank, and repeats it with the same bits, on that rank or on another."""

import collections
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .. import _C
from ..budget.retry import OF_EVERY_MODULE, PLAIN, drop_gradients, unchanged
from ..checkpointing.state import rng


@dataclass
class RecordedStep:
    """All that a pass depends on besides the parameters, and the hashes of its gradients.

    Args:
        inputs: Positional and named arguments of the forward pass.
        buffers: The model's buffers before it.
        attributes: Numbers, texts, tensors and containers of these that its modules keep, before it, by module.
        random_states: States of Python, NumPy, torch and the current CUDA device.
        autocast: If autocast is on, and its dtype, by type of device.
        output_grads: The gradient of each result that takes part in the loss, by its place.
        hashes: The hash of each parameter's gradient on this rank, by name.
    """

    inputs: tuple[Any, Any]
    buffers: dict[str, Tensor]
    attributes: dict[str, dict[str, Any]]
    random_states: dict[str, Any]
    autocast: dict[str, tuple[bool, torch.dtype]]
    output_grads: dict[int, Tensor] = field(default_factory=dict)
    hashes: dict[str, int] = field(default_factory=dict)


def before(model: nn.Module, inputs: tuple[Any, Any]) -> RecordedStep:
    """Returns the pass that begins with these inputs."""
    kinds = {"cpu", *(param.device.type for param in model.parameters())}
    return RecordedStep(
        _copied(inputs),
        {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
        {
            name: {
                key: _copied(value)
                for key, value in vars(module).items()
                if key == "training" or (key not in OF_EVERY_MODULE and _can_be_copied(value))
            }
            for name, module in model.named_modules()
        },
        rng.capture_host() | {"cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None},
        {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds},
    )


def _can_be_copied(value: Any) -> bool:
    """Returns True for numbers, texts, tensors, and containers that have nothing else."""
    if type(value) is dict:
        return all(_can_be_copied(one) for pair in value.items() for one in pair)
    if type(value) in (list, tuple, set, collections.deque):
        return all(_can_be_copied(one) for one in value)
    return type(value) in PLAIN or type(value) is Tensor


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """Returns a copy, as a model may write what it is given. device: of its tensors; None: where they are."""

    def copied(one: Any) -> Any:
        if isinstance(one, Tensor):
            return one.detach().clone().to(device or one.device).requires_grad_(one.requires_grad)
        return set(one) if type(one) is set else one

    return tree_map(copied, value)


def results_of(output: Any) -> list[Tensor]:
    """Returns the tensors of a model's result that lead to its parameters."""
    return [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad]


def hash_of(tensor: Tensor) -> int:
    """Hashes values. All nan are one value, because their bits depend on the alignment of memory."""
    values = (tensor.coalesce().values() if tensor.is_sparse else tensor).detach().contiguous()
    may_have_nan = bool(values.sum().isnan())  # A sum takes a sixth of the time of isnan().
    return _C.hash_tensor(values.masked_fill(values.isnan(), math.nan) if may_have_nan else values)


def repeat(model: nn.Module, params: Sequence[tuple[str, nn.Parameter]], seen: RecordedStep) -> dict[str, int]:
    """Returns the hashes of the gradients of a pass, which it computes again with this rank's parameters.

    Gradients, buffers and random states of this rank are as before afterwards.

    Raises:
        RuntimeError: The pass has collectives, or one of its parameters gets no gradient from autograd.grad().
    """
    device = params[0][1].device
    params = [(name, param) for name, param in params if param.requires_grad]
    with unchanged(model), torch.enable_grad(), _NoCollectives():  # type: ignore[no-untyped-call]
        drop_gradients(model)  # what runs backward inside of backward adds to them
        buffers = dict(model.named_buffers())
        for name, values in seen.buffers.items():
            buffers[name].detach().copy_(values)
        for name, module in model.named_modules():
            vars(module).update(_copied(seen.attributes[name], device))
        rng.restore_host(seen.random_states)
        if seen.random_states["cuda"] is not None:
            torch.cuda.set_rng_state(seen.random_states["cuda"])  # of the current device
        args, kwargs = _copied(seen.inputs, device)
        with ExitStack() as stack:
            for kind, (enabled, dtype) in seen.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            results = results_of(model(*args, **kwargs))
        grads = torch.autograd.grad(
            [results[place] for place in seen.output_grads],
            [param for _, param in params],
            [grad.to(device) for grad in seen.output_grads.values()],
            allow_unused=True,
        )
    found = {name: hash_of(grad) for (name, _), grad in zip(params, grads, strict=True) if grad is not None}
    if missing := sorted(seen.hashes.keys() - found.keys()):
        raise RuntimeError(f"{missing[0]!r} has no gradient then, as with checkpointing under use_reentrant=True")
    return found


class _NoCollectives(TorchDispatchMode):
    """Raises an error in place of a collective, for which the other ranks would have to repeat the pass as well."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"its forward or backward has collectives ({func})")
        return func(*args, **(kwargs or {}))
