"""From what a step did to what it shall keep: the solver's choice, and what the recorder is told of it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import _C
from .copies import Copies, StepClock, copies_of
from .host_link import HostLink
from .trace import STORAGE_FORMATS, Trace

FORGET = -1
KEEP = 0
_NO_COPIES = float("inf")
_PRICES = (0.02, 2.0)  # between which is the one at which as much is copied as can be hidden
_BISECTIONS = 4
_NEGLIGIBLE = 0.05  # of all that a plan takes
UNPLANNED = -2  # the recorder keeps it if autograd saves it


class PlannedOp(NamedTuple):
    """What the recorder is told of an operation."""

    name: str
    forms: Sequence[int]  # what becomes of each value that it makes
    is_replayed: bool
    # With these arguments, all that autograd saves in it is kept as it is, and needs no hooks; None: with none.
    unhooked_arguments: int | None = None
    unhooked: Sequence[bool] = ()  # which values that it makes are saved by such operations; empty: none
    # Per value that it makes: the offloaded ones, by operation and result, whose copy back starts when it is taken.
    prefetches: Sequence[Sequence[tuple[int, int]]] = ()
    module: str = ""  # that it is called in, for errors


@dataclasses.dataclass
class Choice:
    """What the solver chose, and what it expects of it."""

    keeping: list[int]  # per value of the trace
    peak_bytes: int
    seconds: float
    bound_seconds: float
    smallest_bytes: int
    is_feasible: bool
    copies: Copies | None = None  # to the host and back, where a link is known

    @property
    def host_bytes(self) -> int:
        """What the pool of host memory reserves at most for what is offloaded."""
        return 0 if self.copies is None else self.copies.host_bytes

    def tape_plans(self, trace: Trace) -> list[list[PlannedOp]]:
        """For each pass, in order."""
        needed, replayed = self.needed(trace)
        started_by: dict[int, list[int]] = {}
        for value, at in self.copies.prefetches if self.copies is not None else ():
            started_by.setdefault(at, []).append(value)
        plans = []
        for which, (begin, one) in enumerate(trace.passes_at()):
            sources = {begin + read for op in replayed[which] for read in one.ops[op].reads}
            forms: dict[int, int] = {}
            for value in one.made:
                form = self.keeping[begin + value]
                if form == FORGET or not one.values[value].can_keep:
                    forms[value] = FORGET
                elif form > KEEP and begin + value in needed:
                    forms[value] = one.values[value].formats[form - 1].storage_format
                else:
                    forms[value] = KEEP if begin + value in sources else UNPLANNED
            as_they_are = {value for value, form in forms.items() if form in (KEEP, UNPLANNED)}
            made_by = {write: (op, i) for op, made in enumerate(one.ops) for i, write in enumerate(made.writes)}
            saved = trace.saves_without_hooks(begin, one, as_they_are)
            unhooked = set().union(*saved.values())
            plans.append(
                [
                    PlannedOp(
                        op.name,
                        [forms[write] for write in op.writes],
                        index in replayed[which],
                        one.arguments[index] if index in saved else None,
                        [write in unhooked for write in op.writes],
                        [
                            [made_by[value - begin] for value in started_by.get(begin + write, ())]
                            for write in op.writes
                        ],
                        trace.modules[op.module] if op.module >= 0 else "",
                    )
                    for index, op in enumerate(one.ops)
                ]
            )
        return plans

    def needed(self, trace: Trace) -> tuple[set[int], list[set[int]]]:
        """The values that backward asks for, or that a replay of such reads; and for each pass, what is replayed."""
        needed = {use.value for use in trace.uses}
        replayed: list[set[int]] = [set() for _ in trace.passes]
        for which, (begin, one) in reversed(list(enumerate(trace.passes_at()))):
            for index in reversed(range(len(one.ops))):
                op = one.ops[index]
                if any(self.keeping[begin + write] == FORGET and begin + write in needed for write in op.writes):
                    needed.update(begin + read for read in op.reads)
                    replayed[which].add(index)
        return needed, replayed

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Choice":
        copies = plain.get("copies")
        return cls(**{**plain, "copies": None if copies is None else Copies.from_dict(copies)})


def choose(trace: Trace, budget_bytes: int, link: HostLink | None = None, host_bytes: int = 0) -> Choice:
    """The least time within so many bytes; where that cannot be, the smallest plan there is (`is_feasible` says).

    With a link, values on the host cost what the step waits for their copies, which run beside it. The solver adds up
    what each value costs by itself, so it is asked several times: with copies for the price of starting them, and with
    a share of their time added, larger for values made late in forward, whose copies have less time to hide in.

    Args:
        link, host_bytes: over which values may be offloaded, and what they may take on the host at most.
    """
    if link is None or not trace.has_storage_format(STORAGE_FORMATS["host"]):
        return _solved(trace, budget_bytes, None)
    free = _with_copies(trace, budget_bytes, link, 0.0)
    low, high, next_price = *_PRICES, _NO_COPIES
    found = [free]
    for _ in range(1 + _BISECTIONS if _copies_too_much(free, host_bytes) else 0):
        found.append(_with_copies(trace, budget_bytes, link, next_price))
        if next_price != _NO_COPIES:
            low, high = (next_price, high) if _copies_too_much(found[-1], host_bytes) else (low, next_price)
        next_price = math.sqrt(low * high)
    best = min(found, key=lambda choice: (choice.host_bytes > host_bytes, not choice.is_feasible, choice.seconds))
    best.bound_seconds = free.bound_seconds
    best.smallest_bytes = min(choice.smallest_bytes for choice in found)
    return best


def _copies_too_much(choice: Choice, host_bytes: int) -> bool:
    """Whether the step would wait for copies for more than a negligible time, or the host has no room for them."""
    assert choice.copies is not None
    return choice.copies.exposed_seconds > _NEGLIGIBLE * choice.seconds or choice.host_bytes > host_bytes


def _with_copies(trace: Trace, budget_bytes: int, link: HostLink, price: float) -> Choice:
    """The solver's choice where a copy costs its start and `price` times its time; with what its copies really cost."""
    clock = StepClock(trace)
    host = STORAGE_FORMATS["host"]
    sizes = [value.num_bytes for one in trace.passes for value in one.values]

    def cost_of(value: int, form: int, seconds: float) -> float:
        if form != host:
            return seconds
        if price == _NO_COPIES:
            return 1e6
        lateness = 2 * clock.made_at.get(value, 0.0) / max(clock.forward_seconds, 1e-12)
        copying = link.out_seconds(sizes[value]) + link.in_seconds(sizes[value])
        return 2 * link.copy_seconds + price * lateness * copying

    choice = _solved(trace, budget_bytes, cost_of)
    timeline = _C.activation_timeline(*trace.for_solver(cost_of), choice.keeping)
    copies = copies_of(trace, choice.keeping, timeline["peak_bytes"], timeline["brought_back_at"], budget_bytes, link)
    priced = sum(
        cost_of(begin + i, host, 0.0)
        for begin, one in trace.passes_at()
        for i, value in enumerate(one.values)
        if timeline["brought_back_at"][begin + i] >= 0
        and value.formats[choice.keeping[begin + i] - 1].storage_format == host
    )
    choice.seconds += 2 * link.copy_seconds * copies.num_values + copies.exposed_seconds - priced
    choice.copies = copies
    return choice


def _solved(trace: Trace, budget_bytes: int, cost_of: Callable[[int, int, float], float] | None) -> Choice:
    solved = _C.activation_solve(*trace.for_solver(cost_of), budget_bytes)
    return Choice(
        keeping=solved["keeping"],
        peak_bytes=solved["peak_bytes"],
        seconds=solved["seconds"],
        bound_seconds=solved["bound_seconds"],
        smallest_bytes=solved["smallest_bytes"],
        is_feasible=solved["is_feasible"],
    )
