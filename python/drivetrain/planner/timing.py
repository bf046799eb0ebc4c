"""Predicts the time of a step: operations by a roofline, communication by rings and trees over the network."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .devices import Device, Link
from .options import Options
from .trace import OP, OpCall, StepTrace

_TREE_SHARE = 0.92  # of a ring's bandwidth, which NCCL's own tuning assumes for trees (src/graph/tuning.cc)


@dataclass
class TimePlan:
    """The predicted time of a step, in seconds.

    Attributes:
        forward_s: Forward passes of all micro-batches.
        backward_s: Backward passes of all micro-batches, with recomputation.
        optimizer_s: The optimizer step.
        communication_s: All-reduces, whether or not backward overlaps them.
        exposed_s: The part of them that the step waits for.
        flops: Model FLOPs of a rank in a step, without recomputation.
        peak_flops: Peak FLOP/s of a device for the dtype of most FLOPs.
        samples: Samples of a rank in a step; 0: not known.
        world_size: Number of ranks.
        op_seconds: Seconds of each operation of the trace.
        correction: The factor by which measured steps differed from the prediction.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    communication_s: float
    exposed_s: float
    flops: float
    peak_flops: float
    samples: int
    world_size: int
    op_seconds: list[float] = field(repr=False)
    correction: float = 1.0

    @property
    def step_s(self) -> float:
        return self.correction * self._predicted_s

    @property
    def rest_s(self) -> float:
        """Time that measured steps take besides the phases, such as loaders; below 0 if they take less."""
        return (self.correction - 1) * self._predicted_s

    @property
    def _predicted_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s + self.exposed_s

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks per second."""
        return self.samples * self.world_size / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, from 0 to 1."""
        return self.flops / self.step_s / self.peak_flops


def plan_time(
    trace: StepTrace,
    device: Device,
    options: Options,
    samples: int = 0,
    measured: Mapping[int, float] | None = None,
    added_s: float = 0.0,
) -> TimePlan:
    """Predicts a step's time, with micro-batches of `samples`.

    Operations may be measured: seconds by signature. Recomputation under a budget adds `added_s` to a micro-batch.
    """
    seconds = [op_seconds(op, device, measured or {}) for op in trace.ops]
    step = [event.subject for event in trace.events[trace.begin_of_last_step() :] if event.kind == OP]
    spent = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    calls = dict.fromkeys(spent, 0)
    for index in step:
        spent[trace.ops[index].phase] += seconds[index]
        calls[trace.ops[index].phase] += 1
    if device.kind == "cuda":  # the host enqueues ahead, so that the slower of both counts
        spent = {phase: max(spent[phase], calls[phase] * device.launch_s) for phase in spent}
    if options.shard is not None:
        spent["optimizer"] /= options.world_size
    forward, backward = spent["forward"], spent["backward"] + added_s
    communication, exposed = _communicate(trace, step, seconds, backward, device, options)
    counted = [trace.ops[index] for index in step]
    flops = sum(op.flops for op in counted if not op.is_recomputation)
    by_dtype: dict[str, float] = {}
    for op in counted:
        by_dtype[op.dtype] = by_dtype.get(op.dtype, 0.0) + op.flops
    dtype = max(by_dtype, key=lambda name: by_dtype[name], default="float32")
    count = options.accumulate
    return TimePlan(
        forward_s=count * forward,
        backward_s=count * backward,
        optimizer_s=spent["optimizer"],
        communication_s=communication,
        exposed_s=exposed,
        flops=count * flops,
        peak_flops=device.peak.get(dtype, device.peak["float32"]),
        samples=count * samples,
        world_size=options.world_size,
        op_seconds=seconds,
    )


def op_seconds(op: OpCall, device: Device, measured: Mapping[int, float]) -> float:
    """Returns the time of one operation: measured, or the roofline of its FLOPs and bytes."""
    if op.signature in measured:
        return measured[op.signature] + device.call_s
    if op.num_bytes == 0:
        return device.call_s if device.kind == "cpu" else 0.0
    roofline = max(op.flops / device.matmul_rate(op.dtype), op.num_bytes / device.memory_bandwidth)
    return roofline + device.launch_s + device.call_s if device.kind == "cpu" else roofline


def all_reduce_seconds(
    num_bytes: float, ranks: int, per_host: int, link: Link, network: Link, call_s: float = 0.0
) -> float:
    """Returns the time of an all-reduce by the faster of a ring and a tree, as NCCL chooses.

    Hosts are filled one after the other. `network` is one rank's link to other hosts. `call_s` comes in addition to the
    hops, such as a launch.
    """
    if ranks == 1:
        return 0.0
    local, hosts = min(ranks, per_host), math.ceil(ranks / per_host)
    bandwidth = link.bandwidth if local > 1 else math.inf
    if hosts > 1:  # the ring or tree leaves a host by the networks of all its ranks
        bandwidth = min(bandwidth, local * network.bandwidth)
    between = 2 * hosts if hosts > 1 else 0
    hops = max(0, 2 * (local * hosts - 1) - between) * link.latency + between * network.latency
    ring = hops + 2 * (local * hosts - 1) / (local * hosts) * num_bytes / bandwidth
    # A chain within each host, and two complementary binary trees between hosts, up and down.
    hops = 2 * ((local - 1) * link.latency + math.ceil(math.log2(hosts)) * network.latency)
    return call_s + min(ring, hops + 2 * num_bytes / (_TREE_SHARE * bandwidth))


def _communicate(
    trace: StepTrace, step: Sequence[int], seconds: Sequence[float], backward_s: float, device: Device, options: Options
) -> tuple[float, float]:
    """Returns the seconds of all-reduces, and those that the step waits for.

    A bucket is reduced once its last gradient is there and the bucket before it is done. Gradients come in the order of
    backward, as in the reducer's plan after the first step.
    """
    if options.world_size == 1:
        return 0.0, 0.0

    def seconds_of(num_bytes: float) -> float:
        return all_reduce_seconds(num_bytes, options.world_size, options.per_host, device.link, device.network)

    clock, filled = 0.0, 0
    ready: list[tuple[float, int]] = []
    seen: set[int] = set()
    for index in step:
        if trace.ops[index].phase != "backward":
            continue
        clock += seconds[index]
        for block in trace.ops[index].writes:
            if trace.blocks[block].category == "gradients" and block not in seen:
                seen.add(block)
                filled += trace.blocks[block].num_bytes
        if filled >= options.bucket_bytes:
            ready.append((clock, filled))
            filled = 0
    if filled:
        ready.append((clock, filled))
    scale = backward_s / clock if clock else 1.0
    end = total = 0.0
    for at, num_bytes in ready:
        took = seconds_of(num_bytes)
        if options.shard is not None:
            took /= 2  # gradients are only scattered; parameters are gathered after the optimizer step
        end = max(end, at * scale) + took
        total += took
    exposed = max(0.0, end - backward_s)
    if options.shard is not None:
        gather = seconds_of(trace.parameter_bytes) / 2
        total, exposed = total + gather, exposed + gather
    return total, exposed
