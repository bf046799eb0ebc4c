"""Tests the cost model of all-reduces: closed forms, properties, and the benchmark's fits to measurements."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.planner.devices import Link
from suite import scaling
from suite.scaling import Cluster, cluster_of, ring_seconds

SIMPLE = Cluster("simple", 8, Link(100e9, 1e-6), Link(10e9, 5e-6), 3e-6)

clusters = st.sampled_from([cluster_of(key) for key in ("h100-ib", "a100-hdr", "hgx-roce")])
sizes = st.integers(0, 1 << 36)


def test_rings_and_trees_follow_their_closed_forms() -> None:
    size = 1e9
    hops = (62 - 8) * 1e-6 + 8 * 5e-6  # four hosts
    assert SIMPLE.seconds(size, 32) == pytest.approx(3e-6 + hops + 2 * 31 / 32 * size / 80e9)
    assert SIMPLE.seconds(size, 8) == pytest.approx(3e-6 + 14e-6 + 2 * 7 / 8 * size / 100e9)
    hops = 2 * (7 * 1e-6 + 7 * 5e-6)  # 128 hosts are 7 levels
    assert SIMPLE.seconds(1e6, 1024) == pytest.approx(3e-6 + hops + 2 * 1e6 / (0.92 * 80e9))


@settings(deadline=None)
@given(clusters, sizes, st.integers(1, 512))
def test_time_never_falls_with_more_hosts_or_bytes(cluster: Cluster, size: int, hosts: int) -> None:
    ranks = hosts * cluster.per_host
    here = cluster.seconds(size, ranks)
    assert here <= cluster.seconds(size, ranks + cluster.per_host) * (1 + 1e-12)
    assert here <= cluster.seconds(size + 4096, ranks) * (1 + 1e-12)


def test_one_rank_communicates_nothing() -> None:
    assert SIMPLE.seconds(1 << 30, 1) == ring_seconds(1 << 30, 1, SIMPLE.link) == 0


@settings(deadline=None)
@given(st.floats(1e-7, 1e-4), st.floats(1e8, 1e12))
def test_fit_finds_the_figures_that_made_the_measurements(latency: float, bandwidth: float) -> None:
    truth = Link(bandwidth, latency)
    points = [
        {"ranks": ranks, "bytes": size, "seconds": ring_seconds(size, ranks, truth)}
        for ranks in (2, 4, 8, 16)
        for size in (1 << 10, 1 << 16, 1 << 20, 1 << 26)
    ]
    fitted = scaling.fit(points)
    assert (fitted.bandwidth, fitted.latency) == (pytest.approx(bandwidth, rel=1e-4), pytest.approx(latency, rel=1e-4))
    assert max(scaling.leave_one_out(points).values()) < 1e-3


def test_fit_leaves_nothing_below_zero() -> None:
    points = [{"ranks": 2, "bytes": size, "seconds": 1e-9 * size - 1e-7} for size in (1000, 2000, 4000, 1 << 20)]
    fitted = scaling.fit(points)
    assert fitted.latency == 0
    assert fitted.bandwidth > 0


def test_published_curves_meet_the_gate_where_a_size_is_left_out() -> None:
    points = json.loads(scaling.PUBLISHED.read_text())["points"]
    engines = {point["engine"] for point in points}
    assert len(engines) == 2
    for engine in engines:
        errors = scaling.leave_one_out([point for point in points if point["engine"] == engine])
        assert max(errors.values()) <= scaling.GATE


def test_scaling_is_monotone_and_planned_buckets_are_no_worse_than_torchs() -> None:
    scales = [scaling.scale_of(*scaling.gpt(2048), cluster_of("h100-ib"), ranks) for ranks in (8, 64, 1024)]
    for less, more in pairwise(scales):
        assert less.exposed_s <= more.exposed_s
        assert less.efficiency >= more.efficiency
    for scale in scales:
        assert 0 <= scale.exposed_s <= min(scale.communication_s, scale.exposed_capped_s) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cluster_of("moon"), "cluster is 'moon', expected one of h100-ib"),
        (lambda: scaling.fit([]), "points has 0 measurements, expected at least 3"),
    ],
)
def test_wrong_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
