"""Applies torch's own checkpointing to a model: to all blocks, to some, or by a selective policy."""

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
    """Checkpoints every block."""
    every(1, blocks)


def every(step: int, blocks: list[nn.Module]) -> None:
    """Checkpoints the first of every `step` blocks."""
    for block in blocks[::step]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def selective(blocks: list[nn.Module]) -> None:
    """Checkpoints every block, but saves the outputs of attention and of every second matrix product, as torchtitan
    does."""
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=_contexts)


def _contexts() -> Any:
    counts: Counter[tuple[bool, str]] = Counter()

    def policy(context: Any, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        keeps = op in _ATTENTION
        if op in _PRODUCTS:
            counts[context.is_recompute, "product"] += 1
            keeps = counts[context.is_recompute, "product"] % 2 == 1
        elif op is _BATCHED:  # attention consists of two; the second computes its output
            counts[context.is_recompute, "batched"] += 1
            keeps = counts[context.is_recompute, "batched"] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
