"""Sums over a device mesh for LAMB and Adafactor, whose rules need sums over whole DTensor parameters."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..rule import Group, Numbers
from .dtensors import dims_that_split, split_dims, summed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass
class Part:
    """A DTensor parameter, this rank's part of it, and the plain tensor that stands for the part in the native step."""

    param: "DTensor"
    local: Tensor
    plain: Tensor
    group: Group


class MeshSums:
    """Shares a step's sums over this rank's parts with the other ranks.

    The native step calls it between its passes (csrc/optim/run_shared.h). Ranks share the sums of all parameters at
    once: one all-reduce per mesh, set of its dimensions and stage. The step divides by its own number of elements, rows
    or columns, so the sums are scaled for that beforehand.

    Args:
        parts: Parts of parameters with gradients, the same on every rank of their meshes.
        state: The optimizer's state by the plain tensors.
        hypers: Returns a group's numbers by the names that the rule reads.
    """

    def __init__(self, parts: Sequence[Part], state: dict[Tensor, Any], hypers: Callable[[Group], Numbers]) -> None:
        self._parts = parts
        self._state = state
        self._hypers = hypers

    def __call__(self, stage: str, in_double: bool, params: list[Tensor], sums: list[Tensor]) -> None:
        parts = [part for part in self._parts if (part.plain.dtype == torch.float64) == in_double]
        places = {id(param): place for place, param in enumerate(params)}
        if stage == "norms":
            _share_norms([(part, places.get(id(part.plain))) for part in parts], sums[0])
            return
        matrices = [(part, places[id(part.plain)]) for part in parts if id(part.plain) in places]
        if stage == "factor_sums":
            _share_squares(matrices, sums)
        else:
            self._share_means(matrices, sums)

    def _share_means(self, matrices: list[tuple[Part, int]], factors: list[Tensor]) -> None:
        """Replaces the mean over this rank's rows, whose root the rows' factors contain, by the mean over all rows."""
        split = [(part, place, dims) for part, place in matrices if (dims := dims_that_split(part.param, -2))]
        own = [self._state[part.plain]["row_var"].double().sum(-2).flatten() for part, *_ in split]
        totals = _totals([(part, dims) for part, _, dims in split], own)
        for (part, place, _), before, total in zip(split, own, totals, strict=True):
            floor = float(self._hypers(part.group)["eps1"])
            here = (before / part.plain.shape[-2]).clamp(min=floor)
            everywhere = (total / part.param.shape[-2]).clamp(min=floor)
            factors[place].mul_((everywhere / here).sqrt()[:, None].to(factors[place].dtype))


def _share_norms(parts: list[tuple[Part, int | None]], sums: Tensor) -> None:
    # A rank without elements takes part with zeros.
    own = [sums.new_zeros(2) if place is None else sums[place] for _, place in parts]
    totals = _totals([(part, split_dims(part.param)) for part, _ in parts], own)
    for (part, place), total in zip(parts, totals, strict=True):
        if place is not None:
            sums[place] = total * (part.plain.numel() / part.param.numel())


def _share_squares(matrices: list[tuple[Part, int]], sums: list[Tensor]) -> None:
    """Shares the sums of squares of rows and columns that ranks have parts of."""
    split = [
        (part, across, dims, sums[2 * place + is_columns])
        for part, place in matrices
        for is_columns, across in enumerate((-1, -2))  # the dimension that is added up
        if (dims := dims_that_split(part.param, across))
    ]
    totals = _totals([(part, dims) for part, _, dims, _ in split], [units.sum(0) for *_, units in split])
    for (part, across, _, units), total in zip(split, totals, strict=True):
        units.zero_()
        units[0] = total * (part.plain.shape[across] / part.param.shape[across])


def _totals(where: Sequence[tuple[Part, tuple[int, ...]]], own: Sequence[Tensor]) -> list[Tensor]:
    """Sums each of this rank's values over dimensions of its part's mesh."""
    by_mesh: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = defaultdict(list)
    for index, (part, dims) in enumerate(where):
        by_mesh[part.param.device_mesh, dims].append(index)
    totals = list(own)
    for (mesh, dims), members in by_mesh.items():
        values = [own[index] for index in members]
        flat = summed(torch.cat([value.flatten() for value in values]), mesh, dims)
        for index, total in zip(members, flat.split([value.numel() for value in values]), strict=True):
            totals[index] = total.view_as(own[index])
    return totals
