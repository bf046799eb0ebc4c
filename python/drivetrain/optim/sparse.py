"""Sparse gradients, as `nn.Embedding(sparse=True)` gives them: torch's own functions step their parameters.

The native step takes dense gradients. An optimizer whose class in torch takes sparse ones has a method
`_step_sparse`. It steps the parameters with sparse gradients, after the native step of the others.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import precision

Group = dict[str, Any]


def has_any(groups: list[Group]) -> bool:
    """Returns whether any gradient is sparse."""
    return any(param.grad is not None and param.grad.is_sparse for group in groups for param in group["params"])


def split(groups: list[Group], label: Callable[[Group, int, int], str]) -> tuple[list[Group], list[Group]]:
    """Copies the groups twice: with the parameters that have dense gradients, and with those that have sparse ones.

    Args:
        groups: The optimizer's parameter groups.
        label: Names a parameter by its group, the group's index, and its place there.

    Raises:
        NotImplementedError: A group with a sparse gradient asks for a storage format of drivetrain.
        RuntimeError: A group with a sparse gradient has weight decay, which torch cannot apply to it.
    """
    dense, sparse = [], []
    for index, group in enumerate(groups):
        is_sparse = [param.grad is not None and param.grad.is_sparse for param in group["params"]]
        for place, found in enumerate(is_sparse):
            if not found:
                continue
            asked = [
                f"{name}={group[name]!r}"
                for name in precision.DEFAULTS
                if group.get(name, precision.DEFAULTS[name]) != precision.DEFAULTS[name]
            ]
            if asked:
                raise NotImplementedError(
                    f"{label(group, index, place)} has a sparse gradient, which {', '.join(asked)} cannot step: put it "
                    "into a group without that, or set sparse=False in its Embedding."
                )
            if group["weight_decay"] != 0:
                raise RuntimeError(
                    f"{label(group, index, place)} has a sparse gradient, with which weight_decay="
                    f"{group['weight_decay']} is not compatible: put it into a group with weight_decay=0."
                )
        dense.append(_filtered(group, [not found for found in is_sparse]))
        sparse.append(_filtered(group, is_sparse))
    return dense, sparse


def _filtered(group: Group, keeps: list[bool]) -> Group:
    columns: dict[str, list[Tensor] | list[str]] = {
        name: [value for value, keep in zip(group[name], keeps, strict=True) if keep]
        for name in ("params", "param_names")
        if name in group
    }
    return group | columns
