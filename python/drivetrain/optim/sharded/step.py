"""Steps each rank's own part of DTensor parameters, as plain tensors that the native step takes."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _C
from .. import precision
from ..rule import Group, Rule, part_of_group
from .dtensors import (
    group_of_rows,
    is_dtensor,
    label_of,
    local_part,
    local_values,
    part_of,
    replicated,
    set_gradient,
    settle_gradient,
    share_matrices,
    shared_value,
    split_dims,
    sum_of_squares,
    whole_values,
    why_not,
    why_not_stepped,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Steps plain tensors; also returns whether it created or removed states.
Run = Callable[[list[Group], dict[Tensor, Any], _C.StepOptions], tuple[_C.StepResult, bool]]


@dataclass
class _LocalPart:
    """A DTensor parameter, this rank's part of it, and the plain tensor that stands for the part in the native step."""

    param: "DTensor"
    local: Tensor
    plain: Tensor
    rule: str
    ranks: dist.ProcessGroup | None  # that hold the rows of Muon's matrix


class _StandIn(NamedTuple):
    """The tensor that stands for a parameter in the native step."""

    place: int
    tensor: Tensor
    ranks: dist.ProcessGroup | None
    whole_rows: int


class Shards:
    """The parameters of one optimizer as plain tensors, kept between steps because the native reader caches them."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._parts: dict[int, _LocalPart] = {}  # by the id of the parameter

    def step(self, groups: list[Group], state: dict[Tensor, Any], options: _C.StepOptions, run: Run) -> _C.StepResult:
        """Steps this rank's part of every parameter, and leaves new states as DTensors in `state`.

        Matrices of Muon whose rows ranks hold are orthogonalized on one rank each. Every rank steps the whole of any
        other parameter that the rule gathers, one parameter at a time.
        """
        parts: dict[int, _LocalPart] = {}
        local_state: dict[Tensor, Any] = defaultdict(dict)
        stand_ins: list[list[_StandIn]] = []
        gathered: list[tuple[Group, int, DTensor]] = []
        ranks_of_rows: dict[Any, None] = {}  # in the order of the parameters
        has_whole_matrices = False
        try:
            for index, group in enumerate(groups):
                stand_ins.append([])
                is_muon = self._rule.name_of(group) == "muon"
                for place, param in enumerate(group["params"]):
                    stand_in, ranks, is_divided = param, None, False
                    if is_dtensor(param):
                        label = functools.partial(label_of, group, index, place)
                        part = parts[id(param)] = self._part(param, group, state, label)
                        settle_gradient(param, label)
                        stand_in, ranks = part.plain, part.ranks
                        is_divided = bool(split_dims(param)) and self._rule.gathers(group)
                        if param.grad is not None and is_divided and ranks is None:
                            gathered.append((group, place, param))
                            continue
                        set_gradient(stand_in, param.grad)
                    if ranks is not None:
                        ranks_of_rows[ranks] = None
                    has_whole_matrices |= is_muon and not is_divided
                    stand_ins[-1].append(_StandIn(place, stand_in, ranks, param.shape[0] if ranks else 0))
                    if param in state:
                        local_state[stand_in] = local_values(param, state[param])
            self._parts = parts
            if options.measures and options.sum_of_squares is None:
                options.sum_of_squares = sum_of_squares(param for group in groups for param in group["params"])
            ranks_of_wholes, result = options.matrix_ranks, None
            of_plain = {id(part.plain): part.param for part in parts.values()} if options.statistics else {}
            measured: list[Any] = []
            # One run leaves everything as it was if ranks have other matrices.
            is_one_run = len(ranks_of_rows) == 1 and not has_whole_matrices
            runs: list[set[Any]] = [{None, *ranks_of_rows}] if is_one_run else [*({r} for r in ranks_of_rows), {None}]
            for chosen in runs:
                local_groups, whole_rows = _chosen(groups, stand_ins, chosen)
                options.matrix_ranks = ranks_of_wholes
                for ranks in chosen - {None}:
                    device = next(one.tensor.device for group in stand_ins for one in group if one.ranks is ranks)
                    share_matrices(options, ranks, device, whole_rows)
                of_run, has_new_states = run(local_groups, local_state, options)
                for index, group in enumerate(local_groups) if of_run.has_wrappers else ():
                    for place, param in enumerate(group["params"]):
                        if param.grad is not None and (reason := why_not_stepped(param, param)) is not None:
                            raise NotImplementedError(f"{label_of(group, index, place)} {reason}.")
                measured += [(of_plain.get(id(one[0]), one[0]), *one[1:]) for one in of_run.statistics]
                if has_new_states:
                    _write_back(state, local_state, parts, groups)
                if result is None or any(local_group["params"] for local_group in local_groups):
                    result = of_run
            assert result is not None
            options.matrix_ranks = None
            for group, place, param in gathered:
                of_whole = _step_whole(group, place, param, state, options, run)
                measured += [(param, *one[1:]) for one in of_whole.statistics]
                if not any(stand_ins):
                    result = of_whole
            result.statistics = measured
            if result.is_on_device or not result.skipped:
                params = (param for group in groups for param in group["params"])
                torch.autograd.graph.increment_version([p for p in params if is_dtensor(p) and p.grad is not None])
            return result
        finally:
            for part in parts.values():
                part.plain.grad = None

    def _part(self, param: "DTensor", group: Group, state: dict[Tensor, Any], label: Callable[[], str]) -> _LocalPart:
        """Returns the part of the step before if it is still valid, else a new one."""
        local, before = local_part(param), self._parts.get(id(param))
        if before is not None and before.param is param:
            if before.local is local and before.rule == self._rule.name_of(group):
                return before
            if before.local.dtype != local.dtype and state.get(param):
                raise TypeError(
                    f"{label()} is {local.dtype} but was {before.local.dtype} in the step before. Cast it back, or "
                    "make a new optimizer for it (the state can be taken along with load_state_dict)."
                )
        if (reason := why_not(param, group, self._rule)) is not None:
            raise NotImplementedError(f"{label()} {reason}.")
        ranks = group_of_rows(param, group, self._rule)
        return _LocalPart(param, local, local.detach(), self._rule.name_of(group), ranks)


def sums_of_whole_squares(rule: Rule, groups: list[Group], known: Mapping[Tensor, Tensor] | None = None) -> Tensor:
    """Sums the squares of gradients, chunk by chunk in the order of an unsharded step. Gathers one of rows at a time.

    Args:
        rule: The optimizer's rule.
        groups: Its groups.
        known: The sums of chunks of some parameters' gradients, in the order of their memory.

    Returns:
        float64 [chunks], on the device of the gradients.
    """
    batches: dict[tuple[str, bool], list[Tensor]] = defaultdict(list)  # as the native step divides parameters
    for group in groups:
        name = rule.name_of(group)
        for param in group["params"]:
            if param.grad is None or param.numel() == 0:
                continue
            # Adafactor reads row by row.
            like = torch.empty(param.shape, device=param.device) if name == "adafactor" else param
            in_double = param.dtype in (torch.float64, torch.complex128)
            sums = known.get(param) if known and name != "adafactor" else None
            batches[name, in_double].append(_C.chunk_sums(whole_values(param.grad, like)) if sums is None else sums)
    return torch.cat([*itertools.chain(*batches.values())] or [torch.zeros(0, dtype=torch.float64)])


def _write_back(
    state: dict[Tensor, Any], local_state: dict[Tensor, Any], parts: dict[int, _LocalPart], groups: list[Group]
) -> None:
    """Copies the states that the step created or removed back to the optimizer's state."""
    for param in (param for group in groups for param in group["params"]):
        part = parts.get(id(param))
        found = local_state.get(param if part is None else part.plain)
        if found is None:
            continue
        if part is None:
            state[param] = found
            continue
        values = state[param]
        for name in values.keys() - found.keys():
            del values[name]
        for name, value in found.items():
            if name not in values or local_part(values[name]) is not value:
                values[name] = shared_value(param, name, value)


def _chosen(
    groups: list[Group], stand_ins: Sequence[Sequence[_StandIn]], ranks: set[Any]
) -> tuple[list[Group], list[int]]:
    """Returns copies of the groups with the stand-ins of these ranks, and all rows of each that has a gradient."""
    copies, whole_rows = [], []
    for group, of_group in zip(groups, stand_ins, strict=True):
        chosen = [one for one in of_group if one.ranks in ranks]
        whole_rows += [one.whole_rows for one in chosen if one.tensor.grad is not None]
        copies.append(part_of_group(group, [one.place for one in chosen], [one.tensor for one in chosen]))
    return copies, whole_rows


def _step_whole(
    group: Group, place: int, param: "DTensor", state: dict[Tensor, Any], options: _C.StepOptions, run: Run
) -> _C.StepResult:
    """Steps a parameter that every rank gathers; each rank keeps its part of parameter, gradient and state."""
    assert is_dtensor(param.grad)
    detached: Any = param.detach()
    whole: Tensor = detached.full_tensor()
    set_gradient(whole, param.grad.full_tensor())
    values = {name: value.full_tensor() if is_dtensor(value) else value for name, value in state.get(param, {}).items()}
    wholes: dict[Tensor, Any] = defaultdict(dict, {whole: values} if values else {})
    result, _ = run([part_of_group(group, [place], [whole])], wholes, options)
    if not result.is_on_device and result.skipped:
        if options.zero_grads:
            param.grad.zero_()
        return result
    local_part(param).copy_(local_part(part_of(whole, param)))
    assert whole.grad is not None
    local_part(param.grad).copy_(local_part(part_of(whole.grad, param)))
    for name, value in wholes[whole].items():
        if isinstance(value, Tensor) and name not in precision.SCALAR_NAMES:
            # A view would keep the whole tensor alive.
            value = part_of(value, param).clone() if value.shape == whole.shape else replicated(value, param)
        state[param][name] = value
    return result
