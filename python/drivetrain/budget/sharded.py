"""Refuses models that free parameters between forward and backward, because replays read them again."""

import sys
from typing import Any

from torch import nn


def refuse_resharding(model: nn.Module) -> None:
    """Raises NotImplementedError if fully_shard() frees the gathered parameters of a module after its forward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    sharded = {name: module for name, module in model.named_modules() if isinstance(module, fsdp.FSDPModule)}
    for name, module in sharded.items():
        is_inside = any(name != other and (not other or name.startswith(f"{other}.")) for other in sharded)
        if _reshards(module, is_inside):
            where = f"module {name!r}" if name else "the model"
            raise NotImplementedError(
                f"{where} is under fully_shard() with reshard_after_forward, which frees parameters that the budget "
                "reads again in backward. Give fully_shard() reshard_after_forward=False (or call "
                "model.set_reshard_after_forward(False)), or use drivetrain.checkpoint() for its blocks."
            )


def _reshards(module: Any, is_inside: bool) -> bool:
    """Returns whether a module reshards after forward. torch has no public way to ask."""
    state = module._get_fsdp_state()
    # By default the outermost module keeps its parameters. torch determines it in the first forward.
    is_root = not is_inside if state._is_root is None else state._is_root
    if is_root and state._auto_reshard_after_forward:
        return False
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(group is not None and group.post_forward_mesh_info is not None for group in groups)
