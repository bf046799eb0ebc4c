"""Corrects a trace for memory that autograd reuses."""

from __future__ import annotations

from .trace import ALLOC, FREE, OP, STEP, Event, Operand, StepTrace


def without_copies(trace: StepTrace, accumulations: dict[int, tuple[int, ...]]) -> list[Event]:
    """Corrects the events for memory that autograd reuses.

    Autograd adds up gradients in place of one that nothing else refers to, and takes a parameter's first gradient
    without a copy. It does neither for tensors without values. The trace then has an operation with a new block there,
    after which an operand of the same size is freed. The new block then continues that operand's.
    """
    events = trace.events
    freed_soon: dict[int, int] = {}  # the event that frees a reused operand, by the event that allocates the result
    for position, event in enumerate(events):
        if event.kind != OP or event.subject not in accumulations:
            continue
        if position + 1 >= len(events) or events[position + 1].kind != ALLOC:
            continue
        made = trace.blocks[events[position + 1].subject]
        for later in range(position + 2, min(position + 8, len(events))):
            if events[later].kind in (OP, STEP):
                break
            block = events[later].subject
            is_operand = events[later].kind == FREE and block in accumulations[event.subject]
            if is_operand and trace.blocks[block].num_bytes == made.num_bytes:
                freed_soon[position + 1] = later
                break
    same: dict[int, int] = {}

    def origin(block: int) -> int:
        while block in same:
            block = same[block]
        return block

    removed = set(freed_soon.values())
    result = []
    for position, event in enumerate(events):
        if position in freed_soon:
            operand, made_block = events[freed_soon[position]].subject, event.subject
            same[made_block] = origin(operand)
            taken, first = trace.blocks[made_block], trace.blocks[same[made_block]]
            if taken.category == "gradients":
                first.category, first.parameter = taken.category, taken.parameter
        elif position not in removed:
            index = origin(event.subject) if event.kind in (ALLOC, FREE) else event.subject
            result.append(Event(event.kind, index))
    for op in trace.ops:
        op.reads = tuple(dict.fromkeys(map(origin, op.reads)))
        op.writes = tuple(dict.fromkeys(map(origin, op.writes)))
        op.operands = tuple(Operand(origin(operand.block), operand.offset) for operand in op.operands)
        op.results = tuple(map(origin, op.results))
    return result
