"""Applies a budget of activations to a trace with the solver of `activation_budget`."""

from collections.abc import Sequence
from dataclasses import dataclass

from .. import _C
from .options import formatted
from .trace import ALLOC, FREE, OP, Event, StepTrace


@dataclass
class Recomputation:
    """The recomputation of a budget in backward.

    Attributes:
        dropped: Blocks that forward frees and backward makes again.
        peak_bytes: The most bytes of activations kept for backward.
        seconds: The time that this adds to a step.
    """

    dropped: frozenset[int]
    peak_bytes: int
    seconds: float

    def applied_to(self, trace: StepTrace) -> list[Event]:
        """Returns the trace's events, in which a dropped block dies after forward's last use of it and is made again
        before backward's first."""
        last_read: dict[int, int] = {}
        first_use: dict[int, int] = {}
        for position, event in enumerate(trace.events):
            if event.kind != OP:
                continue
            op = trace.ops[event.subject]
            is_backward = op.phase == "backward"
            for block in (*op.reads, *op.writes):
                if block in self.dropped:
                    if not is_backward:
                        last_read[block] = position
                    else:
                        first_use.setdefault(block, position)
        ends: dict[int, list[int]] = {}
        begins: dict[int, list[int]] = {}
        for block, position in last_read.items():
            if block in first_use:
                ends.setdefault(position, []).append(block)
                begins.setdefault(first_use[block], []).append(block)
        events: list[Event] = []
        waiting: list[int] = []
        for position, event in enumerate(trace.events):
            if event.kind == OP and waiting:
                events += [Event(FREE, block) for block in waiting]
                waiting = []
            events += [Event(ALLOC, block) for block in begins.get(position, ())]
            events.append(event)
            waiting += ends.get(position, ())
        return events


def recompute_within(trace: StepTrace, seconds: Sequence[float], budget: int) -> Recomputation:
    """Solves what to recompute, given each operation's seconds, so that activations kept for backward stay in a budget.

    Raises:
        ValueError: The budget is below the smallest one for which the solver finds a plan.
    """
    ops_of_step = [event.subject for event in trace.events[trace.begin_of_last_step() :] if event.kind == OP]
    forward = [op for op in ops_of_step if trace.ops[op].phase == "forward"]
    backward = [op for op in ops_of_step if trace.ops[op].phase == "backward"]
    number: dict[int, int] = {}
    for op in forward:
        for block in trace.ops[op].writes:
            if trace.blocks[block].category == "activations":
                number.setdefault(block, len(number))
    formats: list[tuple[int, float]] = []  # none besides the unchanged one
    values = [(trace.blocks[block].num_bytes, True, True, -1, formats) for block in number]
    ops: list[tuple[float, list[int], list[int]]] = [(0.0, [], [])]
    made: set[int] = set()
    for op in forward:
        reads = [number[b] for b in trace.ops[op].reads if b in number]
        writes = [number[b] for b in trace.ops[op].writes if b in number]
        ops.append((seconds[op], reads, [w for w in writes if w not in made]))
        made.update(writes)
    last = {block: op for op in backward for block in trace.ops[op].reads if block in number}
    uses = []
    for op in backward:
        for block in trace.ops[op].reads:
            if block in number:
                uses.append((number[block], False))
                if last[block] == op:
                    uses.append((number[block], True))
    solved = _C.activation_solve(values, ops, uses, budget)
    if not solved["is_feasible"]:
        raise ValueError(
            f"budget is {formatted(budget)}, and the smallest that the step can keep for backward is "
            f"{formatted(solved['smallest_bytes'])}"
        )
    by_number = {value: block for block, value in number.items()}
    used = set(last)
    dropped = {by_number[v] for v, choice in enumerate(solved["policy"]) if choice < 0} & used
    return Recomputation(frozenset(dropped), solved["peak_bytes"], solved["seconds"])
