"""Replays the allocations of a traced step under an allocator's rules, with a run's options applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .allocator import CachingAllocator, HostAllocator
from .devices import Device
from .options import Options
from .recompute import Recomputation
from .trace import ALLOC, OP, STEP, StepTrace

# NCCL's buffers of a communicator: 8 channels, each with 4 MiB of simple-protocol buffers both ways, and LL buffers.
NCCL_BYTES = 96 << 20


class Moment(NamedTuple):
    """The memory after an operation. `op` is an index into StepTrace.ops; -1 is before the first."""

    op: int
    allocated: int
    reserved: int


class Held(NamedTuple):
    """A block that is live at the peak."""

    name: str
    category: str
    module: str
    num_bytes: int


@dataclass
class MemoryPlan:
    """The memory of a rank.

    Attributes:
        peak_allocated: The most bytes of live blocks.
        peak_reserved: The most bytes that the allocator holds.
        fixed_bytes: Bytes outside of the allocator: the context and the buffers of NCCL.
        peak_op: The operation at the peak, as an index into the trace; -1: before the first.
        at_peak: Bytes at the peak by category.
        largest: The largest blocks at the peak, in falling order.
        timeline: The memory of the last step, operation by operation.
        capacity: Bytes of the device.
        saved_bytes: The most bytes of activations that backward waits for.
    """

    peak_allocated: int = 0
    peak_reserved: int = 0
    fixed_bytes: int = 0
    peak_op: int = -1
    at_peak: dict[str, int] = field(default_factory=dict)
    largest: list[Held] = field(default_factory=list)
    timeline: list[Moment] = field(default_factory=list)
    capacity: int = 0
    saved_bytes: int = 0

    @property
    def total(self) -> int:
        """Bytes that the device must have."""
        return self.peak_reserved + self.fixed_bytes

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


def plan_memory(
    trace: StepTrace,
    device: Device,
    options: Options,
    workspaces: Mapping[int, int] | None = None,
    recomputation: Recomputation | None = None,
) -> MemoryPlan:
    """Replays the trace's steps under the allocator of the device's kind.

    `workspaces` has the most bytes that an operation holds while it runs, results included, by signature.
    """
    is_cuda = device.kind == "cuda"
    allocator = CachingAllocator(expandable=options.expandable) if is_cuda else HostAllocator()
    replay = _EventReplay(trace, allocator, options, workspaces or {}, recomputation)
    if is_cuda and device.workspace_bytes:
        replay.take("workspaces", device.workspace_bytes)
    plan = replay.run()
    plan.fixed_bytes = device.context_bytes if is_cuda else 0
    if is_cuda and options.world_size > 1:
        plan.fixed_bytes += NCCL_BYTES * (1 if options.num_hosts == 1 else 2)
    plan.capacity = device.memory_bytes
    return plan


class _EventReplay:
    """Runs a trace's events against an allocator."""

    def __init__(
        self,
        trace: StepTrace,
        allocator: CachingAllocator | HostAllocator,
        options: Options,
        workspaces: Mapping[int, int],
        recomputation: Recomputation | None,
    ) -> None:
        self._trace, self._allocator, self._options = trace, allocator, options
        self._workspaces, self._recomputation = workspaces, recomputation
        self._handles: dict[int, int] = {}
        self._by_category: dict[str, int] = {}
        self._plan = MemoryPlan()
        self._op = -1
        self._ending: list[int] = []  # gradients that the next operation frees
        self._is_last = False
        self._held_at_peak: dict[int, int] = {}

    def take(self, category: str, num_bytes: int) -> int:
        """Allocates memory that is no block of the trace, and returns its handle."""
        handle = self._allocator.malloc(num_bytes)
        self._by_category[category] = self._by_category.get(category, 0) + num_bytes
        self._note()
        return handle

    def run(self) -> MemoryPlan:
        trace, options = self._trace, self._options
        for index, block in enumerate(trace.blocks):
            is_in_buffer = block.category == "gradients" and options.keeps_gradients
            if block.op == -1 and block.category != "host" and not is_in_buffer:
                self._alloc(index)
        gradient_bytes = sum(p.num_bytes for p in trace.parameters if p.requires_grad)
        for size in buffers_of(gradient_bytes, options):
            self.take("gradients", size)
        recomputation = self._recomputation
        for event in trace.events if recomputation is None else recomputation.applied_to(trace):
            if event.kind == STEP:
                self._is_last = event.subject == trace.num_steps - 1
            elif event.kind == OP:
                self._run_op(event.subject)
            elif event.kind == ALLOC:
                self._alloc(event.subject)
            else:
                self._free(event.subject)
        plan = self._plan
        plan.largest = self._largest()
        return plan

    def _run_op(self, op: int) -> None:
        for block in self._ending:
            self._free(block)
        self._ending.clear()
        self._op = op
        workspace = self._workspaces.get(self._trace.ops[op].signature, 0)
        if workspace:
            handle = self.take("workspaces", workspace)
            self._allocator.free(handle)
            self._by_category["workspaces"] -= workspace
        self._note()

    def _size(self, index: int) -> int:
        block = self._trace.blocks[index]
        if block.category == "optimizer states" and self._options.shard is not None:
            return -(-block.num_bytes // self._options.world_size)
        return block.num_bytes

    def _alloc(self, index: int) -> None:
        block = self._trace.blocks[index]
        size = self._size(index)
        self._handles[index] = self._allocator.malloc(size)
        self._by_category[block.category] = self._by_category.get(block.category, 0) + size
        self._note()
        is_short = self._options.keeps_gradients or self._options.release
        if block.category == "gradients" and block.op != -1 and is_short:
            self._ending.append(index)

    def _free(self, index: int) -> None:
        handle = self._handles.pop(index, None)
        if handle is None:  # a gradient that was moved into the buffer
            return
        self._allocator.free(handle)
        self._by_category[self._trace.blocks[index].category] -= self._size(index)

    def _note(self) -> None:
        plan, allocated = self._plan, self._allocator.allocated
        plan.peak_reserved = max(plan.peak_reserved, self._allocator.reserved)
        if allocated > plan.peak_allocated:
            plan.peak_allocated, plan.peak_op = allocated, self._op
            plan.at_peak = {name: size for name, size in self._by_category.items() if size}
            self._held_at_peak = dict(self._handles)
        if self._is_last:
            if plan.timeline and plan.timeline[-1].op == self._op:
                before = plan.timeline.pop()
                allocated = max(allocated, before.allocated)
            plan.timeline.append(Moment(self._op, allocated, self._allocator.reserved))

    def _largest(self, count: int = 10) -> list[Held]:
        blocks, ops = self._trace.blocks, self._trace.ops
        order = sorted(self._held_at_peak, key=lambda index: -self._size(index))[:count]
        return [
            Held(
                blocks[index].name,
                blocks[index].category,
                ops[blocks[index].op].module if blocks[index].op >= 0 else "",
                self._size(index),
            )
            for index in order
        ]


def buffers_of(gradient_bytes: int, options: Options) -> list[int]:
    """Returns the sizes of the buffers that DistributedDataParallel, accumulation or `step_in_backward` keep.

    drivetrain's DistributedDataParallel has one flat buffer, which holds the gradients. torch's has buckets besides
    gradients. Sharded gradients keep this rank's part, and two buckets for what is being reduced.
    """
    bucket = min(options.bucket_bytes, gradient_bytes)
    if not gradient_bytes:
        return []
    if options.release:
        return [min(2 * bucket, gradient_bytes) if options.world_size > 1 else bucket]
    if options.shard == "gradients":
        return [-(-gradient_bytes // options.world_size), min(2 * bucket, gradient_bytes)]
    if options.keeps_gradients:
        return [gradient_bytes]
    if options.world_size > 1:  # torch's class
        count = -(-gradient_bytes // bucket)
        return [gradient_bytes // count] * count
    return []
