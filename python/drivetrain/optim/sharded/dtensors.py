"""DTensor parameters (FSDP2, tensor parallelism, HSDP): each rank steps its own part.

This module converts DTensors to the plain tensors that the native step takes, and results back to DTensors with the
parameter's placements. torch.distributed.checkpoint saves those and loads them on another number of ranks.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _C
from .. import precision
from . import over_groups, wrappers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
    from typing_extensions import TypeIs

Group = dict[str, Any]


def is_dtensor(value: object) -> "TypeIs[DTensor]":
    """Returns whether the value is a DTensor, without importing torch's module, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor without a copy, and any other tensor unchanged."""
    if not is_dtensor(tensor):
        return tensor
    local = tensor._local_tensor  # to_local() takes longer than the step
    return local if type(local) is Tensor else local.wait() if hasattr(local, "wait") else local  # waits for it


def split_dims(tensor: "DTensor") -> tuple[int, ...]:
    """Returns the mesh dimensions along which ranks have different parts of the tensor."""
    mesh = tensor.device_mesh
    return tuple(dim for dim, place in enumerate(tensor.placements) if not place.is_replicate() and mesh.size(dim) > 1)


def dims_that_split(param: "DTensor", dim: int) -> tuple[int, ...]:
    """Returns the mesh dimensions that split dimension `dim` of the tensor, counted from its last, -1."""
    return tuple(at for at in split_dims(param) if getattr(param.placements[at], "dim", None) == param.ndim + dim)


def as_shard_of(param: "DTensor", local: Tensor) -> Tensor:
    """Returns a DTensor with the parameter's placements, of which this rank has the part `local`."""
    from torch.distributed.tensor import DTensor  # not before there is one: the import takes a while

    shape, stride = (param.shape, param.stride()) if local.shape == param.to_local().shape else (None, None)
    return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride)


# Adafactor's states with one row or one column, by the dimension that they reduce.
_FACTORS = {"row_var": -1, "col_var": -2}


def state_placements(param: "DTensor", name: str) -> tuple["Placement", ...]:
    """Returns a state's placements: the parameter's, but replicated where they split the reduced dimension."""
    from torch.distributed.tensor import Replicate

    if name not in _FACTORS or param.ndim < 2:
        return tuple(param.placements)
    split = dims_that_split(param, _FACTORS[name])
    return tuple(Replicate() if dim in split else place for dim, place in enumerate(param.placements))


def _as_factor_of(param: "DTensor", name: str, local: Tensor) -> Tensor:
    """Returns a state with one row or column as a DTensor, of which this rank has the part `local`."""
    from torch.distributed.tensor import DTensor

    shape = list(param.shape)
    shape[_FACTORS[name]] = 1
    strides = torch.empty(shape, device="meta").stride()
    placements = state_placements(param, name)
    return DTensor.from_local(
        local, param.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def part_of(whole: Tensor, param: "DTensor") -> "DTensor":
    """Returns a tensor that every rank has as a DTensor with the parameter's placements, without communication."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    replicas = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicas.redistribute(placements=param.placements)


def replicated(value: Tensor, like: "DTensor") -> Tensor:
    """Returns a value that every rank of the mesh has as a replicated DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(value.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)


def placed_as(param: "DTensor", value: "DTensor", what: str, state: str = "") -> "DTensor":
    """Redistributes `value` to the placements of the parameter or of the state; reduces partial sums.

    Raises:
        ValueError: The value is on another mesh.
    """
    found, wanted = value._spec, param._spec
    if found is wanted:
        return value
    if found.mesh != wanted.mesh:
        raise ValueError(f"{what} is on {found.mesh}, but its parameter on {wanted.mesh}")
    placements = state_placements(param, state)
    if found.placements == placements or (value.shape != param.shape and state not in _FACTORS):
        return value
    return value.redistribute(placements=placements)


def settle_gradient(param: Tensor, label: Callable[[], str]) -> None:
    """Gives a DTensor's gradient the parameter's placements.

    Raises:
        TypeError: The gradient is not a DTensor.
    """
    grad = param.grad
    if grad is None or not is_dtensor(param):
        return
    if not is_dtensor(grad):
        raise TypeError(f"{label()} is a DTensor, but its gradient is a {type(grad).__name__}: expected a DTensor")
    placed = placed_as(param, grad, "its gradient")
    if placed is not grad:
        param.grad = placed


_NOT_GATHERED = ("state_bits", "master_bits", "rounding")  # options of storage formats that only parts can have
Gathers = Callable[["DTensor", Group], bool]  # whether the group's rule needs the whole parameter


def why_not(param: Tensor, group: Group, gathers: Gathers) -> str | None:
    """Returns why an optimizer cannot step the parameter, or None if it can."""
    local = local_part(param)
    if wrappers.wraps_others(local) and not wrappers.is_fake(local):
        return wrappers.why_not(param, local)
    if not is_dtensor(param):
        return None
    where = f"is a DTensor with placements {tuple(param.placements)}"
    if any(place.is_partial() for place in param.placements):
        return f"{where}, a sum that is not reduced: redistribute it to Replicate() or Shard(dim) before training"
    asked = [f"{name}={group[name]!r}" for name in _NOT_GATHERED if group.get(name) not in (None, "nearest")]
    if asked and split_dims(param) and gathers(param, group):
        return (
            f"{where}, which this optimizer gathers for its step, and {', '.join(asked)} is for parts only. Leave that "
            "option out for this group, redistribute the parameter to Replicate(), or leave the parameter out of "
            "fully_shard() (ignored_params)"
        )
    return None


def local_sum_of_squares(grads: Sequence[Tensor]) -> Tensor:
    """Sums the squares of plain tensors on one device: float64 [] there."""
    grads = [grad for grad in grads if grad.numel() > 0]
    if all(grad.device.type == "cpu" and grad.is_contiguous() for grad in grads):
        return torch.tensor(_C.sum_of_squares(grads), dtype=torch.float64)
    dtype = torch.float64 if grads[0].real.dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(grads, 2, dtype)).double().square().sum()


def sum_of_squares(params: Iterable[Tensor]) -> Tensor:
    """Sums the squares of all gradients, and counts each element once however many ranks have a copy.

    Ranks must call it with the same parameters. Gradients of DTensors must have their parameter's placements
    (settle_gradient()); gradients of plain tensors are equal on every rank. The first rank that holds a parameter
    counts it, if only some hold it (groups.py).

    Returns:
        float64 [], on the device of the gradients, equal on every rank of the meshes.

    Raises:
        NotImplementedError: A parameter that some ranks hold is a DTensor or has a sparse gradient.
    """
    params, by_ranks = over_groups.divide(params)
    parts: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for param in params:
        part = parts[(param.device_mesh, split_dims(param)) if is_dtensor(param) else (None, ())]
        if param.grad is not None:  # A rank without a gradient takes part in the sum.
            part.append(local_part(param.grad))
    total: Tensor | None = None
    for (mesh, dims), grads in parts.items():
        squares = local_sum_of_squares(grads)
        if mesh is not None:
            squares = summed(squares, mesh, dims)
        total = squares if total is None else total.to(squares.device) + squares
    for ranks, members in by_ranks.items():
        squares = _sum_over_groups(ranks, members)
        total = squares if total is None else total.to(squares.device) + squares
    return torch.zeros((), dtype=torch.float64) if total is None else total


def _sum_over_groups(ranks: over_groups.TrainingRanks, params: Sequence[Tensor]) -> Tensor:
    """Sums the squares of gradients of parameters that some ranks hold. All ranks must call it.

    Returns:
        float64 [], equal on all ranks.

    Raises:
        NotImplementedError: A parameter is a DTensor or has a sparse gradient.
    """
    for param in params:
        if is_dtensor(param) or (param.grad is not None and param.grad.layout != torch.strided):
            raise NotImplementedError(
                f"a parameter of shape {tuple(param.shape)} in expert_groups is a DTensor or has a sparse gradient. "
                "No norm over ranks covers it: clip it on its own."
            )
    grads = [param.grad for param in params if param.grad is not None and over_groups.group_params[param].counts]
    nothing = torch.zeros((), dtype=torch.float64, device=params[0].device)
    squares = local_sum_of_squares(grads) if grads else nothing
    ranks.share(squares, dist.ReduceOp.SUM, "the norm of all ranks' gradients, in expert_groups")
    return squares


def summed(values: Tensor, mesh: "DeviceMesh", dims: Sequence[int]) -> Tensor:
    """Sums values over mesh dimensions. Offloaded values may be on another device than the process groups."""
    there = values if values.device.type == mesh.device_type else values.to(mesh.device_type)
    for dim in dims:
        dist.all_reduce(there, group=mesh.get_group(dim))
    return there.to(values.device)


def label_of(group: Group, index: int, place: int) -> str:
    """Returns the name that users know the parameter by, or its position in param_groups[index]."""
    if "param_names" in group:
        return f"parameter {group['param_names'][place]!r}"
    return f"parameter {place} of param_groups[{index}] (shape {list(group['params'][place].shape)})"


def local_value(value: Any) -> Any:
    return local_part(value) if isinstance(value, Tensor) else value


def local_values(param: Tensor, values: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter's state with this rank's part of each DTensor, redistributed to the parameter's
    placements."""
    if not is_dtensor(param):
        return values
    for name, value in values.items():
        if is_dtensor(value):
            values[name] = placed_as(param, value, f"a state {name!r}", name)
    return {name: local_value(value) for name, value in values.items()}


def shared_value(param: "DTensor", name: str, value: Any) -> Any:
    """Returns a state entry as a DTensor if it has one value per element.

    Blocks of 8-bit codes belong to this rank's part and have no meaning on another rank.
    """
    if name in _FACTORS and isinstance(value, Tensor):
        return _as_factor_of(param, name, value)
    is_local = name in precision.SCALAR_NAMES or precision.is_of_blocks(name)
    return value if is_local or not isinstance(value, Tensor) else as_shard_of(param, value)


def portable(param: Tensor | None, values: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter's state for any number of ranks: 8-bit entries of a DTensor become float32 DTensors.

    16-bit integers become Rows, which ranks can gather.
    """
    if param is None or not is_dtensor(param):
        return values
    if any(precision.is_of_blocks(name) for name in values):
        values = {
            name: value if is_dtensor(value) else shared_value(param, name, value)
            for name, value in precision.without_blocks(values).items()
        }
    from .rows import rows_of  # after the first DTensor: the import takes a while

    return {
        name: rows_of(value) if is_dtensor(value) and value.dtype == torch.int16 else value
        for name, value in values.items()
    }
