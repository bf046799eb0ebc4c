"""Tells which of DistributedDataParallel's arguments torch knows, and refuses those that need another torch."""

import inspect

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

TORCH_ARGUMENTS = inspect.signature(TorchDistributedDataParallel.__init__).parameters
_OURS_ALONE = frozenset(
    (
        *("transport", "check_replicas_every", "report_hang_after", "wire_dtype"),
        *("check_gradients", "spike_factor", "shard", "shard_group", "overlap_gather", "expert_groups"),
    )
)


def refuse_unknown(changed: dict[str, object]) -> None:
    """Raises TypeError for arguments with another value than their default that the installed torch does not have."""
    for name in changed:
        if name not in TORCH_ARGUMENTS and name not in _OURS_ALONE and name != "batched_grad_copy":
            raise TypeError(
                f"torch {torch.__version__} does not know DistributedDataParallel's argument {name!r} (given "
                f"{changed[name]!r}): leave it out, or upgrade torch."
            )
