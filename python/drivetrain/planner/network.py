"""Predicts the time of all-reduces on clusters by latency, bandwidth and additions, and fits these to measurements.

Every algorithm is an alpha-beta-gamma model. Alpha is the latency of a hop, beta the seconds per byte of a link, and
gamma the seconds per byte of additions. `timing.py` uses the two-level one for plans.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .devices import Link, read_toml

ALGORITHMS = ("ring", "tree", "two_level", "one_leader", "direct")
_EXACT = 1e-12  # a sum of squares of relative errors that leaves nothing to describe
_TREE_SHARE = 0.92  # of a ring's bandwidth, which NCCL's own tuning assumes for trees (src/graph/tuning.cc)


@dataclass(frozen=True)
class Cluster:
    """A cluster on which gradients are all-reduced.

    Attributes:
        key: Its key in the table.
        name: Its name.
        per_host: Ranks of a host.
        link: The link between ranks of a host.
        network: The link between hosts, of one rank.
        algorithms: The algorithms among which the library chooses the fastest.
        call_s: Seconds of a collective in addition to its hops, such as a launch.
        cores: Ranks of a host that run at once; more of them take turns. 0: all do.
        switch_s: Seconds that a rank waits for its core at a hop where two ranks share it. With k ranks per core it
            waits sqrt(k - 1) times as long, which is an empirical law of measured rings and has no derivation. Ranks
            in shared memory wait k - 1 times as long, once: each of the others runs before the slowest has ended.
        in_background: True if the device goes on with backward while an all-reduce runs.
        slice_s: Seconds that each of these others runs at most, besides the switch: its time slices in one all-reduce
            through shared memory.
        slice_bytes: Bytes of an all-reduce from which on it uses these up. With fewer it runs for as much less.
    """

    key: str
    name: str
    per_host: int
    link: Link
    network: Link
    algorithms: tuple[str, ...] = ("ring", "tree")
    call_s: float = 0.0
    cores: int = 0
    switch_s: float = 0.0
    in_background: bool = True
    slice_s: float = 0.0
    slice_bytes: float = 1.0

    def __post_init__(self) -> None:
        if unknown := [name for name in self.algorithms if name not in ALGORITHMS]:
            raise ValueError(f"algorithms has {unknown[0]!r}, expected some of {', '.join(ALGORITHMS)}")
        if self.per_host < 1:
            raise ValueError(f"per_host is {self.per_host}, expected at least 1 rank of a host")

    def but(self, **changes: object) -> Cluster:
        """Returns a copy with other values."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def cluster_names(path: str | os.PathLike[str] | None = None) -> list[str]:
    """Returns the keys of the table."""
    return list(_table(path))


def cluster_of(key: str, path: str | os.PathLike[str] | None = None) -> Cluster:
    """Returns a cluster of the table.

    Args:
        key: Its key.
        path: A TOML file with more clusters, or other figures; None: the built-in table, `clusters.toml`.

    Raises:
        ValueError: The table has no such cluster, or an entry is incomplete.
        OSError: The file cannot be read.
    """
    table = _table(path)
    if key not in table:
        raise ValueError(f"cluster is {key!r}, expected one of {', '.join(table)}, or a file of clusters with it")
    entry = dict(table[key])
    try:
        link, network = Link(**entry.pop("link")), Link(**entry.pop("network"))
        return Cluster(key=key, algorithms=tuple(entry.pop("algorithms")), link=link, network=network, **entry)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the entry of cluster {key!r} lacks or has an unknown value: {error}") from error


def _table(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    table = read_toml(Path(__file__).with_name("clusters.toml"))
    if path is not None:
        table |= read_toml(Path(path))
    return table


# ---- The model.


def all_reduce_seconds(num_bytes: float, ranks: int, cluster: Cluster, algorithm: str | None = None) -> float:
    """Returns the time of an all-reduce.

    Args:
        num_bytes: Bytes of the reduced buffer.
        ranks: Number of ranks. Hosts are filled one after the other.
        cluster: The cluster.
        algorithm: One of `ALGORITHMS`; None: the fastest of the cluster's.

    Raises:
        ValueError: There is no such algorithm, `ranks` is below 1 or `num_bytes` is negative.
    """
    if ranks < 1 or num_bytes < 0:
        raise ValueError(f"ranks is {ranks} and num_bytes {num_bytes}, expected at least 1 rank and 0 bytes")
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}, expected one of {', '.join(ALGORITHMS)}")
    if ranks == 1:
        return 0.0
    return min(split_seconds(num_bytes, ranks, cluster, name)[2] for name in _chosen(cluster, algorithm))


def _chosen(cluster: Cluster, algorithm: str | None) -> tuple[str, ...]:
    return cluster.algorithms if algorithm is None else (algorithm,)


def split_seconds(num_bytes: float, ranks: int, cluster: Cluster, algorithm: str) -> tuple[float, float, float]:
    """Returns the time without bytes, the time that bytes take, and their sum."""
    local = min(ranks, cluster.per_host)
    hosts = math.ceil(ranks / cluster.per_host)
    waits = runs = 0.0  # of all-reduces through shared memory, for ranks of the same core
    if (turns := _ranks_per_core(local, cluster)) > 1:
        latency = cluster.link.latency
        if algorithm == "direct":
            waits = (turns - 1) * cluster.switch_s
            runs = (turns - 1) * min(num_bytes / cluster.slice_bytes, 1.0) * cluster.slice_s
        else:
            latency += cluster.switch_s * math.sqrt(turns - 1)
        cluster = cluster.but(link=Link(cluster.link.bandwidth, latency, turns * cluster.link.add_s))
    hops, transfer = _MODELS[algorithm](num_bytes, local, hosts, cluster)
    latency = cluster.call_s + hops + waits
    return latency, transfer + runs, latency + transfer + runs


def _ranks_per_core(local: int, cluster: Cluster) -> float:
    return max(1.0, local / cluster.cores) if cluster.cores else 1.0


def ring_seconds(num_bytes: float, ranks: int, link: Link) -> float:
    """Returns the time of a ring over equal links: 2 (n - 1) hops, each with its latency and an n-th of the bytes. Half
    of the hops add what they receive."""
    if ranks == 1:
        return 0.0
    part = num_bytes / ranks
    return 2 * (ranks - 1) * (link.latency + part / link.bandwidth) + (ranks - 1) * part * link.add_s


def _slowest(local: int, hosts: int, cluster: Cluster) -> float:
    """Returns the bandwidth of a ring or tree that passes all ranks of a host and leaves it by all their networks."""
    if hosts == 1:
        return cluster.link.bandwidth
    return min(cluster.link.bandwidth, local * cluster.network.bandwidth) if local > 1 else cluster.network.bandwidth


def _ring(num_bytes: float, local: int, hosts: int, cluster: Cluster) -> tuple[float, float]:
    """One ring over all ranks. Each host has one hop out per pass."""
    ranks = local * hosts
    between = 2 * hosts if hosts > 1 else 0
    hops = max(0, 2 * (ranks - 1) - between) * cluster.link.latency + between * cluster.network.latency
    moved = (ranks - 1) / ranks * num_bytes
    return hops, 2 * moved / _slowest(local, hosts, cluster) + moved * cluster.link.add_s


def _tree(num_bytes: float, local: int, hosts: int, cluster: Cluster) -> tuple[float, float]:
    """A chain within each host, and two complementary binary trees between hosts, up and down."""
    depth = math.ceil(math.log2(hosts))
    hops = 2 * ((local - 1) * cluster.link.latency + depth * cluster.network.latency)
    return hops, 2 * num_bytes / (_TREE_SHARE * _slowest(local, hosts, cluster)) + num_bytes * cluster.link.add_s


def _two_level(num_bytes: float, local: int, hosts: int, cluster: Cluster) -> tuple[float, float]:
    """Rings within hosts, then rings between hosts in which each rank carries its part."""
    return _levels(num_bytes, local, hosts, cluster, leaders=local)


def _one_leader(num_bytes: float, local: int, hosts: int, cluster: Cluster) -> tuple[float, float]:
    """As two_level, but one rank of each host carries everything between hosts."""
    return _levels(num_bytes, local, hosts, cluster, leaders=1)


def _levels(num_bytes: float, local: int, hosts: int, cluster: Cluster, leaders: int) -> tuple[float, float]:
    def seconds(size: float) -> float:
        within = ring_seconds(size, local, cluster.link)
        return within + ring_seconds(size / leaders, hosts, cluster.network)

    return seconds(0), seconds(num_bytes) - seconds(0)


def _direct(num_bytes: float, local: int, hosts: int, cluster: Cluster) -> tuple[float, float]:
    """Shared memory: each rank reads its part of every rank's values, and writes the sum of it to every rank. Ranks
    meet before and after. One leader of each host carries the sums between hosts."""
    meet, between = 2 * cluster.link.latency, ring_seconds(0, hosts, cluster.network)
    moved = 2 * num_bytes / cluster.link.bandwidth + (local - 1) / local * num_bytes * cluster.link.add_s
    return meet + between, moved + ring_seconds(num_bytes, hosts, cluster.network) - between


_MODELS: dict[str, Callable[[float, int, int, Cluster], tuple[float, float]]] = {
    "ring": _ring,
    "tree": _tree,
    "two_level": _two_level,
    "one_leader": _one_leader,
    "direct": _direct,
}


# ---- Calibration.


def fit(points: Sequence[Mapping[str, Any]], cluster: Cluster) -> Cluster:
    """Fits the call, the latency and the bandwidth of a host's link to measured all-reduces of one host.

    It minimizes the sum of squares of relative errors. All three are at least 0. The seconds per byte of additions are
    the cluster's, measured by themselves: all-reduces alone cannot tell them from the link's bytes. Where ranks share
    cores in some measurements, these can: the work of cores takes turns. The fit then adds the wait for a core, and to
    the additions what else a core does with each byte. For shared memory it also adds the slices that ranks of the same
    core take. It tries from which bytes on these are used up, in four steps from each size but the least to the next.

    Args:
        points: Measurements with "ranks", "bytes" and "seconds", as `drivetrain bench comm --ranks` writes them.
        cluster: The cluster, with one algorithm.

    Raises:
        ValueError: The cluster has several algorithms, or there are fewer than three points.
    """
    if len(cluster.algorithms) != 1:
        raise ValueError(f"algorithms is {cluster.algorithms}, expected one: a fit needs to know which ran")
    if len(points) < 3:
        raise ValueError(f"points has {len(points)} measurements, expected at least 3")
    gamma = cluster.link.add_s
    bare = cluster.but(call_s=0.0, switch_s=0.0, slice_s=0.0)

    def column(unit: Cluster, link: Link) -> list[float]:
        probe = unit.but(link=link)
        return [split_seconds(p["bytes"], p["ranks"], probe, probe.algorithms[0])[2] for p in points]

    seconds = torch.tensor([p["seconds"] for p in points], dtype=torch.float64)
    columns = [[1.0] * len(points), column(bare, Link(math.inf, 1.0)), column(bare, Link(1.0, 0.0))]
    shares_cores = len({_ranks_per_core(min(p["ranks"], cluster.per_host), cluster) for p in points}) > 1
    if shares_cores:
        columns += [column(bare.but(switch_s=1.0), Link(math.inf, 0.0)), column(bare, Link(math.inf, 0.0, 1.0))]
    wanted = 1 - torch.tensor(column(bare, Link(math.inf, 0.0, gamma)), dtype=torch.float64) / seconds

    def solved(slice_bytes: float) -> tuple[float, list[float], float]:
        unit = bare.but(slice_s=1.0, slice_bytes=slice_bytes)
        all_columns = [*columns, column(unit, Link(math.inf, 0.0))] if slice_bytes else columns
        matrix = torch.tensor(all_columns, dtype=torch.float64).T / seconds[:, None]
        return *_non_negative(matrix, wanted), slice_bytes

    best = solved(0.0)
    # Slices that are used up from the first size on could not be distinguished from switches.
    sizes = sorted({float(p["bytes"]) for p in points})[1:]
    if shares_cores and cluster.algorithms == ("direct",) and best[0] > _EXACT:
        for a, b in itertools.pairwise(sizes):
            best = min(best, *(solved(a ** (1 - part / 4) * b ** (part / 4)) for part in range(1, 5)))
    _, found, slice_bytes = best
    call_s, latency, per_byte, switch_s, more_s, slice_s = [*found, 0.0, 0.0, 0.0][:6]
    bandwidth = 1 / per_byte if per_byte > 0 else math.inf
    link = Link(bandwidth, latency, gamma + more_s)
    return cluster.but(call_s=call_s, switch_s=switch_s, link=link, slice_s=slice_s, slice_bytes=slice_bytes or 1.0)


def _non_negative(matrix: torch.Tensor, wanted: torch.Tensor) -> tuple[float, list[float]]:
    """Solves least squares for unknowns of at least 0: the best of the solutions with some of them at 0.

    Returns:
        The sum of squares that is left, and the unknowns.
    """
    count = matrix.shape[1]
    best, least = [0.0] * count, math.inf
    for size in range(1, count + 1):
        kept = list(itertools.combinations(range(count), size))
        parts = matrix[:, torch.tensor(kept)].transpose(0, 1)  # [combinations, points, size]
        targets = wanted[None, :, None].expand(len(kept), -1, 1)
        solutions = torch.linalg.lstsq(parts, targets, driver="gelsd").solution
        errors = (parts @ solutions - targets).square().sum((1, 2))
        errors[(solutions < 0).any(1).squeeze(1)] = math.inf
        index = int(errors.argmin())
        if float(errors[index]) < least:
            best, least = [0.0] * count, float(errors[index])
            for place, value in zip(kept[index], solutions[index, :, 0].tolist(), strict=True):
                best[place] = value
    return least, best


def leave_one_out(points: Sequence[Mapping[str, Any]], cluster: Cluster, what: str) -> dict[int, float]:
    """Fits without all measurements of one value, predicts them, and repeats this for every value.

    Args:
        points: Measurements, as for `fit`.
        cluster: The cluster, as for `fit`.
        what: "ranks" or "bytes".

    Returns:
        By the value that was left out, the median of the relative errors of its predictions, at least 0.

    Raises:
        ValueError: `what` is something else.
    """
    if what not in ("ranks", "bytes"):
        raise ValueError(f"what is {what!r}, expected 'ranks' or 'bytes'")
    errors = {}
    for value in sorted({int(p[what]) for p in points}):
        fitted = fit([p for p in points if p[what] != value], cluster)
        seen = sorted(abs(relative_error(p, fitted)) for p in points if p[what] == value)
        errors[value] = (seen[(len(seen) - 1) // 2] + seen[len(seen) // 2]) / 2
    return errors


def relative_error(point: Mapping[str, Any], cluster: Cluster) -> float:
    """Returns the predicted time of a measurement divided by the measured one, less 1."""
    measured = float(point["seconds"])
    return all_reduce_seconds(point["bytes"], point["ranks"], cluster) / measured - 1
