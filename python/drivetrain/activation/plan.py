"""From what a step did to what it shall keep: the solver's choice, and what the recorder is told of it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import _C
from .trace import Trace

FORGET = -1
KEEP = 0
UNPLANNED = -2  # the recorder keeps it if autograd saves it


class PlannedOp(NamedTuple):
    """What the recorder is told of an operation."""

    name: str
    forms: Sequence[int]  # what becomes of each value that it makes
    is_replayed: bool
    # With these arguments, all that autograd saves in it is kept as it is, and needs no hooks; None: with none.
    unhooked_arguments: int | None = None
    unhooked: Sequence[bool] = ()  # which values that it makes are saved by such operations; empty: none


@dataclasses.dataclass
class Choice:
    """What the solver chose, and what it expects of it."""

    keeping: list[int]  # per value of the trace
    peak_bytes: int
    seconds: float
    bound_seconds: float
    smallest_bytes: int
    is_feasible: bool

    def tape_plans(self, trace: Trace) -> list[list[PlannedOp]]:
        """For each pass, in order."""
        needed, replayed = self.needed(trace)
        plans = []
        for which, (begin, one) in enumerate(trace.passes_at()):
            sources = {begin + read for op in replayed[which] for read in one.ops[op][3]}
            forms: dict[int, int] = {}
            for value in one.made:
                form = self.keeping[begin + value]
                if form == FORGET or one.values[value][1] is False:
                    forms[value] = FORGET
                elif form > KEEP and begin + value in needed:
                    forms[value] = one.values[value][4][form - 1][0]
                else:
                    forms[value] = KEEP if begin + value in sources else UNPLANNED
            as_they_are = {value for value, form in forms.items() if form in (KEEP, UNPLANNED)}
            saved = trace.saves_without_hooks(begin, one, as_they_are)
            unhooked = set().union(*saved.values())
            plans.append(
                [
                    PlannedOp(
                        op[0],
                        [forms[write] for write in op[4]],
                        index in replayed[which],
                        one.arguments[index] if index in saved else None,
                        [write in unhooked for write in op[4]],
                    )
                    for index, op in enumerate(one.ops)
                ]
            )
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
