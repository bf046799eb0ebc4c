"""Sparse gradients, as `nn.Embedding(sparse=True)` gives them: torch's own functions step their parameters.

The native step takes dense gradients. The rule of a class that takes sparse ones in torch has `step_sparse`. It steps
the parameters with sparse gradients, after the native step of the others.
"""

from . import precision
from .rule import Group
from .sharded.dtensors import label_of


def has_any(groups: list[Group]) -> bool:
    """Returns whether any gradient is sparse."""
    return any(param.grad is not None and param.grad.is_sparse for group in groups for param in group["params"])


def split(groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """Returns every group with its dense gradients' parameters, and the groups of parameters with sparse ones.

    Raises:
        NotImplementedError: A group with a sparse gradient asks for a storage format of drivetrain.
        RuntimeError: A group with a sparse gradient has weight decay, which torch cannot apply to it.
    """
    dense, sparse = [], []
    for index, group in enumerate(groups):
        is_sparse = [param.grad is not None and param.grad.is_sparse for param in group["params"]]
        dense.append(_filtered(group, [not found for found in is_sparse]))
        if not any(is_sparse):
            continue
        label = label_of(group, index, is_sparse.index(True))
        asked = [f"{name}={group[name]!r}" for name, no in precision.DEFAULTS.items() if group.get(name, no) != no]
        if asked:
            raise NotImplementedError(
                f"{label} has a sparse gradient, which {', '.join(asked)} cannot step: put it into a group without "
                "that, or set sparse=False in its Embedding."
            )
        if group["weight_decay"] != 0:
            raise RuntimeError(
                f"{label} has a sparse gradient, with which weight_decay={group['weight_decay']} is not compatible: "
                "put it into a group with weight_decay=0."
            )
        sparse.append(_filtered(group, is_sparse))
    return dense, sparse


def _filtered(group: Group, keeps: list[bool]) -> Group:
    return group | {
        name: [value for value, keep in zip(group[name], keeps, strict=True) if keep]
        for name in ("params", "param_names")
        if name in group
    }
