"""When the copies of offloaded values run beside forward and backward, and how long the step has to wait for them."""

import dataclasses
from typing import Any, NamedTuple

from .host_link import HostLink
from .trace import FORMS, Trace

_BACKWARD_PER_FORWARD = 2.0  # of time: gradients of inputs and of weights
_MARGIN = 1.25  # by which a copy back starts earlier than its time alone asks for


class Prefetch(NamedTuple):
    """The copy back of a value starts when backward takes another one; both by their places in the trace."""

    value: int
    at: int


@dataclasses.dataclass
class Copies:
    """What is copied to the host and back under a plan.

    Attributes:
        num_bytes: one way.
        host_bytes: what the pool of host memory reserves for them at most: a power of two for each.
        exposed_seconds: what the step waits for.
        prefetches: when copies back start.
    """

    num_bytes: int
    num_values: int
    host_bytes: int
    exposed_seconds: float
    prefetches: list[Prefetch]

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Copies":
        return cls(**{**plain, "prefetches": [Prefetch(*pair) for pair in plain["prefetches"]]})


class StepClock:
    """When a step makes a value and takes it in backward, if no replay and no copy held it up."""

    def __init__(self, trace: Trace) -> None:
        self.made_at: dict[int, float] = {}
        saved_at: dict[int, list[float]] = {}
        clock = 0.0
        for begin, one in trace.passes_at():
            ends = []
            for _, _, seconds, _, writes in one.ops:
                clock += seconds or 0.0
                ends.append(clock)
                self.made_at.update((begin + write, clock) for write in writes)
            for op, value in one.saves:
                if value >= 0:
                    saved_at.setdefault(begin + value, []).append(ends[op] if op < len(ends) else clock)
        self.forward_seconds = clock
        self.used_at: list[float] = []  # per use; backward goes through forward's operations from the last one on
        now = clock
        for value, is_release in trace.uses:
            if not is_release:
                saves = saved_at.get(value, [])
                at = saves.pop() if saves else self.made_at.get(value, 0.0)
                now = max(now, clock + _BACKWARD_PER_FORWARD * (clock - at))
            self.used_at.append(now)


def copies_of(
    trace: Trace,
    keeping: list[int],
    peak_bytes: list[int],
    brought_back_at: list[int],
    budget_bytes: int,
    link: HostLink,
) -> Copies:
    """Runs the copies of what is kept on the host through the link, one after the other each way.

    A copy out starts when the value is made. One back starts as late as it may, and no earlier than the budget has room
    for it. What is still being copied out after forward counts for the budget: the step waits where that is too much.

    Args:
        peak_bytes, brought_back_at: of `_C.activation_timeline` for this keeping.
    """
    clock = StepClock(trace)
    sizes: dict[int, int] = {}
    for begin, one in trace.passes_at():
        for index, (num_bytes, _, _, _, forms) in enumerate(one.values):
            way = keeping[begin + index]
            if way > 0 and forms[way - 1][0] == FORMS["host"] and brought_back_at[begin + index] >= 0:
                sizes[begin + index] = num_bytes
    out_ends, exposed = _copies_out(clock, sizes, peak_bytes[0], budget_bytes, link)
    in_order = sorted(sizes, key=lambda value: brought_back_at[value])
    latest = _latest_starts(clock, in_order, sizes, brought_back_at, link)
    peaks = list(peak_bytes)
    prefetches: list[Prefetch] = []
    triggers = _Triggers(trace)
    free_at, delay, first = 0.0, exposed, 0
    for value in in_order:
        use = at = brought_back_at[value]
        for earlier in range(use - 1, first - 1, -1):
            if clock.used_at[at] <= latest[value] or peaks[earlier + 1] + sizes[value] > budget_bytes:
                break
            if triggers.has(earlier, value):
                at = earlier
        if at < use:
            prefetches.append(Prefetch(value, trace.uses[at][0]))
            for between in range(at + 1, use + 1):
                peaks[between] += sizes[value]
        first = at
        start = max(clock.used_at[at] + delay, free_at, out_ends[value])
        free_at = start + link.in_seconds(sizes[value])
        delay += max(0.0, free_at - (clock.used_at[use] + delay))
    host_bytes = sum(1 << (size - 1).bit_length() for size in sizes.values())
    return Copies(sum(sizes.values()), len(sizes), host_bytes, delay, prefetches)


def _copies_out(
    clock: StepClock, sizes: dict[int, int], forward_bytes: int, budget_bytes: int, link: HostLink
) -> tuple[dict[int, float], float]:
    """When each copy out ends; and how long after forward what is not out yet keeps the step above its budget."""
    ends: dict[int, float] = {}
    free_at = 0.0
    for value in sorted(sizes, key=lambda value: clock.made_at.get(value, 0.0)):
        free_at = max(free_at, clock.made_at.get(value, 0.0)) + link.out_seconds(sizes[value])
        ends[value] = free_at
    waiting = forward_bytes + sum(sizes[value] for value, end in ends.items() if end > clock.forward_seconds)
    exposed = 0.0
    for value, end in sorted(ends.items(), key=lambda item: item[1]):
        if waiting <= budget_bytes:
            break
        if end > clock.forward_seconds:
            waiting -= sizes[value]
            exposed = end - clock.forward_seconds
    return ends, exposed


def _latest_starts(
    clock: StepClock, in_order: list[int], sizes: dict[int, int], brought_back_at: list[int], link: HostLink
) -> dict[int, float]:
    """When each copy back has to start so that it and all after it end in time."""
    starts: dict[int, float] = {}
    next_start = float("inf")
    for value in reversed(in_order):
        end = min(clock.used_at[brought_back_at[value]], next_start)
        next_start = starts[value] = end - _MARGIN * link.in_seconds(sizes[value])
    return starts


class _Triggers:
    """The uses at which a tape may start a copy back: first takes of values that an operation of its pass made."""

    def __init__(self, trace: Trace) -> None:
        self._pass_of = {begin + i: which for which, (begin, one) in enumerate(trace.passes_at()) for i in one.made}
        self._value_at: dict[int, int] = {}
        seen: set[int] = set()
        for use, (value, is_release) in enumerate(trace.uses):
            if not is_release and value not in seen:
                seen.add(value)
                self._value_at[use] = value

    def has(self, use: int, value: int) -> bool:
        """Whether this use may start the copy of that value, which is of the same pass."""
        taken = self._value_at.get(use)
        return taken in self._pass_of and self._pass_of[taken] == self._pass_of.get(value)
