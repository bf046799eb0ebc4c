"""Tests the solver of activation budgets against a plain reference, every possible policy, and a lower bound."""

import math
import random
import re
import statistics
from typing import Any

import activation_traces as traces
import pytest
from activation_traces import Trace
from hypothesis import assume, given
from hypothesis import strategies as st
from solver_cases import FULL, RECOMPUTE, all_outcomes, any_trace, is_allowed, small_trace

from bound import bound
from drivetrain import _C


class Reference:
    """Simulates a step in the plainest way: it recomputes after every event which values are needed."""

    def __init__(self, trace: Trace, policy: list[int]) -> None:
        self.values, self.ops, self.uses = trace
        self.policy = policy
        self.writer = {v: i for i, (_, _, writes) in enumerate(self.ops) for v in writes}
        self.tickets = [sum(1 for v, is_release in self.uses if is_release and v == i) for i in range(len(self.values))]
        self.replayed: set[int] = set()
        self.there: dict[int, int] = {
            v: self.size(v) for v in self.writer if policy[v] != RECOMPUTE and self.is_needed(v)
        }
        self.seconds = 0.0
        self.forward = self.peak = sum(self.there.values())

    def size(self, v: int) -> int:
        return self.values[v][0] if self.policy[v] <= 0 else self.values[v][4][self.policy[v] - 1][0]

    def is_to_be_replayed(self, op: int) -> bool:
        return op not in self.replayed and any(
            self.policy[u] == RECOMPUTE and self.is_needed(u) for u in self.ops[op][2]
        )

    def is_needed(self, v: int, but_by: int = -1) -> bool:
        readers = [i for i, (_, reads, _) in enumerate(self.ops) if v in reads and i != but_by]
        return self.tickets[v] > 0 or any(self.is_to_be_replayed(op) for op in readers)

    def note(self, more: int = 0) -> None:
        self.peak = max(self.peak, sum(self.there.values()) + more)

    def clean(self) -> None:
        self.there = {v: b for v, b in self.there.items() if self.is_needed(v)}

    def is_in_full(self, v: int) -> bool:
        return v not in self.writer or (v in self.there and (self.policy[v] <= 0 or v in self.full))

    full: frozenset[int] = frozenset()

    def make(self, v: int) -> None:
        if self.is_in_full(v):
            return
        if v in self.there:
            self.note(self.values[v][0])
            self.seconds += self.values[v][4][self.policy[v] - 1][1]
        else:
            op = self.writer[v]
            seconds, reads, writes = self.ops[op]
            for read in reads:
                self.make(read)
            fresh = [u for u in writes if not self.is_in_full(u)]
            for u in fresh:
                old = self.values[u][3]
                if old in reads and old in self.there and not self.is_needed(old, but_by=op):
                    del self.there[old]
            self.note(sum(self.values[u][0] for u in writes))
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


@given(any_trace(), st.data())
def test_simulation_matches_the_reference(trace: Trace, data: st.DataObject) -> None:
    try:
        _C.activation_solve(*trace, 1)
    except ValueError:
        assume(False)
    policy = [data.draw(st.integers(RECOMPUTE, len(value[4]))) for value in trace[0]]
    if not is_allowed(trace, policy):
        policy = [RECOMPUTE if can_recompute else 0 for _, _, can_recompute, _, _ in trace[0]]
    assume(is_allowed(trace, policy))
    assert _C.activation_simulate(*trace, policy) == Reference(trace, policy).run()


@pytest.mark.parametrize(
    ("is_chain", "has_more", "num_traces", "infeasible", "not_the_best", "worst"),
    [
        pytest.param(True, False, 30, 0, 0, 1.0, id="chain"),
        pytest.param(False, False, 40, 0.03, 0.01, 1.3, id="graph"),
        pytest.param(True, True, 15, 0.03, 0.05, 1.5, id="chain-with-forms"),
        pytest.param(False, True, 20, 0.06, 0.12, 3.0, id="graph-with-forms"),
    ],
)
def test_against_every_policy(
    is_chain: bool, has_more: bool, num_traces: int, infeasible: float, not_the_best: float, worst: float
) -> None:
    """Limits the shares of budgets at which the solver misses every plan, and at which it misses the best one."""
    rng = random.Random(1)
    ratios = []
    for _ in range(num_traces):
        trace = small_trace(rng, 8, is_chain, has_more)
        outcomes = all_outcomes(trace)
        smallest = min(o["peak_bytes"] for o in outcomes)
        most = _C.activation_solve(*trace, FULL)["peak_bytes"]
        last = math.inf
        for budget in sorted({max(1, smallest + (most - smallest) * i // 5) for i in range(-1, 6)}):
            found = _C.activation_solve(*trace, budget)
            best = min((o["seconds"] for o in outcomes if o["peak_bytes"] <= budget), default=math.inf)
            assert found["smallest_bytes"] >= smallest
            assert found["bound_seconds"] <= best
            assert found["is_feasible"] == (found["peak_bytes"] <= budget)
            assert found["is_feasible"] == (found["smallest_bytes"] <= budget)
            assert _C.activation_simulate(*trace, found["policy"]).items() <= found.items()
            if not found["is_feasible"]:
                ratios += [math.inf] if best < math.inf else []
                continue
            assert best <= found["seconds"] <= last
            last = found["seconds"]
            ratios.append(found["seconds"] / best if best > 0 else 1.0)
    found_ratios = [ratio for ratio in ratios if ratio < math.inf]
    assert statistics.median(ratios) == 1
    assert ratios.count(math.inf) <= infeasible * len(ratios)
    assert sum(ratio > 1 for ratio in found_ratios) <= not_the_best * len(ratios)
    assert max(found_ratios) <= worst


MODELS = {
    "gpt": lambda: traces.gpt(12),
    "gpt-measured": lambda: traces.gpt(12, noise=0.1),
    "gpt-with-head": lambda: traces.gpt(24, words=50304),
    "gpt-with-casts-and-dropout": lambda: traces.gpt(24, fat=True),
    "encoder-decoder": lambda: traces.encoder_decoder(6),
    "resnet50": traces.resnet,
    "u-net": traces.u_net,
    "unstructured": lambda: traces.unstructured(500),
}
INFEASIBLE = {("u-net", 20)}
# The least share of the budget that a plan uses, and the most that it adds relative to the lower bound.
CLOSE, CLOSE_WITHOUT_BLOCKS = (0.95, 1.2), (0.9, 1.6)


@pytest.mark.parametrize("model", MODELS)
def test_models_come_close_to_bound_and_budget(model: str) -> None:
    trace = MODELS[model]()
    full = _C.activation_solve(*trace, FULL)
    assert full["seconds"] == 0
    least_share, most = CLOSE_WITHOUT_BLOCKS if model == "unstructured" else CLOSE
    last = math.inf
    for percent in range(20, 100, 10):
        budget = full["peak_bytes"] * percent // 100
        found = _C.activation_solve(*trace, budget)
        assert _C.activation_simulate(*trace, found["policy"]).items() <= found.items()
        if (model, percent) in INFEASIBLE:
            assert not found["is_feasible"]
            continue
        assert least_share * budget <= found["peak_bytes"] <= budget, percent
        assert found["bound_seconds"] <= found["seconds"]
        enough = found["seconds"] / most
        assert bound(trace, budget, enough_seconds=enough) >= (1 - 1e-6) * enough, percent
        assert found["seconds"] <= last
        last = found["seconds"]


@pytest.mark.parametrize("fat", [False, True])
def test_never_slower_than_whole_layers(fat: bool) -> None:
    """Compares with full checkpointing, and with checkpointing all layers but every n-th."""
    layers = 12
    trace = values, ops, uses = traces.gpt(layers, fat=fat)
    per_layer = (len(ops) - 1) // layers
    saved = {v for v, is_release in uses if is_release}
    for every in (1, 2, 3, 4, 6, layers + 1):
        policy = [RECOMPUTE] * len(values)
        for i, (_, _, writes) in enumerate(ops):
            is_whole = (i - 1) // per_layer % every == every - 1
            for v in writes:
                if (i - 1) % per_layer == per_layer - 1 or (is_whole and v in saved) or i == 0:
                    policy[v] = 0
        theirs = _C.activation_simulate(*trace, policy)
        ours = _C.activation_solve(*trace, theirs["peak_bytes"])
        assert ours["is_feasible"]
        assert ours["seconds"] <= theirs["seconds"], every


def test_chain_of_a_hundred_thousand_ops() -> None:
    count = 100_000
    values: list[traces.Value] = [(1, True, True, -1, [])] * count
    ops = [(1.0, [i - 1] if i else [], [i]) for i in range(count)]
    found = _C.activation_simulate(values, ops, [(count - 1, False), (count - 1, True)], [RECOMPUTE] * count)
    assert found == {"peak_bytes": 2, "seconds": count, "forward_bytes": 0}


def test_forms_are_used_where_they_cost_less_than_replays() -> None:
    values: list[traces.Value] = [(8, True, True, -1, [(1, 0.5)]) for _ in range(6)]
    ops = [(1.0, [i - 1] if i else [], [i]) for i in range(6)]
    uses = [(v, is_release) for v in reversed(range(6)) for is_release in (False, True)]
    found = _C.activation_solve(values, ops, uses, 20)
    assert found["is_feasible"]
    assert 1 in found["policy"]
    assert found["seconds"] < _C.activation_solve([(8, True, True, -1, [])] * 6, ops, uses, 20)["seconds"]


def test_what_can_be_neither_is_never_asked_for() -> None:
    """At any budget, overwritten values are recomputed, and values that cannot be recomputed are saved."""
    r = traces.Recorder()
    x = r.op(0, [r.value(0)], [5], "w0", opaque=True)
    y = r.op(0, [x], [7])
    z = r.in_place(0, y, [], "r0")
    r.op(0, [z], [7], "w0")
    trace = r.trace()
    for budget in range(1, 40):
        found = _C.activation_solve(*trace, budget)
        assert found["policy"][x] == 0
        assert found["policy"][y] == RECOMPUTE
        assert _C.activation_simulate(*trace, found["policy"]).items() <= found.items()


ONE: traces.Value = (4, True, True, -1, [])


@pytest.mark.parametrize(
    ("values", "ops", "uses", "budget", "message"),
    [
        ([ONE], [(1.0, [1], [0])], [], 9, "op 0 reads value 1: expected one of the 1 values"),
        ([ONE], [(1.0, [], [-2])], [], 9, "op 0 writes value -2: expected one of the 1 values"),
        ([ONE], [(1.0, [], [0]), (1.0, [], [0])], [], 9, "value 0 is written by op 0 and by op 1"),
        ([ONE, ONE], [(1.0, [1], [0]), (1.0, [], [1])], [], 9, "op 0 reads value 1, which op 1 writes"),
        ([ONE], [(1.0, [0], [0])], [], 9, "op 0 reads value 0, which op 0 writes"),
        ([ONE], [(-1.0, [], [0])], [], 9, "op 0 takes -1 seconds"),
        ([ONE], [(math.nan, [], [0])], [], 9, "op 0 takes nan seconds"),
        ([(-4, True, True, -1, [])], [], [], 9, "value 0 has -4 bytes"),
        ([(4, True, True, 0, [])], [], [], 9, "value 0 replaces value 0: expected another of the 1 values"),
        ([(4, True, True, -1, [(-1, 0.0)])], [], [], 9, "storage format 0 of value 0 has -1 bytes"),
        ([(4, True, True, -1, [(1, -2.0)])], [], [], 9, "storage format 0 of value 0 takes -2 seconds"),
        ([ONE], [(1.0, [], [0])], [(0, False)], 9, "use 0 takes value 0, which is not released after it"),
        ([ONE], [(1.0, [], [0])], [(3, True)], 9, "use 0 is of value 3: expected one of the 1 values"),
        ([ONE], [(1.0, [], [0])], [], 0, "budget_bytes is 0: expected more than 0"),
        (
            [(4, False, False, -1, [])],
            [(1.0, [], [0])],
            [(0, False), (0, True)],
            9,
            "value 0 is taken in backward, but",
        ),
    ],
)
def test_wrong_traces_are_refused(
    values: list[traces.Value], ops: list[traces.Op], uses: list[traces.Use], budget: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _C.activation_solve(values, ops, uses, budget)


@pytest.mark.parametrize(
    ("value", "policy", "message"),
    [
        (ONE, [], "policy has 0 entries: expected one for each of the 1 values"),
        (ONE, [1], "policy of value 0 is 1: expected -1 (recompute) to 0"),
        (ONE, [300], "policy has 300"),
        (
            (4, True, False, -1, []),
            [RECOMPUTE],
            "policy recomputes value 0, which cannot be recomputed: expected it to be saved",
        ),
        ((4, False, True, -1, []), [0], "policy saves value 0, whose memory is overwritten: expected -1 (recompute)"),
    ],
)
def test_wrong_policies_are_refused(value: traces.Value, policy: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        _C.activation_simulate([value], [(1.0, [], [0])], [(0, False), (0, True)], policy)
