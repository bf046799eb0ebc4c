"""Tests the simulation of steps against its closed form and the reducer's planner, and its properties."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain import _C
from drivetrain.planner.devices import Link
from drivetrain.planner.network import Cluster, cluster_of
from drivetrain.planner.simulation import (
    Bucket,
    LinkFault,
    Stragglers,
    Workload,
    capped_plan,
    exposed_seconds,
    measured_plan,
    seconds_by_bytes,
    simulate,
    transformer,
)
from suite import scaling

H100 = cluster_of("h100-ib")
WORLDS = (8, 64, 1024)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    sizes = draw(st.lists(st.integers(1, 1 << 22), min_size=1, max_size=12))
    gaps = draw(st.lists(st.floats(0, 1e-3), min_size=len(sizes), max_size=len(sizes)))
    ready, clock = [], 0.0
    for gap in gaps:
        clock += gap
        ready.append(clock)
    return Workload("drawn", tuple(sizes), 4, tuple(reversed(ready)), draw(st.floats(0, 1e-3)), 1e-4)


@settings(deadline=None, max_examples=60)
@given(workloads(), st.booleans(), st.integers(2, 40), st.integers(1, 1 << 22))
def test_simulation_without_stragglers_is_the_closed_form(
    workload: Workload, in_background: bool, ranks: int, cap: int
) -> None:
    cluster = H100.but(in_background=in_background)
    seconds = seconds_by_bytes(ranks, cluster)
    for plan in (capped_plan(workload, [cap]), measured_plan(workload, seconds, in_background)):
        expected = exposed_seconds(plan, seconds, in_background)
        # Ranks whose own threads reduce are later at the end of backward by all that they have reduced.
        steps = simulate(workload, plan, cluster, ranks, steps=2)
        for step in steps:
            assert step.exposed_s == pytest.approx(expected, abs=1e-9)
            assert step.straggled_s == 0
            assert step.seconds == pytest.approx(workload.alone_s + expected, abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(workloads(), st.booleans())
def test_plans_end_when_the_reducers_planner_expects(workload: Workload, in_background: bool) -> None:
    """The plan comes from the native planner, whose own timeline must agree with the simulated one."""
    cluster = Cluster("line", "line", 64, Link(1e9, 0.0), Link(1e9, 0.0), ("direct",), 1e-4, 0, in_background)
    seconds = seconds_by_bytes(16, cluster)
    plan = measured_plan(workload, seconds, in_background)
    costs = [(1 << power, seconds(1 << power)) for power in range(6, 34)]
    order = sorted(range(len(workload.sizes)), key=lambda index: (workload.ready[index], -index))
    sizes = [(numel, 4, 0) for numel in workload.sizes]
    buckets, ends = _C.plan_measured_buckets(sizes, order, list(workload.ready), costs, in_background)
    assert [bucket.bytes for bucket in plan] == [num_bytes for _, num_bytes, _ in buckets]
    (step,) = simulate(workload, plan, cluster, 16)
    assert step.end_s - workload.optimizer_s - workload.forward_s == pytest.approx(
        max(ends[-1], workload.backward_s), abs=1e-9
    )


@settings(deadline=None, max_examples=40)
@given(workloads(), st.floats(0, 0.2), st.integers(0, 7), st.floats(1, 3), st.floats(0, 1), st.floats(0.01, 1))
def test_trouble_never_makes_a_step_faster(
    workload: Workload, jitter: float, rank: int, slowness: float, share: float, until: float
) -> None:
    plan = capped_plan(workload, [1 << 20])
    (calm,) = simulate(workload, plan, H100, 8)
    (slow,) = simulate(workload, plan, H100, 8, stragglers=Stragglers(slow={rank: slowness}))
    (faulty,) = simulate(workload, plan, H100, 8, faults=[LinkFault(0.0, until, share)])
    (uneven,) = simulate(workload, plan, H100, 8, stragglers=Stragglers(jitter=jitter, seed=1))
    (again,) = simulate(workload, plan, H100, 8, stragglers=Stragglers(jitter=jitter, seed=1))
    assert slow.seconds >= calm.seconds - 1e-12
    assert faulty.seconds >= calm.seconds - 1e-12
    assert uneven == again
    # A slow rank costs its own delay at most, as communication may hide behind it.
    assert slow.seconds <= calm.seconds + slow.straggled_s + 1e-9
    # A fault costs its own length at most.
    assert faulty.seconds <= calm.seconds + until + 1e-9


def test_a_down_link_delays_a_transfer_by_its_length() -> None:
    workload = Workload("one", (1 << 20,), 4, (0.0,), 1e-3)
    cluster = Cluster("line", "line", 1, Link(1e9, 0.0), Link(4e9, 0.0), ("ring",))
    plan = [Bucket(4 << 20, 0.0)]
    (calm,) = simulate(workload, plan, cluster, 2)
    transfer = calm.seconds - 1e-3
    begin = 1e-3 + transfer / 2
    (down,) = simulate(workload, plan, cluster, 2, faults=[LinkFault(begin, begin + 5e-3)])
    assert down.seconds == pytest.approx(calm.seconds + 5e-3)
    (half,) = simulate(workload, plan, cluster, 2, faults=[LinkFault(begin, begin + 5.0, 0.5)])
    assert half.seconds == pytest.approx(calm.seconds + transfer / 2)
    second = simulate(workload, plan, cluster, 2, steps=2, faults=[LinkFault(begin, begin + 5e-3)])[1]
    assert second.seconds == pytest.approx(calm.seconds)


def test_scaling_is_monotone_in_the_world_size() -> None:
    workload = scaling.workload_of(2048)
    scales = [scaling.scale_of(workload, H100, ranks) for ranks in WORLDS]
    for less, more in pairwise(scales):
        assert less.exposed_s <= more.exposed_s
        assert less.efficiency >= more.efficiency
    for scale in scales:
        assert 0 <= scale.exposed_s <= min(scale.communication_s, scale.exposed_capped_s) * (1 + 1e-9)
        assert scale.efficiency_jittered < scale.efficiency <= 1


def test_planned_buckets_are_no_worse_than_any_size() -> None:
    workload = transformer(6, 256, 1000, 512, 1e12)
    seconds = seconds_by_bytes(256, H100)
    best = exposed_seconds(measured_plan(workload, seconds), seconds)
    for power in range(16, 27):
        assert best <= exposed_seconds(capped_plan(workload, [1 << power]), seconds) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LinkFault(1.0, 1.0), "is no fault, expected 0 <= begin_s < end_s"),
        (lambda: LinkFault(0.0, float("inf")), "end_s < inf"),
        (lambda: LinkFault(0.0, 1.0, 2.0), "a share from 0 to 1"),
        (lambda: Stragglers(jitter=-1.0), "jitter is -1.0"),
        (lambda: Stragglers(slow={0: 0.0}), "expected jitter >= 0, factors > 0"),
        (lambda: simulate(transformer(1, 8, 8, 1, 1e9), [], H100, 2), "0 buckets: expected at least 1"),
        (
            lambda: simulate(transformer(1, 8, 8, 1, 1e9), [Bucket(64, 0.0)], H100, 2, stragglers=Stragglers({2: 2.0})),
            "slow has rank 2, expected ranks from 0 to 1",
        ),
    ],
)
def test_wrong_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
