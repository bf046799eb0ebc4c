"""Tests the lower bound that judges the solver of activation budgets: benchmarks/bound."""

import math
import random
import statistics

import pytest
from activation_traces import Trace
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from solver_cases import all_outcomes, any_trace, budgets_of, small_trace

from bound import bound
from drivetrain import _C
from effort import rounds


@settings(max_examples=rounds(50, whole=200), deadline=None)
@given(
    any_trace(max_ops=5),
    st.sampled_from([1, 1000]),
    st.sampled_from([2, 4, 10_000]),
    st.sampled_from([0.0, 0.5, 2.0]),
)
def test_bound_in_backward_is_below_every_policy(trace: Trace, unit: int, num_states: int, price: float) -> None:
    values, ops, uses = trace
    written = {v for _, _, writes in ops for v in writes}
    assume(math.prod(2 + len(values[v][4]) for v in written) <= 1000)
    values = [
        (unit * num_bytes, can_save, can_recompute, replaces, [(unit * b, s) for b, s in formats])
        for num_bytes, can_save, can_recompute, replaces, formats in values
    ]
    trace = values, ops, uses
    try:
        _C.activation_solve(*trace, 1)
    except ValueError:
        assume(False)
    outcomes = all_outcomes(trace)
    for budget in budgets_of(outcomes):
        best = min((o["seconds"] for o in outcomes if o["peak_bytes"] <= budget), default=math.inf)
        assert bound(trace, budget, price=price, num_states=num_states) <= best
        assert bound(trace, budget, enough_seconds=1.0, price=price, num_states=num_states) <= min(1.0, best)
        assert _C.activation_solve(*trace, budget)["bound_seconds"] <= best


@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "graph"])
def test_bound_in_backward_is_mostly_the_best_there_is(is_chain: bool) -> None:
    rng = random.Random(2)
    ratios = []
    for _ in range(30):
        trace = small_trace(rng, 8, is_chain, False)
        outcomes = all_outcomes(trace)
        for budget in budgets_of(outcomes):
            best = min((o["seconds"] for o in outcomes if o["peak_bytes"] <= budget), default=math.inf)
            if 0 < best < math.inf:
                ratios.append(bound(trace, budget, price=1.0, num_states=10_000) / best)
    assert max(ratios) <= 1
    assert statistics.median(ratios) > 1 - 1e-6
    assert statistics.mean(ratios) > 0.9
