"""DTensor parameters (FSDP2, tensor parallelism, HSDP): each rank steps its own part.

This module converts DTensors to the plain tensors that the native step takes, and results back to DTensors with the
parameter's placements. torch.distributed.checkpoint saves those and loads them on another number of ranks.
"""

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from . import over_groups, precision, wrappers
from .squares import local_sum_of_squares

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
    from typing_extensions import TypeIs

Group = dict[str, Any]
Share = Callable[[str, bool, list[Tensor], list[Tensor]], None]  # see csrc/optim/run_shared.h


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


def _part_of(whole: Tensor, param: "DTensor") -> "DTensor":
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
    """Redistributes `value` to the parameter's placements, or to those of the state; reduces partial sums.

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


def sum_of_squares(params: Iterable[Tensor]) -> Tensor:
    """Sums the squares of all gradients, and counts each element once however many ranks have a copy.

    Ranks must call it with the same parameters. Gradients of DTensors must have their parameter's placements
    (settle_gradient()); those of plain tensors are equal on every rank. The first of the ranks that hold a parameter
    counts it, if only some hold it (over_groups.py).

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
        squares = over_groups.sum_of_squares(ranks, members)
        total = squares if total is None else total.to(squares.device) + squares
    return torch.zeros((), dtype=torch.float64) if total is None else total


def summed(values: Tensor, mesh: "DeviceMesh", dims: Sequence[int]) -> Tensor:
    """Sums values over mesh dimensions. Offloaded values may be on another device than the process groups."""
    there = values if values.device.type == mesh.device_type else values.to(mesh.device_type)
    for dim in dims:
        dist.all_reduce(there, group=mesh.get_group(dim))
    return there.to(values.device)


@dataclass
class Part:
    """A split parameter, this rank's part as a plain tensor, and the parameter's group."""

    param: "DTensor"
    plain: Tensor
    group: Group


@dataclass
class Measured:
    """The result of a step whose norm was measured over the mesh beforehand."""

    native: _C.StepResult
    norm: Tensor

    @property
    def is_on_device(self) -> bool:
        """True if only the device knows the result."""
        return self.native.is_on_device

    @property
    def skipped(self) -> bool:
        """True if the step was skipped."""
        return self.native.skipped

    @property
    def grad_norm(self) -> float:
        """The 2-norm of all gradients on all ranks."""
        return float(self.norm)


@dataclass
class _Alias:
    """A DTensor parameter and the plain tensor that shares its memory and stands for it in the native step."""

    param: "DTensor"
    local: Tensor
    plain: Tensor


class Shards:
    """The parameters of one optimizer as plain tensors, kept between steps because the native reader caches them."""

    def __init__(self) -> None:
        self._aliases: dict[int, _Alias] = {}  # by the id of the parameter

    def step(
        self,
        groups: list[Group],
        state: dict[Tensor, Any],
        left: set[int],
        options: _C.StepOptions,
        gathers: Gathers,
        sums: Callable[[list[Part], dict[Tensor, Any]], Share],
        run: Callable[[list[Group], dict[Tensor, Any], _C.StepOptions], tuple[_C.StepResult, bool]],
    ) -> "_C.StepResult | Measured":
        """Steps this rank's part of every parameter, and leaves new states as DTensors in `state`.

        Args:
            left: The ids of parameters that `run` leaves out.
            gathers: Returns whether a parameter is gathered; every rank then steps the whole, one parameter at a time.
            sums: Creates the callback that shares the step's sums over whole parameters with the other ranks.
            run: Steps plain tensors; also returns whether it created or removed states.
        """
        aliases: dict[int, _Alias] = {}
        local_state: dict[Tensor, Any] = defaultdict(dict)
        local_groups: list[Group] = []
        parts: list[Part] = []
        gathered: list[tuple[Group, int, DTensor]] = []
        try:
            for index, group in enumerate(groups):
                plain = []
                for place, param in enumerate(group["params"]):
                    plain.append(param)
                    if id(param) in left:
                        continue
                    if is_dtensor(param):
                        label = functools.partial(label_of, group, index, place)
                        alias = aliases[id(param)] = self._alias(param, group, state, gathers, label)
                        plain[-1] = alias.plain
                        settle_gradient(param, label)
                        is_split = param.grad is not None and bool(split_dims(param))
                        if is_split and gathers(param, group):
                            gathered.append((group, place, param))
                            plain.pop()
                            continue
                        _set_grad(alias.plain, param.grad)
                        if is_split:
                            parts.append(Part(param, alias.plain, group))
                    if param in state:
                        local_state[plain[-1]] = local_values(param, state[param])
                local_groups.append({**group, "params": plain})
            self._aliases = aliases
            norm, options = self._treated(groups, options)
            stepped = [
                param
                for group in groups
                for param in group["params"]
                if param.grad is not None and id(param) not in left
            ]
            share = sums(parts, local_state) if parts else None
            result, has_new_states = run(local_groups, local_state, _with_share(options, share))
            if result.has_wrappers:
                _refuse_wrappers(local_groups)
            if has_new_states:
                self._write_back(state, local_state, aliases, groups)
            for group, place, param in gathered:
                of_whole = _step_whole(group, place, param, state, options, run)
                if not any(local_group["params"] for local_group in local_groups):
                    result = of_whole
            if not result.is_on_device and result.skipped:
                return result if norm is None else Measured(result, norm)
            torch.autograd.graph.increment_version([param for param in stepped if is_dtensor(param)])
            return result if norm is None else Measured(result, norm)
        finally:
            for alias in aliases.values():
                alias.plain.grad = None

    def whole_of(self, plain: Tensor) -> Tensor:
        """Returns the parameter that a plain tensor stood for in the last step, or the tensor itself."""
        found: Tensor | None = next((each.param for each in self._aliases.values() if each.plain is plain), None)
        return plain if found is None else found

    def _alias(
        self, param: "DTensor", group: Group, state: dict[Tensor, Any], gathers: Gathers, label: Callable[[], str]
    ) -> _Alias:
        """Returns the alias of the step before if it is still valid, else a new one."""
        local, before = local_part(param), self._aliases.get(id(param))
        if before is not None and before.param is param:
            if before.local is local:
                return before
            if before.local.dtype != local.dtype and state.get(param):
                raise TypeError(
                    f"{label()} is {local.dtype} but was {before.local.dtype} in the step before. Cast it back, or "
                    "make a new optimizer for it (the state can be taken along with load_state_dict)."
                )
        if (reason := why_not(param, group, gathers)) is not None:
            raise NotImplementedError(f"{label()} {reason}.")
        return _Alias(param, local, local.detach())

    @staticmethod
    def _treated(groups: list[Group], options: _C.StepOptions) -> tuple[Tensor | None, _C.StepOptions]:
        """Returns the norm of all gradients on all ranks, if it is needed, and the options that clip by it."""
        if options.max_grad_norm is None and not options.check_finite:
            return None, options
        params = [param for group in groups for param in group["params"]]
        scale: Any = options.grad_scale
        norm = sum_of_squares(params).sqrt() / scale
        is_bad = ~norm.isfinite()
        if options.max_grad_norm is not None:
            scale = scale / (options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        found: Any = is_bad.float()
        if isinstance(options.found_inf, Tensor):
            found = torch.maximum(found, options.found_inf.to(found))
        else:
            found = found.clamp(min=options.found_inf)
        if options.overflow is not None:
            options.overflow.copy_(is_bad)
        if not norm.is_cuda:
            scale, found = float(scale), float(found)
        return norm, _C.StepOptions(grad_scale=scale, found_inf=found, zero_grads=options.zero_grads)

    @staticmethod
    def _write_back(
        state: dict[Tensor, Any],
        local_state: dict[Tensor, Any],
        aliases: dict[int, _Alias],
        groups: list[Group],
    ) -> None:
        """Copies the states that the step created or removed back to the optimizer's state."""
        for group in groups:
            for param in group["params"]:
                plain = aliases[id(param)].plain if id(param) in aliases else param
                if plain not in local_state:
                    continue
                local_values = local_state[plain]
                if not is_dtensor(param):
                    state[param] = local_values
                    continue
                values = state[param]
                for name in [name for name in values if name not in local_values]:
                    del values[name]
                for name, value in local_values.items():
                    if name not in values or _local_value(values[name]) is not value:
                        values[name] = _shared_value(param, name, value)


def _with_share(options: _C.StepOptions, share: "Share | None") -> _C.StepOptions:
    return _C.StepOptions(
        grad_scale=options.grad_scale,
        found_inf=options.found_inf,
        max_grad_norm=options.max_grad_norm,
        check_finite=options.check_finite,
        zero_grads=options.zero_grads,
        overflow=options.overflow,
        share=share,
    )


def _step_whole(
    group: Group,
    place: int,
    param: "DTensor",
    state: dict[Tensor, Any],
    options: _C.StepOptions,
    run: Callable[[list[Group], dict[Tensor, Any], _C.StepOptions], tuple[_C.StepResult, bool]],
) -> _C.StepResult:
    """Steps a parameter that every rank gathers; each rank keeps its part of parameter, gradient and state."""
    assert is_dtensor(param.grad)
    detached: Any = param.detach()
    whole: Tensor = detached.full_tensor()
    _set_grad(whole, param.grad.full_tensor())
    values = {name: value.full_tensor() if is_dtensor(value) else value for name, value in state.get(param, {}).items()}
    wholes: dict[Tensor, Any] = defaultdict(dict, {whole: values} if values else {})
    alone = {**group, "params": [whole]}
    if "param_names" in group:
        alone["param_names"] = [group["param_names"][place]]
    result, _ = run([alone], wholes, options)
    if not result.is_on_device and result.skipped:
        if options.zero_grads:
            param.grad.zero_()
        return result
    local_part(param).copy_(local_part(_part_of(whole, param)))
    assert whole.grad is not None
    local_part(param.grad).copy_(local_part(_part_of(whole.grad, param)))
    for name, value in wholes[whole].items():
        if isinstance(value, Tensor) and name not in precision.SCALAR_NAMES:
            # A view would keep the whole tensor alive.
            value = _part_of(value, param).clone() if value.shape == whole.shape else replicated(value, param)
        state[param][name] = value
    return result


def label_of(group: Group, index: int, place: int) -> str:
    """Returns the name that users know the parameter by, or its position in param_groups[index]."""
    if "param_names" in group:
        return f"parameter {group['param_names'][place]!r}"
    return f"parameter {place} of param_groups[{index}] (shape {list(group['params'][place].shape)})"


def _refuse_wrappers(groups: list[Group]) -> None:
    for index, group in enumerate(groups):
        for place, param in enumerate(group["params"]):
            if param.grad is not None and wrappers.wraps_others(param):
                raise NotImplementedError(f"{label_of(group, index, place)} {wrappers.why_not(param, param)}.")


def _set_grad(plain: Tensor, grad: Tensor | None) -> None:
    if grad is None:
        plain.grad = None
        return
    local = local_part(grad)
    if local.dtype != plain.dtype:
        plain.grad_dtype = local.dtype
    plain.grad = local


def _local_value(value: Any) -> Any:
    return local_part(value) if isinstance(value, Tensor) else value


def local_values(param: Tensor, values: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter's state with this rank's part of each DTensor, redistributed to the parameter's
    placements."""
    if not is_dtensor(param):
        return values
    for name, value in values.items():
        if is_dtensor(value):
            values[name] = placed_as(param, value, f"a state {name!r}", name)
    return {name: _local_value(value) for name, value in values.items()}


def _shared_value(param: "DTensor", name: str, value: Any) -> Any:
    """Returns a state entry as a DTensor if it has one value per element.

    Blocks of 8-bit codes belong to this rank's part and have no meaning on another rank.
    """
    if name in _FACTORS and isinstance(value, Tensor):
        return _as_factor_of(param, name, value)
    is_local = name in precision.SCALAR_NAMES or precision.is_of_blocks(name)
    return value if is_local or not isinstance(value, Tensor) else as_shard_of(param, value)


def portable(param: Tensor | None, values: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter's state for any number of ranks: 8-bit entries of a DTensor become float32 DTensors."""
    if param is None or not is_dtensor(param) or not any(precision.is_of_blocks(name) for name in values):
        return values
    result = {}
    for name, value in precision.without_blocks(values).items():
        result[name] = value if is_dtensor(value) else _shared_value(param, name, value)
    return result
