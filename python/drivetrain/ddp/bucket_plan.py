"""What `DistributedDataParallel.bucket_plan()` returns: the buckets, their expected timeline and the measured cost."""

import statistics
from dataclasses import dataclass

from .. import _C
from ..notebook import html_table

_NAMES_SHOWN = 2
_HEADER = ("bucket", "MiB", "ready ms", "start ms", "end ms", "parameters")


@dataclass(frozen=True)
class PlannedBucket:
    """One all-reduce. Times are milliseconds from the first gradient of a backward; None: not measured."""

    names: tuple[str, ...]  # of parameters, in the expected order of their gradients
    bytes: int  # of gradients
    ready_ms: float | None  # the last gradient is there on every rank, had backward never stood still
    start_ms: float | None
    end_ms: float | None


@dataclass(frozen=True, repr=False)
class BucketPlan:
    """The buckets in the order in which they are reduced."""

    buckets: tuple[PlannedBucket, ...]
    why_not: str  # why nothing is measured; "": it is
    latency_ms: float | None  # of the smallest all-reduce that was timed
    bandwidth_gb_per_s: float | None  # of the largest: its bytes, counted once, by its time
    expected_exposed_ms: float | None  # by how much communication makes a backward longer
    measured_exposed_ms: float | None  # the same, median of up to 64 steps with these buckets; None: no step yet

    def __str__(self) -> str:
        rows = [_HEADER, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[5]]) for row in rows]
        return "\n".join([*self._head(), *lines])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(self._head(), _HEADER, self._rows(), has_text_at_the_end=True)

    def _head(self) -> list[str]:
        measured = "no step yet" if self.measured_exposed_ms is None else f"{self.measured_exposed_ms:.2f} ms"
        count = f"{len(self.buckets)} {'bucket' if len(self.buckets) == 1 else 'buckets'}"
        if self.why_not:
            return [
                f"{count}, not planned from measurement: {self.why_not}",
                f"exposed communication per step: measured {measured}",
            ]
        return [
            f"{count}, planned from measurement: latency {self.latency_ms:.3f} ms, "
            f"bandwidth {self.bandwidth_gb_per_s:.2f} GB/s",
            f"exposed communication per step: expected {self.expected_exposed_ms:.2f} ms, measured {measured}",
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for index, bucket in enumerate(self.buckets):
            times = [
                "" if time is None else f"{time:.2f}" for time in (bucket.ready_ms, bucket.start_ms, bucket.end_ms)
            ]
            names = ", ".join(bucket.names[:_NAMES_SHOWN])
            if (more := len(bucket.names) - _NAMES_SHOWN) > 0:
                names += f" and {more} more"
            rows.append((str(index), f"{bucket.bytes / 2**20:.2f}", *times, names))
        return rows


def describe_plan(reducer: _C.Reducer, why_not: str) -> BucketPlan:
    """The reducer's plan.

    Args:
        reducer: whose.
        why_not: why nothing will be measured; "": it will be.
    """
    report = reducer.plan_report()
    infos = reducer.buckets()
    measured = 1e3 * statistics.median(report.exposed) if report.exposed else None
    if not report.expected:
        return BucketPlan(
            buckets=tuple(PlannedBucket(tuple(info.names), info.bytes, None, None, None) for info in infos),
            why_not=why_not or report.why_not or "the first steps are not over",
            latency_ms=None,
            bandwidth_gb_per_s=None,
            expected_exposed_ms=None,
            measured_exposed_ms=measured,
        )
    (_, latency), (largest, seconds) = report.costs[0], report.costs[-1]
    last = report.expected[-1]
    return BucketPlan(
        buckets=tuple(
            PlannedBucket(tuple(info.names), info.bytes, 1e3 * time.ready, 1e3 * time.start, 1e3 * time.end)
            for info, time in zip(infos, report.expected, strict=True)
        ),
        why_not="",
        latency_ms=1e3 * latency,
        bandwidth_gb_per_s=largest / seconds / 1e9,
        expected_exposed_ms=1e3 * (last.end - last.ready),
        measured_exposed_ms=measured,
    )
