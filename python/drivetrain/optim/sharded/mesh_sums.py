"""Sums over a device mesh for LAMB and Adafactor, whose rules need sums over whole DTensor parameters."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .dtensors import Group, dims_that_split, split_dims, summed
from .step import Part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Places = tuple["DeviceMesh", tuple[int, ...]]


class MeshSums:
    """Shares a step's sums over this rank's parts with the other ranks.

    The native step calls it between its passes (csrc/optim/run_shared.h). Ranks share the sums of all parameters at
    once: one all-reduce per mesh, set of its dimensions and stage. The step divides by its own number of elements, rows
    or columns, so the sums are scaled for that beforehand.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        state: dict[Tensor, Any],
        hypers: Callable[[Group], dict[str, float | Tensor]],
    ) -> None:
        """Stores the parts.

        Args:
            parts: Parts of parameters with gradients, the same on every rank of their meshes.
            state: The optimizer's state by the plain tensors.
            hypers: Returns a group's numbers by the names that the rule reads.
        """
        self._parts = parts
        self._state = state
        self._hypers = hypers

    def __call__(self, stage: str, in_double: bool, params: list[Tensor], sums: list[Tensor]) -> None:
        parts = [part for part in self._parts if (part.plain.dtype == torch.float64) == in_double]
        places = {id(param): place for place, param in enumerate(params)}
        if stage == "norms":
            self._share_norms(parts, places, sums[0])
            return
        matrices = [(part, places[id(part.plain)]) for part in parts if id(part.plain) in places]
        if stage == "factor_sums":
            self._share_squares(matrices, sums)
        else:
            self._share_means(matrices, sums)

    def _share_norms(self, parts: list[Part], places: dict[int, int], sums: Tensor) -> None:
        by_mesh: dict[Places, list[Part]] = defaultdict(list)
        for part in parts:
            by_mesh[part.param.device_mesh, split_dims(part.param)].append(part)
        for (mesh, dims), members in by_mesh.items():
            totals = sums.new_zeros(len(members), 2)  # A rank without elements takes part with zeros.
            here = [(row, places[id(part.plain)], part) for row, part in enumerate(members) if id(part.plain) in places]
            for row, place, _ in here:
                totals[row] = sums[place]
            totals = summed(totals, mesh, dims)
            for row, place, part in here:
                sums[place] = totals[row] * (part.plain.numel() / part.param.numel())

    def _share_squares(self, matrices: list[tuple[Part, int]], sums: list[Tensor]) -> None:
        """Shares the sums of squares of rows and columns that ranks have parts of."""
        shares: dict[Places, list[tuple[Tensor, float]]] = defaultdict(list)
        for part, place in matrices:
            for is_columns in (0, 1):
                across = -2 if is_columns else -1  # the dimension that is added up
                if dims := dims_that_split(part.param, across):
                    shares[part.param.device_mesh, dims].append(
                        (sums[2 * place + is_columns], part.plain.shape[across] / part.param.shape[across])
                    )
        for (mesh, dims), members in shares.items():
            own = [units.sum(0).flatten() for units, _ in members]
            totals = torch.split(summed(torch.cat(own), mesh, dims), [one.numel() for one in own])
            for (units, share), total in zip(members, totals, strict=True):
                units.zero_()
                units[0] = total.view_as(units[0]) * share

    def _share_means(self, matrices: list[tuple[Part, int]], factors: list[Tensor]) -> None:
        """Replaces the mean over this rank's rows, whose root the rows' factors contain, by the mean over all rows."""
        shares: dict[Places, list[tuple[Part, Tensor]]] = defaultdict(list)
        for part, place in matrices:
            if dims := dims_that_split(part.param, -2):
                shares[part.param.device_mesh, dims].append((part, factors[place]))
        for (mesh, dims), members in shares.items():
            own = [self._state[part.plain]["row_var"].double().sum(-2).flatten() for part, _ in members]
            totals = torch.split(summed(torch.cat(own), mesh, dims), [one.numel() for one in own])
            for (part, rows), before, total in zip(members, own, totals, strict=True):
                floor = float(self._hypers(part.group)["eps1"])
                here = (before / part.plain.shape[-2]).clamp(min=floor)
                everywhere = (total / part.param.shape[-2]).clamp(min=floor)
                rows.mul_((everywhere / here).sqrt()[:, None].to(rows.dtype))


def smallest_part(size: int, num_parts: Sequence[int]) -> int:
    """Returns the smallest number of elements of any rank, for a dimension that mesh dimensions split in turn."""
    for parts in num_parts:
        size = max(0, size - (parts - 1) * math.ceil(size / parts))
    return size
