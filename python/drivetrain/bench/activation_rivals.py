"""What torch offers to keep fewer activations: blocks that are checkpointed, all or some, or by a policy."""

import functools
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}
_BATCHED = torch.ops.aten.bmm.default


def full(blocks: list[nn.Module]) -> None:
    """Every block is checkpointed."""
    every(1, blocks)


def every(step: int, blocks: list[nn.Module]) -> None:
    """The first of so many blocks is checkpointed, and so on."""
    for block in blocks[::step]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def selective(blocks: list[nn.Module]) -> None:
    """Every block is, but for the outputs of attention and of every second product, which are kept (as torchtitan has
    it)."""
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=_contexts)


def _contexts() -> Any:
    counts: Counter[tuple[bool, str]] = Counter()

    def policy(context: Any, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        keeps = op in _ATTENTION
        if op in _PRODUCTS:
            counts[context.is_recompute, "product"] += 1
            keeps = counts[context.is_recompute, "product"] % 2 == 1
        elif op is _BATCHED:  # attention out of two of them: the second is its output
            counts[context.is_recompute, "batched"] += 1
            keeps = counts[context.is_recompute, "batched"] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
