"""Predicts the time of all-reduces by latency and bandwidth of each level of a cluster's network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from .devices import Link, read_toml

_TREE_SHARE = 0.92  # of a ring's bandwidth, which NCCL's own tuning assumes for trees (src/graph/tuning.cc)


@dataclass(frozen=True)
class Cluster:
    """A cluster on which gradients are all-reduced by rings or trees, as NCCL does.

    Attributes:
        name: Its name.
        per_host: Ranks of a host.
        link: The link between ranks of a host.
        network: The link between hosts, of one rank.
        call_s: Seconds of a collective in addition to its hops, such as a launch.
    """

    name: str
    per_host: int
    link: Link
    network: Link
    call_s: float = 0.0

    def __post_init__(self) -> None:
        if self.per_host < 1:
            raise ValueError(f"per_host is {self.per_host}, expected at least 1 rank of a host")


def cluster_of(key: str) -> Cluster:
    """Returns a cluster of `clusters.toml`.

    Raises:
        ValueError: The table has no such cluster.
    """
    table = read_toml(Path(__file__).with_name("clusters.toml"))
    if key not in table:
        raise ValueError(f"cluster is {key!r}, expected one of {', '.join(table)}")
    entry = table[key]
    return Cluster(**{**entry, "link": Link(**entry["link"]), "network": Link(**entry["network"])})


def all_reduce_seconds(num_bytes: float, ranks: int, cluster: Cluster) -> float:
    """Returns the time of an all-reduce by the faster of a ring and a tree.

    Args:
        num_bytes: Bytes of the reduced buffer.
        ranks: Number of ranks. Hosts are filled one after the other.
        cluster: The cluster.

    Raises:
        ValueError: `ranks` is below 1 or `num_bytes` is negative.
    """
    if ranks < 1 or num_bytes < 0:
        raise ValueError(f"ranks is {ranks} and num_bytes {num_bytes}, expected at least 1 rank and 0 bytes")
    if ranks == 1:
        return 0.0
    local, hosts = min(ranks, cluster.per_host), math.ceil(ranks / cluster.per_host)
    bandwidth = cluster.link.bandwidth if local > 1 else math.inf
    if hosts > 1:  # the ring or tree leaves a host by the networks of all its ranks
        bandwidth = min(bandwidth, local * cluster.network.bandwidth)
    between = 2 * hosts if hosts > 1 else 0
    hops = max(0, 2 * (local * hosts - 1) - between) * cluster.link.latency + between * cluster.network.latency
    ring = hops + 2 * (local * hosts - 1) / (local * hosts) * num_bytes / bandwidth
    # A chain within each host, and two complementary binary trees between hosts, up and down.
    depth = math.ceil(math.log2(hosts))
    hops = 2 * ((local - 1) * cluster.link.latency + depth * cluster.network.latency)
    return cluster.call_s + min(ring, hops + 2 * num_bytes / (_TREE_SHARE * bandwidth))


def ring_seconds(num_bytes: float, ranks: int, link: Link) -> float:
    """Returns the time of a ring over equal links: 2 (n - 1) hops, each with its latency and an n-th of the bytes."""
    return 2 * (ranks - 1) * (link.latency + num_bytes / ranks / link.bandwidth)
