"""Predicts the peak that torch's allocator sees under a policy, and what checkpointing of each block would need."""

import re
from collections import defaultdict
from typing import NamedTuple

from torch import nn

from .. import _C
from .trace import RECOMPUTE, Trace


def allocated_peak(model: nn.Module, trace: Trace, policy: list[int]) -> int:
    """Predicts the most bytes that backward allocates above the model: kept values, gradients and temporaries.

    When backward takes a value, it differentiates an operation that saved it. It allocates gradients of what that
    operation made and read, and a temporary of their size. Gradients of the calling module's parameters remain.

    Args:
        model: The model that was traced.
        trace: The traced step.
        policy: Per value, as `_C.activation_solve` returns it.
    """
    kept = _C.activation_timeline(*trace.for_solver(), policy)["peak_bytes"]
    modules = dict(model.named_modules())
    saved_by: dict[int, list[tuple[int, int]]] = defaultdict(list)  # per value: gradients' bytes, and a module
    for begin, one in trace.passes_at():
        for op, value in one.saves:
            if value < 0 or op >= len(one.ops):
                continue
            touched = [one.values[i].num_bytes for i in {*one.ops[op].reads, *one.ops[op].writes}]
            saved_by[begin + value].append((sum(touched) + max(touched), one.ops[op].module))
    gradients, seen = 0, set()
    peak: int = kept[0]
    for use, num_bytes in zip(trace.uses, kept[1:], strict=True):
        temporary = 0
        for touched_bytes, module in () if use.is_release else saved_by[use.value]:
            temporary = max(temporary, touched_bytes)
            if module >= 0 and module not in seen:
                seen.add(module)
                owner = modules.get(trace.modules[module], nn.Module())  # it may have been removed since
                gradients += sum(param.nbytes for param in owner.parameters(recurse=False) if param.requires_grad)
        peak = max(peak, num_bytes + temporary + gradients)
    return peak


class PerBlock(NamedTuple):
    """The most bytes that `torch.utils.checkpoint` of each block keeps for backward, and the seconds that it adds."""

    blocks: str
    num_bytes: int
    seconds: float


def per_block(trace: Trace) -> PerBlock | None:
    """Predicts checkpointing of each block: of the modules in a list that call the most operations; None: no list."""
    blocks = [re.match(r"(?:(.*?)\.)?(\d+)(\.|$)", name) for name in trace.modules]
    counts: dict[str, int] = defaultdict(int)
    for one in trace.passes:
        for op in one.ops:
            block = blocks[op.module] if op.module >= 0 else None
            if block is not None:
                counts[block[1] or ""] += 1
    if not counts:
        return None
    chosen = max(counts, key=lambda name: counts[name])

    def block_of(module: int) -> str | None:
        block = blocks[module] if module >= 0 else None
        return block[2] if block is not None and (block[1] or "") == chosen else None

    policy = trace.keeping_everything
    for begin, one in trace.passes_at():
        inside = {write: block_of(op.module) for op in one.ops for write in op.writes}
        leaves = {read for op in one.ops for read in op.reads if block_of(op.module) != inside.get(read)}
        for write, number in inside.items():
            if number is not None and write not in leaves and one.values[write].can_recompute:
                policy[begin + write] = RECOMPUTE
    outcome = _C.activation_simulate(*trace.for_solver(), policy)
    return PerBlock(chosen, outcome["peak_bytes"], outcome["seconds"])
