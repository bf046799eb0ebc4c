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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ... import _C
from .. import precision
from ..rule import Group, Rule
from . import over_groups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
    from typing_extensions import TypeIs

    from ...ddp.groups import ReducesOverGroups
    from .rows import Rows


def is_dtensor(value: object) -> "TypeIs[DTensor]":
    """Returns whether the value is a DTensor, without importing torch's module, which takes long."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor without a copy, and anything else unchanged."""
    if not is_dtensor(tensor):
        return tensor
    local = tensor._local_tensor  # to_local() takes longer than the step
    return local.wait() if hasattr(local, "wait") else local


def split_dims(tensor: "DTensor") -> tuple[int, ...]:
    """Returns the mesh dimensions along which ranks have different parts of the tensor."""
    mesh = tensor.device_mesh
    return tuple(dim for dim, place in enumerate(tensor.placements) if not place.is_replicate() and mesh.size(dim) > 1)


def from_local(
    local: Tensor,
    like: "DTensor",
    placements: "Sequence[Placement]" = (),
    shape: torch.Size | None = None,
    stride: tuple[int, ...] = (),
) -> "DTensor":
    """Returns a DTensor on the mesh of another, replicated unless it gets placements, row-major without strides."""
    from torch.distributed.tensor import DTensor, Replicate  # not before there is one: the import takes a while

    mesh = like.device_mesh
    strides = None if shape is None else stride or torch.empty(shape, device="meta").stride()
    placements = placements or [Replicate()] * mesh.ndim
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)


def as_shard_of(param: "DTensor", local: Tensor) -> Tensor:
    """Returns a DTensor with the parameter's placements, of which this rank has the part `local`."""
    if local.shape != param.to_local().shape:
        return from_local(local, param, param.placements)
    return from_local(local, param, param.placements, param.shape, param.stride())


def part_of(whole: Tensor, param: "DTensor") -> "DTensor":
    """Returns a tensor that every rank has as a DTensor with the parameter's placements, without communication."""
    return from_local(whole, param).redistribute(placements=param.placements)


def replicated(value: Tensor, like: "DTensor") -> Tensor:
    """Returns a value that every rank of the mesh has as a replicated DTensor."""
    return from_local(value.to(like.device), like)


def placed_as(param: "DTensor", value: "DTensor", what: str) -> "DTensor":
    """Redistributes a value of the parameter's shape to its placements, and reduces partial sums.

    Raises:
        ValueError: The value is on another mesh.
    """
    found, wanted = value._spec, param._spec
    if found is wanted:
        return value
    if found.mesh != wanted.mesh:
        raise ValueError(f"{what} is on {found.mesh}, but its parameter on {wanted.mesh}")
    if found.placements == wanted.placements or value.shape != param.shape:
        return value
    return value.redistribute(placements=wanted.placements)


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


def set_gradient(stand_in: Tensor, grad: Tensor | None) -> None:
    """Gives a parameter's stand-in its gradient; a plain tensor gets this rank's part of it."""
    if grad is not None and not is_dtensor(stand_in):
        grad = local_part(grad)
    if grad is not None and grad.dtype != stand_in.dtype:
        stand_in.grad_dtype = grad.dtype
    stand_in.grad = grad


_NOT_GATHERED = ("state_bits", "master_bits", "rounding")  # options of storage formats that only parts can have


def group_of_rows(param: "DTensor", group: Group, rule: Rule) -> dist.ProcessGroup | None:
    """Returns the ranks that hold the rows of Muon's matrix, if each has some and only rows are divided."""
    from torch.distributed.tensor import Shard

    dims, (rows, columns) = split_dims(param), param.shape[-2:] if param.ndim == 2 else (0, 0)
    if rule.name_of(group) != "muon" or len(dims) != 1 or param.stride() != (columns, 1):
        return None
    size, placement = param.device_mesh.size(dims[0]), param.placements[dims[0]]
    rows_per_rank = -(-rows // size)
    if type(placement) is not Shard or placement.dim != 0 or rows_per_rank * (size - 1) >= rows:
        return None
    ranks = param.device_mesh.get_group(dims[0])
    return ranks if backend_of(ranks, local_part(param).device) else None


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns the name of the group's backend for tensors on that type of device."""
    try:
        return str(group._get_backend(torch.device(device.type)).name())
    except RuntimeError:
        return None


def why_not_stepped(param: Tensor, local: Tensor) -> str | None:
    """Returns why no optimizer here steps a parameter whose part on this rank, `local`, wraps other tensors.

    Such a tensor has no memory of its own, as quantized weights made of several tensors do.
    """
    is_plain = type(local) in (Tensor, nn.Parameter)
    if is_plain or not torch._C._dispatch_keys(local).has(torch._C.DispatchKey.Python):
        return None
    what = f"a {type(local).__name__}" + ("" if local is param else f" in a {type(param).__name__}")
    return (
        f"is a tensor subclass that wraps others ({what}), which drivetrain's optimizers do not support: use "
        "torch.optim for it, or a plain tensor as the weight"
    )


def why_not(param: Tensor, group: Group, rule: Rule) -> str | None:
    """Returns why an optimizer cannot step the parameter, or None if it can."""
    local = local_part(param)
    # Tools build models of fake tensors to plan their memory; other frozen parameters get no gradient.
    may_be_stepped = not isinstance(local, FakeTensor) and (param.requires_grad or local is not param)
    if may_be_stepped and (reason := why_not_stepped(param, local)):
        return reason
    if not is_dtensor(param):
        return None
    where = f"is a DTensor with placements {tuple(param.placements)}"
    if any(place.is_partial() for place in param.placements):
        return f"{where}, a sum that is not reduced: redistribute it to Replicate() or Shard(dim) before training"
    asked = [f"{name}={group[name]!r}" for name in _NOT_GATHERED if group.get(name) not in (None, "nearest")]
    if asked and split_dims(param) and rule.gathers(group) and group_of_rows(param, group, rule) is None:
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
    counts it, if only some hold it (ddp/groups.py).

    Returns:
        float64 [], on the device of the gradients, equal on every rank of the meshes.
    """
    params, by_ranks = over_groups.divide(params)
    parts: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for param in params:
        part = parts[(param.device_mesh, split_dims(param)) if is_dtensor(param) else (None, ())]
        if param.grad is not None:  # A rank without a gradient takes part in the sum.
            part.append(local_part(param.grad))
    total = torch.zeros((), dtype=torch.float64)
    for (mesh, dims), grads in parts.items():
        squares = local_sum_of_squares(grads)
        squares = squares if mesh is None else summed(squares, mesh, dims)
        total = total.to(squares.device) + squares
    for ranks, members in by_ranks.items():
        squares = _sum_over_groups(ranks, members)
        total = total.to(squares.device) + squares
    return total


def _sum_over_groups(ranks: "ReducesOverGroups", params: Sequence[Tensor]) -> Tensor:
    """Sums the squares of gradients of parameters that some ranks hold. All ranks must call it."""
    for param in params:
        if is_dtensor(param) or (param.grad is not None and param.grad.layout != torch.strided):
            raise NotImplementedError(
                f"a parameter of shape {tuple(param.shape)} in expert_groups is a DTensor or has a sparse gradient. "
                "No norm over ranks covers it: clip it on its own."
            )
    grads = [param.grad for param in params if param.grad is not None and over_groups.group_params[param].counts]
    squares = local_sum_of_squares(grads).to(params[0].device)
    ranks.share(squares, dist.ReduceOp.SUM, "the norm of all ranks' gradients, in expert_groups")
    return squares


def whole_values(grad: Tensor, like: Tensor) -> Tensor:
    """Returns all ranks' values of a gradient, one-dimensional and in the order in which a tensor like it has them."""
    whole = (grad.full_tensor() if is_dtensor(grad) else grad).detach()
    if whole.stride() != like.stride():
        whole = torch.empty_like(like, dtype=whole.dtype, requires_grad=False).copy_(whole)
    return whole.as_strided((whole.numel(),), (1,))


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


def local_values(param: Tensor, values: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter's state with this rank's part of each DTensor, redistributed to the parameter's
    placements."""
    if not is_dtensor(param):
        return values
    for name, value in values.items():
        if is_dtensor(value):
            values[name] = placed_as(param, value, f"a state {name!r}")
    return {name: local_part(value) for name, value in values.items()}


def shared_value(param: "DTensor", name: str, value: Any) -> Any:
    """Returns a state entry as a DTensor if it has one value per element.

    Blocks of codes belong to this rank's part and have no meaning on another rank.
    """
    if not isinstance(value, Tensor) or name in precision.SCALAR_NAMES or precision.is_of_blocks(name):
        return value
    return as_shard_of(param, value)


def rows_of(value: "DTensor") -> "Rows":
    """Returns rows that share the memory of a DTensor and that scripts use as a plain tensor."""
    from .rows import Rows  # a module that imports torch's DTensor, which takes long

    kind: Any = Rows
    rows: Rows = kind(value._local_tensor, value._spec, requires_grad=False)
    return rows


def portable(param: Tensor | None, values: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter's state for any number of ranks: coded entries of a DTensor become float32 DTensors.

    16-bit integers become Rows, which ranks can gather.
    """
    if param is None or not is_dtensor(param):
        return values
    result = {}
    for name, value in precision.without_blocks(values, local_part(param)).items():
        if name not in values:  # It was in blocks.
            value = shared_value(param, name, value)
        result[name] = rows_of(value) if is_dtensor(value) and value.dtype == torch.int16 else value
    return result


def check_matrix_ranks(group: object) -> None:
    """Raises TypeError or ValueError unless this rank is in the process group."""
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group does not contain this rank: construct the optimizer on its ranks, or pass None")
    if type(group) is not dist.ProcessGroup:
        raise TypeError(
            f"process_group is a {type(group).__name__}, expected a process group that torch.distributed has made, or "
            "None"
        )


def share_matrices(
    options: _C.StepOptions, group: dist.ProcessGroup, device: torch.device, whole_rows: Sequence[int] = ()
) -> None:
    """Lets a step share its matrices among a process group's ranks.

    Args:
        options: The step's options.
        group: Ranks that have the whole matrices, or rows of them.
        device: The matrices' device.
        whole_rows: Where ranks have rows: the number of rows of each whole matrix, by parameter with a gradient in the
            step's order. 0 for a parameter that is no such matrix.

    Raises:
        ValueError: The group was destroyed.
    """
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError) as error:
        raise ValueError("Muon's process_group was destroyed: construct the optimizer with another one") from error
    backend = backend_of(group, device) or ""
    options.matrix_ranks = _C.MatrixRanks(group.group_name, backend, ranks, str(device), whole_rows)
