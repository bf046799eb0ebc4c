"""Which activations are kept: the simulation against an obvious twin, and the choice against all choices there are."""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import activation_traces as traces
import pytest
from activation_traces import Trace
from hypothesis import assume, given
from hypothesis import strategies as st

from drivetrain import _C

FORGET = -1


class Twin:
    """What a step does, said in the plainest way: what is needed is found anew after every event."""

    def __init__(self, trace: Trace, keeping: list[int]) -> None:
        self.values, self.ops, self.uses = trace
        self.keeping = keeping
        self.writer = {v: i for i, (_, _, writes) in enumerate(self.ops) for v in writes}
        self.tickets = [sum(1 for v, is_release in self.uses if is_release and v == i) for i in range(len(self.values))]
        self.replayed: set[int] = set()
        self.there: dict[int, int] = {v: self.size(v) for v in self.writer if keeping[v] != FORGET and self.is_needed(v)}
        self.seconds = 0.0
        self.forward = self.peak = sum(self.there.values())

    def size(self, v: int) -> int:
        return self.values[v][0] if self.keeping[v] <= 0 else self.values[v][4][self.keeping[v] - 1][0]

    def is_to_be_replayed(self, op: int) -> bool:
        return op not in self.replayed and any(self.keeping[u] == FORGET and self.is_needed(u) for u in self.ops[op][2])

    def is_needed(self, v: int, but_by: int = -1) -> bool:
        readers = [i for i, (_, reads, _) in enumerate(self.ops) if v in reads and i != but_by]
        return self.tickets[v] > 0 or any(self.is_to_be_replayed(op) for op in readers)

    def note(self, more: int = 0) -> None:
        self.peak = max(self.peak, sum(self.there.values()) + more)

    def clean(self) -> None:
        self.there = {v: b for v, b in self.there.items() if self.is_needed(v)}

    def is_in_full(self, v: int) -> bool:
        return v not in self.writer or (v in self.there and (self.keeping[v] <= 0 or v in self.full))

    full: frozenset[int] = frozenset()

    def make(self, v: int) -> None:
        if self.is_in_full(v):
            return
        if v in self.there:
            self.note(self.values[v][0])
            self.seconds += self.values[v][4][self.keeping[v] - 1][1]
        else:
            op = self.writer[v]
            seconds, reads, writes = self.ops[op]
            for read in reads:
                self.make(read)
            again = sum(self.values[u][0] for u in writes if self.is_in_full(u))
            saved = 0
            for u in writes:
                old = self.values[u][3]
                takes_over = old in reads and old in self.there and not self.is_needed(old, but_by=op)
                if takes_over and not self.is_in_full(u):
                    del self.there[old]
            fresh = [u for u in writes if not self.is_in_full(u)]
            self.note(sum(self.values[u][0] for u in fresh) + again - saved)
            self.seconds += seconds
            wanted = [u for u in fresh if self.is_needed(u)]
            self.replayed.add(op)
            for u in wanted:
                self.there[u] = self.values[u][0]
            self.full |= set(wanted)
            self.clean()
            return
        self.there[v] = self.values[v][0]
        self.full |= {v}

    def run(self) -> dict[str, Any]:
        for v, is_release in self.uses:
            if is_release:
                self.tickets[v] -= 1
                self.clean()
            else:
                self.make(v)
                self.note()
        return {"peak_bytes": self.peak, "seconds": pytest.approx(self.seconds), "forward_bytes": self.forward}


@st.composite
def any_trace(draw: Callable[..., Any], max_ops: int = 8) -> Trace:
    """Ops with some outputs, some of them in place; values that are saved any number of times, or released alone."""
    values: list[list[Any]] = [[draw(st.integers(0, 4)), True, True, -1, []] for _ in range(draw(st.integers(0, 2)))]
    ops = []
    overwritten: set[int] = set(range(len(values)))
    for _ in range(draw(st.integers(1, max_ops))):
        reads = draw(st.lists(st.integers(0, len(values) - 1), max_size=3)) if values else []
        writes = []
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 0]))):
            forms = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=1))
            writes.append(len(values))
            values.append([draw(st.integers(0, 9)), True, draw(st.integers(0, 9)) > 0, -1, forms])
        targets = [v for v in reads if v not in overwritten]
        if writes and targets and draw(st.booleans()):
            overwritten.add(targets[0])
            values[targets[0]][1] = not draw(st.booleans())
            values[writes[0]][3] = targets[0]
            values[writes[0]][0] = values[targets[0]][0]
        ops.append((float(draw(st.integers(0, 9))), reads, writes))
    uses: list[tuple[int, bool]] = []
    for v in draw(st.lists(st.integers(0, len(values) - 1), max_size=10)) if values else []:
        if draw(st.integers(0, 5)):
            uses += [(v, False)]
        uses += [(v, True)]
    if draw(st.booleans()):  # backwards, as autograd does
        uses.sort(key=lambda use: -use[0])
    saved = [v for v, is_release in uses if not is_release]
    for at, v in enumerate(saved):  # released a little later
        if draw(st.booleans()):
            uses.insert(min(len(uses), uses.index((v, True)) + at), uses.pop(uses.index((v, True))))
    return [tuple(value) for value in values], ops, uses  # type: ignore[misc]


def is_allowed(trace: Trace, keeping: list[int]) -> bool:
    try:
        _C.activation_simulate(*trace, keeping)
    except ValueError:
        return False
    return True


@given(any_trace(), st.data())
def test_simulation_is_its_twin(trace: Trace, data: st.DataObject) -> None:
    try:
        _C.activation_solve(*trace, 1)
    except ValueError:
        assume(False)
    keeping = [data.draw(st.integers(FORGET, len(value[4]))) for value in trace[0]]
    if not is_allowed(trace, keeping):
        keeping = [FORGET if can_forget else 0 for _, _, can_forget, _, _ in trace[0]]
    assume(is_allowed(trace, keeping))
    assert _C.activation_simulate(*trace, keeping) == Twin(trace, keeping).run()


# The best there is, against which the choice is measured: the solver never sees this many keepings.
def all_keepings(trace: Trace) -> list[tuple[list[int], dict[str, Any]]]:
    """Of what may be needed; what never is, is forgotten."""
    values, ops, _ = trace
    written = {v for _, _, writes in ops for v in writes}
    ways = [range(FORGET, len(value[4]) + 1) if v in written else [0] for v, value in enumerate(values)]
    found = []
    for keeping in itertools.product(*ways):
        try:
            found.append((list(keeping), _C.activation_simulate(*trace, list(keeping))))
        except ValueError:
            continue
    return found
