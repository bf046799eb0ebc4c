"""From what a step did to what it shall keep: the solver's choice, and what the recorder is told of it."""

import dataclasses
from typing import Any

from .. import _C
from .trace import Trace

FORGET = -1
KEEP = 0
UNPLANNED = -2  # the recorder keeps it if autograd saves it


@dataclasses.dataclass
class Choice:
    """What the solver chose, and what it expects of it."""

    keeping: list[int]  # per value of the trace
    peak_bytes: int
    seconds: float
    bound_seconds: float
    smallest_bytes: int
    is_feasible: bool

    def tape_plans(self, trace: Trace) -> list[list[tuple[str, list[int], bool]]]:
        """For each pass and operation its name, what becomes of each value it makes, and whether it is replayed."""
        needed, replayed = self.needed(trace)
        plans = []
        for which, (begin, one) in enumerate(trace.passes_at()):
            sources = {begin + read for op in replayed[which] for read in one.ops[op][3]}
            plan = []
            for index, (name, _, _, _, writes) in enumerate(one.ops):
                forms = []
                for write in writes:
                    value = begin + write
                    if self.keeping[value] == FORGET or one.values[write][1] is False:
                        forms.append(FORGET)
                    elif self.keeping[value] > KEEP and value in needed:
                        forms.append(one.values[write][4][self.keeping[value] - 1][0])
                    else:
                        forms.append(KEEP if value in sources else UNPLANNED)
                plan.append((name, forms, index in replayed[which]))
            plans.append(plan)
        return plans

    def needed(self, trace: Trace) -> tuple[set[int], list[set[int]]]:
        """The values that backward asks for, or that a replay of such reads; and for each pass, what is replayed."""
        needed = {value for value, _ in trace.uses}
        replayed: list[set[int]] = [set() for _ in trace.passes]
        for which, (begin, one) in reversed(list(enumerate(trace.passes_at()))):
            for index in reversed(range(len(one.ops))):
                _, _, _, reads, writes = one.ops[index]
                if any(self.keeping[begin + write] == FORGET and begin + write in needed for write in writes):
                    needed.update(begin + read for read in reads)
                    replayed[which].add(index)
        return needed, replayed

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Choice":
        return cls(**plain)


def choose(trace: Trace, budget_bytes: int) -> Choice:
    """The least time within so many bytes; where that cannot be, the smallest plan there is (`is_feasible` says)."""
    values, ops, uses = trace.for_solver()
    solved = _C.activation_solve(values, ops, uses, budget_bytes)
    return Choice(
        keeping=solved["keeping"],
        peak_bytes=solved["peak_bytes"],
        seconds=solved["seconds"],
        bound_seconds=solved["bound_seconds"],
        smallest_bytes=solved["smallest_bytes"],
        is_feasible=solved["is_feasible"],
    )
