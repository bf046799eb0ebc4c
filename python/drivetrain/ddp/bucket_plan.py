"""Sizes of buckets, and the result of `DistributedDataParallel.bucket_plan()`: their timeline and measured cost."""

import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from .. import _C
from ..notebook import html_table
from .gather import is_foreign

if TYPE_CHECKING:
    from .distributed import DistributedDataParallel

_NAMES_SHOWN = 2
_HEADER = ("bucket", "MiB", "ready ms", "start ms", "end ms", "parameters")


@dataclass(frozen=True)
class PlannedBucket:
    """One all-reduce.

    Attributes:
        names: Names of the parameters, in the expected order of their gradients.
        bytes: Bytes of gradients, without padding.
        ready_ms: Time at which every rank has the last gradient, if backward never waits. This and the following times
            are milliseconds from the first gradient of a backward; None: not measured.
        start_ms: Time at which the all-reduce starts.
        end_ms: Time at which it ends.
    """

    names: tuple[str, ...]
    bytes: int
    ready_ms: float | None
    start_ms: float | None
    end_ms: float | None


@dataclass(frozen=True, repr=False)
class BucketPlan:
    """The buckets of a DistributedDataParallel.

    Attributes:
        buckets: The buckets in the order in which they are reduced.
        why_not: Reason for which nothing is measured; "": the plan is measured.
        latency_ms: Milliseconds of the smallest all-reduce that was timed; None: not measured.
        bandwidth_gb_per_s: Bytes of the largest all-reduce that was timed, counted once, by its time, in 10**9 per
            second; None: not measured.
        expected_exposed_ms: Milliseconds by which communication is expected to lengthen a backward; None: not measured.
        measured_exposed_ms: Milliseconds by which it does: the median of up to 64 steps with these buckets; None: no
            step has ended.
    """

    buckets: tuple[PlannedBucket, ...]
    why_not: str
    latency_ms: float | None
    bandwidth_gb_per_s: float | None
    expected_exposed_ms: float | None
    measured_exposed_ms: float | None

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


def bucket_caps(ddp: "DistributedDataParallel") -> list[int]:
    """Returns torch's bytes per bucket, in the expected order of buckets. The last one repeats."""
    if ddp.bucket_bytes_cap_list:
        return list(ddp.bucket_bytes_cap_list)
    if not ddp.bucket_bytes_cap_default:
        return [ddp.bucket_bytes_cap]
    return [dist._DEFAULT_FIRST_BUCKET_BYTES, ddp.bucket_bytes_cap]  # type: ignore[attr-defined]  # starts early


def first_caps_of_torch(ddp: "DistributedDataParallel") -> list[int]:
    """Returns the same for the buckets before torch rebuilds them in the order of gradients."""
    has_one_bucket = ddp.static_graph or not ddp.find_unused_parameters
    return [sys.maxsize] if has_one_bucket and not ddp.bucket_bytes_cap_list else bucket_caps(ddp)


def obstacle_to_planning(ddp: "DistributedDataParallel", parameters: list[nn.Parameter], sparse: list[bool]) -> str:
    """Returns why buckets are not planned from measurement, "" if they are. It is the same on every rank.

    Args:
        ddp: The wrapper.
        parameters: Its trained parameters.
        sparse: Per parameter, True if its gradients are sparse.
    """
    devices = {parameter.device for parameter in parameters}
    is_on_cuda = parameters[0].device.type == "cuda"
    obstacles = {
        "there is one rank only": dist.get_world_size(ddp.process_group) == 1,
        "the process group is not one of torch.distributed's": is_foreign(ddp.process_group),
        "bucket sizes were given": not ddp.bucket_bytes_cap_default,
        "find_unused_parameters=True: which gradients come differs from step to step": ddp.find_unused_parameters,
        "with mixed_precision the buckets stay as they are": ddp.mixed_precision is not None,
        "some gradients are sparse": any(sparse),
        "neither a host's nor a CUDA device's clock tells when a gradient is there": not (
            is_on_cuda or parameters[0].device.type == "cpu"
        ),
        "the parameters lie on several devices": is_on_cuda and len(devices) > 1,
        "drivetrain was built without nvcc": is_on_cuda and not _C.has_cuda(),
    }
    return next((obstacle for obstacle, stands in obstacles.items() if stands), "")


def describe_plan(reducer: _C.Reducer, why_not: str) -> BucketPlan:
    """Describes the plan of a reducer.

    Args:
        reducer: The reducer.
        why_not: Reason for which nothing will be measured; "": the plan will be measured.
    """
    report = reducer.plan_report()
    infos = reducer.buckets()
    measured = 1e3 * statistics.median(report.exposed) if report.exposed else None
    times: list[Any] = [(1e3 * time.ready, 1e3 * time.start, 1e3 * time.end) for time in report.expected]
    of_buckets = zip(infos, times or [(None, None, None)] * len(infos), strict=True)
    buckets = tuple(PlannedBucket(tuple(info.names), info.bytes, *its_times) for info, its_times in of_buckets)
    if not times:
        why_not = why_not or report.why_not or "the first steps are not over"
        return BucketPlan(buckets, why_not, None, None, None, measured)
    (_, latency), (largest, seconds) = report.costs[0], report.costs[-1]
    ready, _, end = times[-1]
    return BucketPlan(buckets, "", 1e3 * latency, largest / seconds / 1e9, end - ready, measured)
