"""Predicts how DistributedDataParallel scales to thousands of ranks: tables of `python benchmarks/run.py scaling`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from drivetrain.planner.devices import Link
from drivetrain.planner.network import Cluster, all_reduce_seconds, cluster_of, fit, leave_one_out, relative_error
from drivetrain.planner.simulation import (
    Bucket,
    LinkFault,
    Stragglers,
    Workload,
    capped_plan,
    efficiency,
    exposed_seconds,
    measured_plan,
    seconds_by_bytes,
    simulate,
    transformer,
)

WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TORCH_CAPS = (1 << 20, 25 << 20)  # torch's first bucket and the others
GATE = 0.10  # relative error of a size that the fit has not seen
LINEAR = 0.95  # efficiency that counts as linear
SIMULATED_STEPS = 10
_RATE = 396e12  # FLOP/s: 40 % of an H100's 989e12 in bfloat16


@dataclass(frozen=True)
class Scale:
    """The prediction of the model for a number of ranks. Times are in seconds.

    Attributes:
        ranks: Number of ranks.
        communication_s: All all-reduces of a step, with the planned buckets.
        exposed_s: The part that the step waits for, with the planned buckets.
        exposed_capped_s: The part that the step waits for, with torch's bucket sizes.
        buckets: Number of the planned buckets.
        largest_bytes: Bytes of the largest of them.
        last_bytes: Bytes of the last of them, which nothing hides.
        efficiency: Weak-scaling efficiency with the planned buckets.
        efficiency_capped: Weak-scaling efficiency with torch's bucket sizes.
        efficiency_jittered: Simulated `efficiency` if every rank's time varies by 1 %.
    """

    ranks: int
    communication_s: float
    exposed_s: float
    exposed_capped_s: float
    buckets: int
    largest_bytes: int
    last_bytes: int
    efficiency: float
    efficiency_capped: float
    efficiency_jittered: float


def workload_of(tokens: int, flops_per_s: float = _RATE) -> Workload:
    """Returns the step of a GPT with 1.3 B parameters and gradients in float32."""
    return transformer(layers=24, hidden=2048, vocabulary=50304, tokens=tokens, flops_per_s=flops_per_s)


def scale_of(workload: Workload, cluster: Cluster, ranks: int) -> Scale:
    """Predicts a number of ranks."""
    seconds = seconds_by_bytes(ranks, cluster)
    plan = measured_plan(workload, seconds, cluster.in_background)
    capped = capped_plan(workload, TORCH_CAPS)
    exposed, exposed_capped = (exposed_seconds(each, seconds, cluster.in_background) for each in (plan, capped))
    jittered = _mean_step(workload, plan, cluster, ranks, Stragglers(jitter=0.01))
    return Scale(
        ranks=ranks,
        communication_s=sum(seconds(bucket.bytes) for bucket in plan),
        exposed_s=exposed,
        exposed_capped_s=exposed_capped,
        buckets=len(plan),
        largest_bytes=max(bucket.bytes for bucket in plan),
        last_bytes=plan[-1].bytes,
        efficiency=efficiency(workload.alone_s + exposed, workload),
        efficiency_capped=efficiency(workload.alone_s + exposed_capped, workload),
        efficiency_jittered=efficiency(jittered, workload),
    )


def _mean_step(
    workload: Workload,
    plan: list[Bucket],
    cluster: Cluster,
    ranks: int,
    stragglers: Stragglers | None = None,
    faults: tuple[LinkFault, ...] = (),
) -> float:
    steps = simulate(workload, plan, cluster, ranks, SIMULATED_STEPS, stragglers, faults)
    return sum(step.seconds for step in steps) / len(steps)


def events_of(workload: Workload, cluster: Cluster, ranks: int) -> dict[str, float]:
    """Returns the mean step time in seconds of simulated steps, by what happens in them."""
    plan = measured_plan(workload, seconds_by_bytes(ranks, cluster), cluster.in_background)
    ten_steps = SIMULATED_STEPS * workload.alone_s
    cases: dict[str, tuple[Stragglers | None, tuple[LinkFault, ...]]] = {
        "nothing happens": (None, ()),
        "every rank's time varies by 1 %": (Stragglers(jitter=0.01), ()),
        "every rank's time varies by 3 %": (Stragglers(jitter=0.03), ()),
        "one rank is 10 % slower": (Stragglers(slow={ranks // 2: 1.1}), ()),
        "a link carries half in all steps": (None, (LinkFault(0.0, 1e6, 0.5),)),
        "a link is down for half a step's time": (
            None,
            (LinkFault(0.3 * ten_steps, 0.3 * ten_steps + 0.5 * workload.alone_s),),
        ),
    }
    return {what: _mean_step(workload, plan, cluster, ranks, *case) for what, case in cases.items()}


# ---- Claims.


def least(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """Returns the least value between two at which something begins to hold, to 1 %; None: not even at the high one.

    `holds` must stay true once it is.
    """
    if not holds(high):
        return None
    if holds(low):
        return low
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def claims(cluster: Cluster, flops_per_s: float = _RATE) -> list[str]:
    """Returns one line for each common claim about scaling: under which conditions the model agrees."""
    return [_linear(cluster, flops_per_s), _topology(cluster, flops_per_s), _bandwidth(cluster)]


def _planned_exposed(workload: Workload, cluster: Cluster, ranks: int) -> float:
    seconds = seconds_by_bytes(ranks, cluster)
    return exposed_seconds(measured_plan(workload, seconds, cluster.in_background), seconds, cluster.in_background)


def _linear(cluster: Cluster, rate: float) -> str:
    ranks = 1024 * cluster.per_host

    def is_linear(tokens: float) -> bool:
        workload = workload_of(int(tokens), rate)
        step = workload.alone_s + _planned_exposed(workload, cluster, ranks)
        return efficiency(step, workload) >= LINEAR

    tokens = least(is_linear, 64, 1 << 22)
    if tokens is None:
        return f'"linear to 1,024 nodes": not on {cluster.name}, with up to 4 M tokens per rank.'
    workload = workload_of(4 * int(tokens), rate)
    plan = measured_plan(workload, seconds_by_bytes(ranks, cluster), cluster.in_background)

    def is_too_uneven(jitter: float) -> bool:
        step = _mean_step(workload, plan, cluster, ranks, Stragglers(jitter=jitter))
        return efficiency(step, workload) < LINEAR

    jitter = least(is_too_uneven, 1e-3, 0.5)
    return (
        f'"linear to 1,024 nodes": {LINEAR:.0%} efficiency on {ranks} equal ranks needs at least {tokens:.0f} tokens '
        f"per rank and step for 1.3 B parameters in fp32. With four times as many tokens, the times "
        f"of ranks may vary by up to {100 * (jitter or 0):.1f} % (standard deviation)."
    )


def _topology(cluster: Cluster, rate: float) -> str:
    ranks = 1024
    scattered = cluster.but(per_host=1)  # neighbors of the ring are never on one host

    def gain(tokens: float) -> float:
        workload = workload_of(int(tokens), rate)
        unaware, aware = (workload.alone_s + _planned_exposed(workload, each, ranks) for each in (scattered, cluster))
        return unaware / aware - 1

    most = least(lambda tokens: gain(tokens) < 0.4, 64, 1 << 22)
    if most is None or most == 64:
        return f'"+40 % by topology": not on {cluster.name}: rings that follow hosts gain {gain(64):.0%} at most.'
    return (
        f'"+40 % by topology": rings that follow hosts give at least 40 % more steps on {ranks} ranks than rings that '
        f"leave the host at every hop. This holds for up to {most:.0f} tokens per rank and step; at {8 * most:.0f} "
        f"tokens the gain is {gain(8 * most):.0%}. NCCL follows hosts already, so nothing is gained over it."
    )


def _bandwidth(cluster: Cluster) -> str:
    ranks, huge = 1024, 1 << 44
    most = huge / all_reduce_seconds(huge, ranks, cluster)

    def is_near(num_bytes: float) -> bool:
        return num_bytes / all_reduce_seconds(num_bytes, ranks, cluster) >= LINEAR * most

    size = least(is_near, 1 << 10, huge)
    assert size is not None
    return (
        f'"95 % of bandwidth": an all-reduce of {ranks} ranks reaches 95 % of its own limit from '
        f"{size / (1 << 20):,.0f} MiB on. At 25 MiB it reaches "
        f"{(25 << 20) / all_reduce_seconds(25 << 20, ranks, cluster) / most:.0%}."
    )


# ---- Calibration.


def calibration(points: list[dict[str, Any]], cores: int, add_s: float = 0.0) -> dict[str, Any]:
    """Fits measurements of one host each, by engine: "drivetrain" is our shared memory, every other a ring.

    Args:
        points: Measurements, as for `fit`, with an "engine" each.
        cores: Ranks that run at once; 0: all.
        add_s: Seconds per byte of additions.

    Returns:
        By engine: the fitted "call_s", "latency", "bandwidth", "switch_s", "slice_s", "slice_bytes" and "add_s".
        Further entries are the relative error of each "point", and the errors of sizes and numbers of ranks that were
        "left_out".
    """
    found = {}
    for engine in dict.fromkeys(point["engine"] for point in points):
        mine = [point for point in points if point["engine"] == engine]
        start = machine("direct" if engine == "drivetrain" else "ring", cores, add_s)
        fitted = fit(mine, start)
        found[engine] = {
            "call_s": fitted.call_s,
            "latency": fitted.link.latency,
            "bandwidth": fitted.link.bandwidth,
            "switch_s": fitted.switch_s,
            "slice_s": fitted.slice_s,
            "slice_bytes": fitted.slice_bytes,
            "add_s": fitted.link.add_s,
            "points": [{**point, "error": relative_error(point, fitted)} for point in mine],
            "left_out": {
                what: leave_one_out(mine, start, what)
                for what in ("bytes", "ranks")
                if len({point[what] for point in mine}) > 2
            },
        }
    return found


def machine(algorithm: str, cores: int, add_s: float = 0.0) -> Cluster:
    """Returns a host of CPU ranks whose link is to be fitted."""
    link = Link(1.0, 0.0, add_s)
    return cluster_of("cpu-shm").but(algorithms=(algorithm,), link=link, cores=cores, per_host=1 << 20)


# ---- The command.


def run(key: str, tokens: int, points_file: Path | None, json_file: Path | None) -> int:
    """Prints what the model predicts for a cluster, and how well it fits measurements.

    Args:
        key: The cluster's key in `clusters.toml`.
        tokens: Tokens of a rank in a step.
        points_file: JSON of `drivetrain bench comm --ranks`; None: no fit.
        json_file: File for the figures; None: none.

    Returns:
        The exit code: 2 if there is no such cluster, or the file cannot be read.
    """
    console = Console(width=None if Console().is_terminal else 140)
    try:
        cluster = cluster_of(key)
        measured = json.loads(points_file.read_text()) if points_file else None
    except (OSError, ValueError) as error:
        console.print(f"run.py scaling: {error}", markup=False)
        return 2
    workload = workload_of(tokens)
    scales = [scale_of(workload, cluster, ranks) for ranks in WORLDS]
    console.print(_scale_table(workload, cluster, scales))
    events = events_of(workload, cluster, 1024)
    console.print(_event_table(workload, events))
    lines = claims(cluster)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    fits = calibration(measured["comm_ranks"], measured["cores"], measured.get("add_s", 0.0)) if measured else {}
    for engine, found in fits.items():
        console.print(_fit_table(engine, found))
    if json_file is not None:
        facts = {"cluster": asdict(cluster), "workload": workload.name, "tokens": tokens}
        figures = {"scales": [asdict(scale) for scale in scales], "events": events, "claims": lines, "fits": fits}
        json_file.write_text(json.dumps({**facts, **figures}, indent=2) + "\n")
    return 0


def _scale_table(workload: Workload, cluster: Cluster, scales: list[Scale]) -> Table:
    table = Table(title=f"{workload.name}, on {cluster.name}: predicted", title_justify="left")
    for column in ("ranks", "all-reduces", "exposed", "with 25 MiB", "buckets", "largest", "last"):
        table.add_column(column, justify="right")
    for column in ("efficiency", "with 25 MiB", "with 1 % jitter"):
        table.add_column(column, justify="right")
    for s in scales:
        times = [f"{1e3 * t:.1f} ms" for t in (s.communication_s, s.exposed_s, s.exposed_capped_s)]
        sizes = [f"{size / 2**20:.1f} MiB" for size in (s.largest_bytes, s.last_bytes)]
        shares = [f"{share:.1%}" for share in (s.efficiency, s.efficiency_capped, s.efficiency_jittered)]
        table.add_row(str(s.ranks), *times, str(s.buckets), *sizes, *shares)
    return table


def _event_table(workload: Workload, events: dict[str, float]) -> Table:
    table = Table(title=f"Mean of {SIMULATED_STEPS} simulated steps on 1,024 ranks", title_justify="left")
    for column in ("what happens", "step", "efficiency"):
        table.add_column(column, justify="left" if column == "what happens" else "right")
    for what, seconds in events.items():
        table.add_row(what, f"{1e3 * seconds:.1f} ms", f"{efficiency(seconds, workload):.1%}")
    return table


def _fit_table(engine: str, found: dict[str, Any]) -> Table:
    head = f"call {1e6 * found['call_s']:.0f} us, hop {1e6 * found['latency']:.1f} us, "
    head += f"{found['bandwidth'] / 1e9:.2f} GB/s, core {1e9 * found['add_s']:.2f} ns/B, "
    head += f"wait for a core {1e6 * found['switch_s']:.0f} us"
    if found["slice_s"]:
        head += f", slices {1e3 * found['slice_s']:.1f} ms from {found['slice_bytes'] / 2**20:.1f} MiB"
    table = Table(title=f"{engine}, fitted: {head}", title_justify="left")
    for column in ("left out of the fit", "median error", "gate"):
        table.add_column(column, justify="left" if column == "left out of the fit" else "right")
    for what, errors in found["left_out"].items():
        for value, error in errors.items():
            name = f"{value} ranks" if what == "ranks" else f"{value} bytes"
            table.add_row(name, f"{error:.1%}", "met" if error <= GATE else "missed")
    return table
