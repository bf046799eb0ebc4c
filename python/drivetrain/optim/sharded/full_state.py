"""Full state dicts: an optimizer's state dict with whole tensors in place of DTensors."""

from typing import Any

import torch
from torch import Tensor

from .dtensors import is_dtensor


def full_state_dict(optimizer: torch.optim.Optimizer, rank: int | None = 0) -> dict[str, Any]:
    """Returns an optimizer's state dict with whole tensors in place of DTensors, which one process can load.

    All ranks gather one state at a time, so that no rank but `rank` has more than one whole state. Every rank must
    call it. It takes any optimizer with DTensor states, such as DistributedDataParallel(shard=...) gives.

    Args:
        optimizer: The optimizer.
        rank: The global rank that keeps the result. None keeps it on every rank.

    Returns:
        The state dict on that rank, with tensors on the CPU; an empty dict on the others.
    """
    keeps = rank is None or not torch.distributed.is_initialized() or torch.distributed.get_rank() == rank
    state_dict = optimizer.state_dict()
    states: dict[Any, Any] = {}
    for key, values in state_dict["state"].items():
        whole = {}
        for name, value in values.items():
            found = value.full_tensor() if is_dtensor(value) else value
            if keeps:
                whole[name] = found.cpu() if isinstance(found, Tensor) else found
        states[key] = whole
    return {**state_dict, "state": states} if keeps else {}
