"""Tests the cost model of all-reduces: closed forms, properties, and fits to measurements."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.planner.devices import Link
from drivetrain.planner.network import (
    ALGORITHMS,
    Cluster,
    all_reduce_seconds,
    cluster_names,
    cluster_of,
    fit,
    leave_one_out,
    relative_error,
)
from suite import scaling

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "results" / "clusters" / "published_nccl.json"

SIMPLE = Cluster("simple", "simple", 8, Link(100e9, 1e-6, 1e-12), Link(10e9, 5e-6), ("two_level",))

clusters = st.sampled_from([cluster_of(key) for key in cluster_names()])
sizes = st.integers(0, 1 << 36)
hosts = st.integers(1, 512)
algorithms = st.sampled_from(ALGORITHMS)


def test_ring_follows_its_closed_form() -> None:
    ring = SIMPLE.but(algorithms=("ring",), call_s=3e-6)
    size, ranks = 1e9, 32  # four hosts
    hops = (62 - 8) * 1e-6 + 8 * 5e-6
    moved = 31 / 32 * size
    assert all_reduce_seconds(size, ranks, ring) == pytest.approx(3e-6 + hops + 2 * moved / 80e9 + moved * 1e-12)
    assert all_reduce_seconds(size, 8, ring) == pytest.approx(3e-6 + 14e-6 + 7 / 8 * size * (2 / 100e9 + 1e-12))


def test_tree_follows_its_closed_form() -> None:
    size = 1e9
    hops = 2 * (7 * 1e-6 + 7 * 5e-6)  # 128 hosts are 7 levels
    expected = hops + 2 * size / (0.92 * 80e9) + size * 1e-12
    assert all_reduce_seconds(size, 1024, SIMPLE, "tree") == pytest.approx(expected)


def test_each_rank_as_a_leader_carries_a_part() -> None:
    size = 1e9
    difference = all_reduce_seconds(size, 16, SIMPLE, "one_leader") - all_reduce_seconds(size, 16, SIMPLE, "two_level")
    assert difference == pytest.approx((size - size / 8) / 10e9)


@settings(deadline=None)
@given(clusters, algorithms, sizes, hosts)
def test_time_never_falls_with_more_hosts_or_bytes(cluster: Cluster, algorithm: str, size: int, count: int) -> None:
    ranks = count * cluster.per_host
    here = all_reduce_seconds(size, ranks, cluster, algorithm)
    assert here <= all_reduce_seconds(size, ranks + cluster.per_host, cluster, algorithm) * (1 + 1e-12)
    assert here <= all_reduce_seconds(size + 4096, ranks, cluster, algorithm) * (1 + 1e-12)
    assert all_reduce_seconds(size, ranks, cluster) <= all_reduce_seconds(size, ranks, cluster, cluster.algorithms[0])


@settings(deadline=None)
@given(clusters, sizes)
def test_one_rank_communicates_nothing(cluster: Cluster, size: int) -> None:
    assert all_reduce_seconds(size, 1, cluster) == 0


@settings(deadline=None)
@given(
    st.floats(1e-6, 1e-3),
    st.floats(1e-7, 1e-4),
    st.floats(1e8, 1e12),
    st.sampled_from(["ring", "direct"]),
    st.integers(1, 4),
    st.floats(1e-6, 1e-3),
)
def test_fit_finds_the_figures_that_made_the_measurements(
    call_s: float, latency: float, bandwidth: float, algorithm: str, cores: int, switch_s: float
) -> None:
    base = Cluster("x", "x", 1 << 20, Link(1.0, 1.0, 1e-10), Link(1.0, 1.0), (algorithm,), cores=cores)
    truth = base.but(call_s=call_s, switch_s=switch_s, link=Link(bandwidth, latency, 3e-10))
    points = [
        {"ranks": ranks, "bytes": size, "seconds": all_reduce_seconds(size, ranks, truth)}
        for ranks in (2, 4, 8, 16)
        for size in (1 << 10, 1 << 16, 1 << 20, 1 << 26)
    ]
    fitted = fit(points, base)
    assert all(abs(relative_error(point, fitted)) < 1e-4 for point in points)
    assert all(error < 1e-3 for what in ("ranks", "bytes") for error in leave_one_out(points, base, what).values())


def test_ranks_that_share_cores_wait_at_hops_and_take_turns_with_bytes() -> None:
    ring = SIMPLE.but(algorithms=("ring",), cores=2, switch_s=1e-3)
    size = 1e9
    with_cores = all_reduce_seconds(size, 8, ring)  # four ranks per core
    expected = 14 * (1e-6 + 3**0.5 * 1e-3) + 7 / 8 * size * (2 / 100e9 + 4 * 1e-12)
    assert with_cores == pytest.approx(expected)
    assert all_reduce_seconds(size, 2, ring) == all_reduce_seconds(size, 2, ring.but(cores=0))


def test_ranks_that_share_cores_and_memory_wait_for_each_other_s_slices() -> None:
    direct = SIMPLE.but(algorithms=("direct",), cores=2, switch_s=1e-3, slice_s=5e-3, slice_bytes=1e6)
    for size, used in ((1e9, 1.0), (1e5, 0.1)):
        alone = all_reduce_seconds(size, 8, direct.but(switch_s=0.0, slice_s=0.0))
        assert all_reduce_seconds(size, 8, direct) == pytest.approx(alone + 3 * (1e-3 + used * 5e-3))
        assert all_reduce_seconds(size, 2, direct) == all_reduce_seconds(size, 2, direct.but(cores=0))


def test_fit_finds_slices() -> None:
    base = SIMPLE.but(per_host=1 << 20, algorithms=("direct",), cores=2, link=Link(1.0, 1.0, 1e-10))
    truth = base.but(link=Link(2e10, 1e-5, 1e-10), switch_s=3e-4, slice_s=6e-3, slice_bytes=float(1 << 23))
    points = [
        {"ranks": ranks, "bytes": size, "seconds": all_reduce_seconds(size, ranks, truth)}
        for ranks in (2, 4, 8, 16)
        for size in (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
    ]
    fitted = fit(points, base)
    assert (fitted.slice_s, fitted.slice_bytes) == (pytest.approx(6e-3), pytest.approx(1 << 23))
    assert all(abs(relative_error(point, fitted)) < 1e-6 for point in points)


def test_measured_shared_memory_on_shared_cores_is_predicted_where_a_number_of_ranks_is_left_out() -> None:
    measured = json.loads(PUBLISHED.with_name("ranks_cpu.json").read_text())
    found = scaling.calibration(measured["comm_ranks"], measured["cores"], measured["add_s"])["drivetrain"]
    errors = found["left_out"]["ranks"]
    assert max(errors.pop(2), 0.1) <= 0.35  # two ranks have a core each: nothing else measures their latency
    assert max(errors.values()) <= scaling.GATE


def test_measured_gloo_on_shared_cores_is_predicted_where_a_number_of_ranks_is_left_out() -> None:
    measured = json.loads(PUBLISHED.with_name("ranks_cpu.json").read_text())
    found = scaling.calibration(measured["comm_ranks"], measured["cores"], measured["add_s"])["gloo"]
    assert max(found["left_out"]["ranks"].values()) <= scaling.GATE


def test_fit_leaves_nothing_below_zero() -> None:
    points = [{"ranks": 2, "bytes": size, "seconds": 1e-9 * size} for size in (1000, 2000, 4000, 1 << 20)]
    fitted = fit(points, SIMPLE.but(algorithms=("ring",), link=Link(1.0, 1.0)))
    assert (fitted.call_s, fitted.link.latency) == (0, pytest.approx(0, abs=1e-12))
    assert fitted.link.bandwidth == pytest.approx(1e9)


def test_published_curves_meet_the_gate_where_a_size_is_left_out() -> None:
    published = json.loads(PUBLISHED.read_text())
    fits = scaling.calibration(published["comm_ranks"], published["cores"])
    assert len(fits) == 2
    for found in fits.values():
        assert max(found["left_out"]["bytes"].values()) <= scaling.GATE


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cluster_of("moon"), "cluster is 'moon', expected one of h100-ib"),
        (lambda: all_reduce_seconds(1, 0, SIMPLE), "ranks is 0"),
        (lambda: all_reduce_seconds(-1, 2, SIMPLE), "num_bytes -1"),
        (lambda: all_reduce_seconds(1, 2, SIMPLE, "star"), "algorithm is 'star', expected one of ring"),
        (lambda: SIMPLE.but(algorithms=("star",)), "algorithms has 'star'"),
        (lambda: SIMPLE.but(per_host=0), "per_host is 0"),
        (lambda: fit([], SIMPLE), "points has 0 measurements, expected at least 3"),
        (lambda: fit([], SIMPLE.but(algorithms=("ring", "tree"))), "expected one: a fit needs to know which ran"),
        (lambda: leave_one_out([], SIMPLE, "hosts"), "what is 'hosts', expected 'ranks' or 'bytes'"),
    ],
)
def test_wrong_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_incomplete_table_is_named(tmp_path: Path) -> None:
    table = tmp_path / "clusters.toml"
    table.write_text(
        '[mine]\nname = "mine"\nper_host = 8\nalgorithms = ["ring"]\nlink = { bandwidth = 1e9, latency = 0 }'
    )
    with pytest.raises(ValueError, match="entry of cluster 'mine' lacks or has an unknown value: 'network'"):
        cluster_of("mine", table)
    assert "mine" in cluster_names(table)


def test_least_finds_the_first_value_that_holds() -> None:
    assert scaling.least(lambda value: value >= 1000, 1, 1 << 20) == pytest.approx(1000, rel=0.01)
    assert scaling.least(lambda value: True, 1, 2) == 1
    assert scaling.least(lambda value: value > math.inf, 1, 2) is None
