"""Converts a recorded step into a save/recompute policy, and the policy into plans for the recorder."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .. import _C
from .copies import Copies, HostLink, StepClock, copies_of
from .trace import RECOMPUTE, SAVE, STORAGE_FORMATS, Trace, TracedValue

_NO_COPIES = float("inf")
_PRICES = (0.02, 2.0)  # the bounds of the bisection for the price of copies
_BISECTIONS = 4
_NEGLIGIBLE = 0.05  # of a plan's added time
UNPLANNED = -2  # saved only if autograd saves it


class PlannedOp(NamedTuple):
    """The plan for one operation, as the recorder takes it."""

    name: str
    forms: Sequence[int]  # per output: RECOMPUTE, SAVE, UNPLANNED or a storage format
    is_replayed: bool
    arguments: int = 0  # a hash of the tensors it is given
    # Per output: the offloaded values (operation, result) whose copies back start when backward takes the output.
    prefetches: Sequence[Sequence[tuple[int, int]]] = ()
    module: str = ""  # in which it is called, for errors
    numbers: Sequence[int] = ()  # of the outputs among the values of the profiled pass
    most_bytes: int = 0  # that a pass on another path may keep up to this operation


@dataclasses.dataclass
class ChosenPolicy:
    """The solver's save/recompute policy, and its predicted cost."""

    policy: list[int]  # per value of the trace: RECOMPUTE, SAVE, or 1 + the index of a storage format
    peak_bytes: int
    seconds: float
    bound_seconds: float
    smallest_bytes: int
    is_feasible: bool
    copies: Copies | None = None  # to the host and back, if a link is known

    @property
    def host_bytes(self) -> int:
        """The most bytes that the pool of host memory reserves for offloaded values."""
        return 0 if self.copies is None else self.copies.host_bytes

    def tape_plans(self, trace: Trace, budget_bytes: int = 0) -> list[list[PlannedOp]]:
        """Returns the plans of each pass, in order. A pass on another path may also keep what the budget leaves."""
        left_bytes = max(0, budget_bytes - self.peak_bytes)
        needed, replayed = self.needed(trace)
        started_by: dict[int, list[int]] = {}
        for value, at in self.copies.prefetches if self.copies is not None else ():
            started_by.setdefault(at, []).append(value)
        plans = []
        for which, (begin, one) in enumerate(trace.passes_at()):
            sources = {begin + read for op in replayed[which] for read in one.ops[op].reads}
            stored_as: dict[int, int] = {}
            for value in one.made:
                choice = self.policy[begin + value]
                if choice == RECOMPUTE or not one.values[value].can_keep:
                    stored_as[value] = RECOMPUTE
                elif choice > SAVE and begin + value in needed:
                    stored_as[value] = one.values[value].formats[choice - 1].storage_format
                else:
                    stored_as[value] = SAVE if begin + value in sources else UNPLANNED
            made_by = {write: (op, i) for op, made in enumerate(one.ops) for i, write in enumerate(made.writes)}
            kept = itertools.accumulate(
                sum(_kept_bytes(one.values[write], stored_as[write]) for write in op.writes if begin + write in needed)
                for op in one.ops
            )
            plans.append(
                [
                    PlannedOp(
                        op.name,
                        [stored_as[write] for write in op.writes],
                        index in replayed[which],
                        one.arguments[index],
                        [
                            [made_by[value - begin] for value in started_by.get(begin + write, ())]
                            for write in op.writes
                        ],
                        trace.modules[op.module] if op.module >= 0 else "",
                        op.writes,
                        kept_bytes + left_bytes,
                    )
                    for index, (op, kept_bytes) in enumerate(zip(one.ops, kept, strict=True))
                ]
            )
        return plans

    def needed(self, trace: Trace) -> tuple[set[int], list[set[int]]]:
        """Returns the values that backward or its replays read, and per pass the operations that are replayed."""
        needed = {use.value for use in trace.uses}
        replayed: list[set[int]] = [set() for _ in trace.passes]
        for which, (begin, one) in reversed(list(enumerate(trace.passes_at()))):
            for index in reversed(range(len(one.ops))):
                op = one.ops[index]
                if any(self.policy[begin + write] == RECOMPUTE and begin + write in needed for write in op.writes):
                    needed.update(begin + read for read in op.reads)
                    replayed[which].add(index)
        return needed, replayed

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "ChosenPolicy":
        copies = plain.get("copies")
        fields = {("policy" if name == "keeping" else name): value for name, value in plain.items()}  # its old name
        return cls(**{**fields, "copies": None if copies is None else Copies.from_dict(copies)})


def _kept_bytes(value: TracedValue, stored_as: int) -> int:
    """Returns the bytes that a value takes on its device, by how the recorder stores it."""
    if stored_as in (SAVE, UNPLANNED):
        return value.num_bytes
    costs = {cost.storage_format: cost.num_bytes for cost in value.formats}
    return 0 if stored_as in (RECOMPUTE, STORAGE_FORMATS["host"]) else costs[stored_as]


def choose(trace: Trace, budget_bytes: int, link: HostLink | None = None, host_bytes: int = 0) -> ChosenPolicy:
    """Chooses the policy that adds the least time within the budget, or the smallest one found if none fits.

    With a link, an offloaded value costs the time that the step waits for its copies, which overlap the step. The
    solver adds up costs of single values, so it runs several times. Copies cost only their start in the first run, and
    a share of their time in the others. That share is larger for values made late in forward, whose copies have less
    time to overlap.

    Args:
        trace: The recorded step.
        budget_bytes: The most bytes kept for backward at a time.
        link: The link over which values may be offloaded; None disables offloading.
        host_bytes: The most bytes of host memory for offloaded values.
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


def _copies_too_much(choice: ChosenPolicy, host_bytes: int) -> bool:
    """Returns True if the step would wait noticeably for copies, or if they exceed the host's memory."""
    assert choice.copies is not None
    return choice.copies.exposed_seconds > _NEGLIGIBLE * choice.seconds or choice.host_bytes > host_bytes


def _with_copies(trace: Trace, budget_bytes: int, link: HostLink, price: float) -> ChosenPolicy:
    """Solves with copies that cost their start and `price` times their time, and adds the predicted wait for copies."""
    clock = StepClock(trace)
    host = STORAGE_FORMATS["host"]
    sizes = [value.num_bytes for one in trace.passes for value in one.values]

    def cost_of(value: int, storage_format: int, seconds: float) -> float:
        if storage_format != host:
            return seconds
        if price == _NO_COPIES:
            return 1e6
        share = 2 * clock.made_at.get(value, 0.0) / max(clock.forward_seconds, 1e-12)
        copying = link.out_seconds(sizes[value]) + link.in_seconds(sizes[value])
        return 2 * link.copy_seconds + price * share * copying

    choice = _solved(trace, budget_bytes, cost_of)
    timeline = _C.activation_simulate(*trace.for_solver(cost_of), choice.policy, timeline=True)
    copies = copies_of(trace, choice.policy, timeline["peaks"], timeline["restored_at"], budget_bytes, link)
    priced = sum(
        cost_of(begin + i, host, 0.0)
        for begin, one in trace.passes_at()
        for i, value in enumerate(one.values)
        if timeline["restored_at"][begin + i] >= 0
        and value.formats[choice.policy[begin + i] - 1].storage_format == host
    )
    choice.seconds += 2 * link.copy_seconds * copies.num_values + copies.exposed_seconds - priced
    choice.copies = copies
    return choice


def _solved(trace: Trace, budget_bytes: int, cost_of: Callable[[int, int, float], float] | None) -> ChosenPolicy:
    solved = _C.activation_solve(*trace.for_solver(cost_of), budget_bytes)
    names = {one.name for one in dataclasses.fields(ChosenPolicy)} & solved.keys()
    return ChosenPolicy(**{name: solved[name] for name in names})
