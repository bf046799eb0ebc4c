"""Predicts how DistributedDataParallel scales to 4,096 ranks, and fits the cost model to measured all-reduces."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from drivetrain import _C
from drivetrain.planner.devices import Link, read_toml
from drivetrain.planner.timing import all_reduce_seconds

WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GATE = 0.10  # relative error of a size that the fit has not seen
PUBLISHED = Path(__file__).parents[1] / "results" / "clusters" / "published_nccl.json"
_TORCH_CAPS = [1 << 20, 25 << 20]  # torch's first bucket and the others
_PROBES = [1 << power for power in range(6, 34)]  # bytes at which the planner learns the model's costs
_RATE = 396e12  # FLOP/s: 40 % of an H100's 989e12 in bfloat16


@dataclass(frozen=True)
class Cluster:
    """A cluster on which gradients are all-reduced; `all_reduce_seconds` explains its figures."""

    name: str
    per_host: int
    link: Link
    network: Link
    call_s: float = 0.0

    def seconds(self, num_bytes: float, ranks: int) -> float:
        """Returns the time of an all-reduce between a number of ranks."""
        return all_reduce_seconds(num_bytes, ranks, self.per_host, self.link, self.network, self.call_s)


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


def ring_seconds(num_bytes: float, ranks: int, link: Link) -> float:
    """Returns the time of a ring over equal links: 2 (n - 1) hops, each with its latency and an n-th of the bytes."""
    return 2 * (ranks - 1) * (link.latency + num_bytes / ranks / link.bandwidth)


@dataclass(frozen=True)
class Scale:
    """The prediction for a number of ranks. Times are in seconds; "capped" is with torch's bucket sizes.

    The last bucket is exposed as a whole. An efficiency is the time of a step alone by its time with other ranks.
    """

    ranks: int
    communication_s: float
    exposed_s: float
    exposed_capped_s: float
    buckets: int
    last_bytes: int
    efficiency: float
    efficiency_capped: float


def gpt(tokens: int, layers: int = 24, hidden: int = 2048, vocabulary: int = 50304) -> tuple[list[int], list[float]]:
    """Returns the sizes of a GPT's parameters, and the seconds from the begin of backward to each one's gradient."""
    block = [hidden, hidden, 3 * hidden * hidden, hidden * hidden, hidden, hidden, 4 * hidden * hidden, 4 * hidden**2]
    sizes = [vocabulary * hidden, *block * layers, hidden, hidden]
    ready, clock = [0.0] * len(sizes), 0.0
    for index in reversed(range(len(sizes))):
        clock += 4 * sizes[index] * tokens / _RATE
        ready[index] = clock
    return sizes, ready


def scale_of(sizes: Sequence[int], ready: Sequence[float], cluster: Cluster, ranks: int) -> Scale:
    """Predicts a number of ranks, with the buckets of the reducer's own planner. Gradients are float32.

    Args:
        sizes: Elements of each parameter.
        ready: Seconds from the begin of backward until each gradient is there. Forward takes half of backward.
        cluster: The cluster.
        ranks: Number of ranks.
    """

    def seconds(num_bytes: int) -> float:
        return cluster.seconds(num_bytes, ranks)

    native = [(size, 4, 0) for size in sizes]
    order = sorted(range(len(sizes)), key=lambda index: (ready[index], -index))
    costs = [(num_bytes, seconds(num_bytes)) for num_bytes in _PROBES]
    planned, _ = _C.plan_measured_buckets(native, order, list(ready), costs, True)
    capped = _C.plan_buckets(native, order, _TORCH_CAPS)
    exposed, exposed_capped = (exposed_seconds(buckets, ready, seconds) for buckets in (planned, capped))
    alone = 1.5 * max(ready)
    return Scale(
        ranks=ranks,
        communication_s=sum(seconds(num_bytes) for _, num_bytes, _ in planned),
        exposed_s=exposed,
        exposed_capped_s=exposed_capped,
        buckets=len(planned),
        last_bytes=planned[-1][1],
        efficiency=alone / (alone + exposed),
        efficiency_capped=alone / (alone + exposed_capped),
    )


def exposed_seconds(
    buckets: Sequence[tuple[int, int, list[tuple[int, int]]]], ready: Sequence[float], seconds: Callable[[int], float]
) -> float:
    """Returns the seconds by which all-reduces lengthen a backward. A bucket waits for its gradients and its turn."""
    end = 0.0
    for _, num_bytes, entries in buckets:
        end = max(end, *(ready[param] for param, _ in entries)) + seconds(num_bytes)
    return max(0.0, end - max(ready))


def fit(points: Sequence[Mapping[str, Any]]) -> Link:
    """Fits latency and bandwidth of a ring to measurements with "ranks", "bytes" and "seconds".

    It minimizes the sum of squares of relative errors. Neither figure falls below 0.

    Raises:
        ValueError: There are fewer than three points.
    """
    if len(points) < 3:
        raise ValueError(f"points has {len(points)} measurements, expected at least 3")
    rows = [(2 * (p["ranks"] - 1) / p["seconds"], p["bytes"] / p["ranks"]) for p in points]
    matrix = torch.tensor([(hops, hops * part) for hops, part in rows], dtype=torch.float64)
    wanted = torch.ones(len(points), 1, dtype=torch.float64)
    scales = matrix.norm(dim=0)  # bytes per second and hops per second differ by many powers of 10
    latency, per_byte = (torch.linalg.lstsq(matrix / scales, wanted).solution[:, 0] / scales).tolist()
    if latency < 0 or per_byte <= 0:
        latency, per_byte = 0.0, float(matrix[:, 1].sum() / matrix[:, 1].square().sum())
    return Link(1 / per_byte, latency)


def leave_one_out(points: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Returns, by size, the median error of its points, of at least 0, where the fit has not seen this size."""
    errors = {}
    for size in sorted({int(p["bytes"]) for p in points}):
        fitted = fit([p for p in points if p["bytes"] != size])
        pairs = [(ring_seconds(size, p["ranks"], fitted), p["seconds"]) for p in points if p["bytes"] == size]
        errors[size] = statistics.median(abs(predicted / measured - 1) for predicted, measured in pairs)
    return errors


def run(key: str, tokens: int, points_file: Path, json_file: Path | None) -> int:
    """Prints what the model predicts for a cluster, and how well it fits measurements.

    Args:
        key: The cluster's key in `clusters.toml`.
        tokens: Tokens of a rank in a step.
        points_file: Measurements, as `PUBLISHED`.
        json_file: File for the figures; None: none.

    Returns:
        The exit code: 2 if there is no such cluster, or the file of measurements cannot be used.
    """
    console = Console(width=None if Console().is_terminal else 140)
    try:
        cluster = cluster_of(key)
        by_engine: dict[str, list[dict[str, Any]]] = {}
        for point in json.loads(points_file.read_text())["points"]:
            by_engine.setdefault(point["engine"], []).append(point)
        fits = {engine: (fit(points), leave_one_out(points)) for engine, points in by_engine.items()}
    except (OSError, ValueError, KeyError) as error:
        console.print(f"run.py scaling: {error}", markup=False)
        return 2
    sizes, ready = gpt(tokens)
    scales = [scale_of(sizes, ready, cluster, ranks) for ranks in WORLDS]
    title = f"GPT of {sum(sizes) / 1e9:.2f} B parameters, {tokens} tokens per rank, on {cluster.name}: predicted"
    table = Table(title=title, title_justify="left")
    for column in ("ranks", "all-reduces", "exposed", "25 MiB", "buckets", "last", "efficiency", "25 MiB"):
        table.add_column(column, justify="right")
    for s in scales:
        times = [f"{1e3 * t:.1f} ms" for t in (s.communication_s, s.exposed_s, s.exposed_capped_s)]
        shares = [f"{share:.1%}" for share in (s.efficiency, s.efficiency_capped)]
        table.add_row(str(s.ranks), *times, str(s.buckets), f"{s.last_bytes / 2**20:.1f} MiB", *shares)
    console.print(table)
    for engine, (link, errors) in fits.items():
        title = f"{engine}, fitted: hop {1e6 * link.latency:.1f} us, {link.bandwidth / 1e9:.2f} GB/s"
        table = Table("bytes left out of the fit", "median error", "gate", title=title, title_justify="left")
        for size, off in errors.items():
            table.add_row(str(size), f"{off:.1%}", "met" if off <= GATE else "missed")
        console.print(table)
    if json_file is not None:
        errors_of = {engine: {"link": asdict(link), "left_out": errors} for engine, (link, errors) in fits.items()}
        figures = {"cluster": asdict(cluster), "tokens": tokens, "scales": list(map(asdict, scales)), "fits": errors_of}
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    return 0
