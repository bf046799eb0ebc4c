"""Lets the ranks of a process group share Muon's matrices."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ... import _C
from .dtensors import backend_of


def check(group: object) -> None:
    """Raises TypeError or ValueError unless this rank is in the process group."""
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group does not contain this rank: construct the optimizer on its ranks, or pass None")
    if type(group) is not dist.ProcessGroup:
        raise TypeError(
            f"process_group is a {type(group).__name__}, expected a process group that torch.distributed has made, or "
            "None"
        )


def share(
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
