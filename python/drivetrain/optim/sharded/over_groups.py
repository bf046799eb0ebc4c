"""Remembers parameters that DistributedDataParallel reduces over another group of ranks than their model's.

Ranks hold different ones, such as experts. They must therefore share the facts that an optimizer or a scaler finds out
from all gradients. All of them then clip alike and skip the same steps.
"""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from ...ddp.groups import ReducesOverGroups


class GroupParam(NamedTuple):
    """The ranks that hold a parameter, and its part in sums over all ranks.

    Attributes:
        scale: The hook that scales its gradients. A new wrapper of the parameter ends the one of its last wrapper.
        ranks: All ranks that train the model.
        counts: True if this rank counts the parameter in sums over ranks: it is the first of those that hold it.
    """

    scale: RemovableHandle
    ranks: "weakref.ref[ReducesOverGroups]"
    counts: bool


group_params = WeakTensorKeyDictionary()  # torch.compile() can trace its `data` only


def has_any(params: Iterable[Tensor]) -> bool:
    """Returns whether some of the parameters are held by some ranks only."""
    return bool(group_params.data) and any(param in group_params for param in params)


def divide(params: Iterable[Tensor]) -> "tuple[list[Tensor], dict[ReducesOverGroups, list[Tensor]]]":
    """Returns the parameters that all ranks hold, and those held by some, by all ranks that train their model.

    Raises:
        RuntimeError: The wrapper of a parameter was deleted.
    """
    everywhere: list[Tensor] = []
    by_ranks: dict[ReducesOverGroups, list[Tensor]] = {}
    for param in params:
        place = group_params.get(param) if group_params else None
        if place is None:
            everywhere.append(param)
        elif (ranks := place.ranks()) is not None:
            by_ranks.setdefault(ranks, []).append(param)
        else:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} was wrapped by a DistributedDataParallel with "
                "expert_groups that was deleted: keep the wrapper as long as its parameters are trained."
            )
    return everywhere, by_ranks


def share_overflow(params: Iterable[Tensor], flags: Iterable[Tensor]) -> None:
    """Lets all ranks that train the parameters find an overflow if one of them does. All must call it.

    Flags are above 0 where a gradient is not finite: float32 [] each; every rank must have the same number.
    """
    for ranks in divide(params)[1]:
        for flag in flags:
            ranks.share(flag, dist.ReduceOp.MAX, "the search for gradients that are not finite, in expert_groups")
