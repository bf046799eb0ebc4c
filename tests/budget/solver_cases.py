"""Makes the traces on which the solver of activation budgets and its lower bound are tested."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import activation_traces as traces
from activation_traces import Trace
from hypothesis import strategies as st

from drivetrain import _C

RECOMPUTE = -1
FULL = 1 << 60


@st.composite
def any_trace(draw: Callable[..., Any], max_ops: int = 8) -> Trace:
    """Draws operations with several outputs, some in place, and values that are saved any number of times, or that are
    released without being taken."""
    values: list[list[Any]] = [[draw(st.integers(0, 4)), True, True, -1, []] for _ in range(draw(st.integers(0, 2)))]
    ops = []
    overwritten: set[int] = set(range(len(values)))
    for _ in range(draw(st.integers(1, max_ops))):
        reads = draw(st.lists(st.integers(0, len(values) - 1), max_size=3)) if values else []
        writes = []
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 0]))):
            formats = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=1))
            writes.append(len(values))
            values.append([draw(st.integers(0, 9)), True, draw(st.integers(0, 9)) > 0, -1, formats])
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
    if draw(st.booleans()):  # in reverse, as autograd takes them
        uses.sort(key=lambda use: -use[0])
    for at in range(len(uses)):  # some are released later
        if uses[at][1] and draw(st.booleans()):
            uses.insert(draw(st.integers(at, len(uses) - 1)), uses.pop(at))
    return [tuple(value) for value in values], ops, uses  # type: ignore[misc]


def is_allowed(trace: Trace, policy: list[int]) -> bool:
    try:
        _C.activation_simulate(*trace, policy)
    except ValueError:
        return False
    return True


def small_trace(rng: random.Random, num_ops: int, is_chain: bool, has_more: bool) -> Trace:
    """Makes a trace of operations with one output. `has_more` adds opaque operations and values that can be
    offloaded."""
    r = traces.Recorder()
    values = [r.value(0)]
    for _ in range(num_ops):
        reads = {values[-1]}
        if not is_chain:
            reads |= {rng.choice(values) for _ in range(rng.choice([0, 0, 1, 2]))}
            reads -= {values[-1]} if len(reads) > 1 and rng.random() < 0.2 else set()
        formats: list[traces.Format] = [(0, float(rng.randint(1, 6)))] if has_more and rng.random() < 0.3 else []
        v = r.value(rng.randint(1, 9), can_recompute=not (has_more and rng.random() < 0.07), formats=formats)
        values.append(v)
        r.ops.append((float(rng.randint(1, 9)), sorted(reads), [v]))
        r.nodes.append([u for u in [*sorted(reads), v] if rng.random() < 0.7])
    return r.trace()


def all_outcomes(trace: Trace) -> list[dict[str, Any]]:
    """Simulates every policy that is possible."""
    written = {v for _, _, writes in trace[1] for v in writes}
    ways = [range(RECOMPUTE, len(value[4]) + 1) if v in written else [0] for v, value in enumerate(trace[0])]
    return [_C.activation_simulate(*trace, list(k)) for k in itertools.product(*ways) if is_allowed(trace, list(k))]


def budgets_of(outcomes: list[dict[str, Any]]) -> list[int]:
    """Returns the budgets at which one more policy fits, and the budgets just below them."""
    return sorted({max(1, o["peak_bytes"] - less) for o in outcomes for less in (0, 1)})
