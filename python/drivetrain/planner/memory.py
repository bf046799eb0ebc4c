"""Replays the allocations of a traced step under an allocator's rules, with a run's options applied."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .. import _C
from .devices import Device
from .options import Options, formatted
from .trace import ALLOC, FREE, OP, STEP, Event, StepTrace

# NCCL's buffers of a communicator: 8 channels, each with 4 MiB of simple-protocol buffers both ways, and LL buffers.
NCCL_BYTES = 96 << 20
# The constants and rules follow c10/cuda/CUDACachingAllocator.cpp of torch 2.13.
MIN_BLOCK = 512
SMALL_SIZE = 1 << 20  # the largest request that the pool of small blocks serves
SMALL_BUFFER = 2 << 20
MIN_LARGE = 10 << 20  # larger requests get a segment of their own
LARGE_BUFFER = 20 << 20
ROUND_LARGE = 2 << 20


@dataclass
class Recomputation:
    """The recomputation of a budget in backward.

    Attributes:
        dropped: Blocks that forward frees and backward makes again.
        peak_bytes: The most bytes of activations kept for backward.
        seconds: The time that this adds to a step.
    """

    dropped: frozenset[int]
    peak_bytes: int
    seconds: float

    def applied_to(self, trace: StepTrace) -> list[Event]:
        """Returns the trace's events, in which a dropped block dies after forward's last use of it and is made again
        before backward's first."""
        last_read: dict[int, int] = {}
        first_use: dict[int, int] = {}
        for position, event in enumerate(trace.events):
            if event.kind != OP:
                continue
            op = trace.ops[event.subject]
            is_backward = op.phase == "backward"
            for block in (*op.reads, *op.writes):
                if block in self.dropped:
                    if not is_backward:
                        last_read[block] = position
                    else:
                        first_use.setdefault(block, position)
        ends: dict[int, list[int]] = {}
        begins: dict[int, list[int]] = {}
        for block, position in last_read.items():
            if block in first_use:
                ends.setdefault(position, []).append(block)
                begins.setdefault(first_use[block], []).append(block)
        events: list[Event] = []
        waiting: list[int] = []
        for position, event in enumerate(trace.events):
            if event.kind == OP and waiting:
                events += [Event(FREE, block) for block in waiting]
                waiting = []
            events += [Event(ALLOC, block) for block in begins.get(position, ())]
            events.append(event)
            waiting += ends.get(position, ())
        return events


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
        plan.fixed_bytes += NCCL_BYTES * (1 if options.world_size <= options.per_host else 2)
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


def recompute_within(trace: StepTrace, seconds: Sequence[float], budget: int) -> Recomputation:
    """Solves what to recompute, given each operation's seconds, so that activations kept for backward stay in a budget.

    Raises:
        ValueError: The budget is below the smallest one for which the solver finds a plan.
    """
    ops_of_step = [event.subject for event in trace.events[trace.begin_of_last_step() :] if event.kind == OP]
    forward = [op for op in ops_of_step if trace.ops[op].phase == "forward"]
    backward = [op for op in ops_of_step if trace.ops[op].phase == "backward"]
    number: dict[int, int] = {}
    for op in forward:
        for block in trace.ops[op].writes:
            if trace.blocks[block].category == "activations":
                number.setdefault(block, len(number))
    formats: list[tuple[int, float]] = []  # none besides the unchanged one
    values = [(trace.blocks[block].num_bytes, True, True, -1, formats) for block in number]
    ops: list[tuple[float, list[int], list[int]]] = [(0.0, [], [])]
    made: set[int] = set()
    for op in forward:
        reads = [number[b] for b in trace.ops[op].reads if b in number]
        writes = [number[b] for b in trace.ops[op].writes if b in number]
        ops.append((seconds[op], reads, [w for w in writes if w not in made]))
        made.update(writes)
    last = {block: op for op in backward for block in trace.ops[op].reads if block in number}
    uses = []
    for op in backward:
        for block in trace.ops[op].reads:
            if block in number:
                uses.append((number[block], False))
                if last[block] == op:
                    uses.append((number[block], True))
    solved = _C.activation_solve(values, ops, uses, budget)
    if not solved["is_feasible"]:
        raise ValueError(
            f"budget is {formatted(budget)}, and the smallest that the step can keep for backward is "
            f"{formatted(solved['smallest_bytes'])}"
        )
    by_number = {value: block for block, value in number.items()}
    used = set(last)
    dropped = {by_number[v] for v, choice in enumerate(solved["policy"]) if choice < 0} & used
    return Recomputation(frozenset(dropped), solved["peak_bytes"], solved["seconds"])


# ---- Allocators: torch's caching one of CUDA devices, and the host's plain one.


class HostAllocator:
    """Counts live bytes, as torch's CPU allocator does.

    Attributes:
        allocated: Bytes in use.
        reserved: Equal to `allocated`, because freed memory counts as returned.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._sizes: dict[int, int] = {}
        self._next = 0

    def malloc(self, num_bytes: int) -> int:
        """Returns a handle of `num_bytes` of memory."""
        self._next += 1
        self._sizes[self._next] = num_bytes
        self.allocated = self.reserved = self.allocated + num_bytes
        return self._next

    def free(self, handle: int) -> None:
        """Frees the memory of a handle. Raises KeyError if it is not in use."""
        self.allocated = self.reserved = self.allocated - self._sizes.pop(handle)


class _SegmentBlock:
    """A part of a segment. `previous` and `following` are its neighbors in the segment."""

    __slots__ = ("address", "following", "is_free", "is_small", "previous", "size")

    def __init__(self, address: int, size: int, is_small: bool, previous: _SegmentBlock | None = None) -> None:
        self.address, self.size, self.is_small, self.previous = address, size, is_small, previous
        self.is_free = False
        self.following: _SegmentBlock | None = None


class CachingAllocator:
    """Follows the rules of torch's CUDA caching allocator with its default settings, for one stream.

    Requests are rounded up to 512 bytes. Requests up to 1 MiB share segments of 2 MiB, and those below 10 MiB share
    segments of 20 MiB. Larger ones get a segment rounded up to 2 MiB. The best fit among the free blocks is split where
    enough remains. Freed blocks merge with free neighbors and stay reserved.

    Args:
        expandable: Model `expandable_segments:True`: one segment per pool grows in steps of 2 or 20 MiB.

    Attributes:
        allocated: Bytes of blocks in use, rounded.
        requested: Bytes in use, as asked for.
        reserved: Bytes of segments.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.allocated = self.requested = self.reserved = 0
        self._expandable = expandable
        # By pool: the free blocks by size and then by address.
        self._free: dict[bool, list[tuple[int, int, _SegmentBlock]]] = {True: [], False: []}
        self._used: dict[int, tuple[_SegmentBlock, int]] = {}
        self._tails: dict[bool, _SegmentBlock | None] = {True: None, False: None}  # of the expandable segments
        self._next_address = 1 << 30

    def malloc(self, num_bytes: int) -> int:
        """Returns the address of a block for `num_bytes`."""
        if num_bytes == 0:
            return 0
        size = -(-num_bytes // MIN_BLOCK) * MIN_BLOCK
        is_small = size <= SMALL_SIZE
        pool = self._free[is_small]
        best = bisect.bisect_left(pool, (size,))
        if best < len(pool):
            block = pool.pop(best)[2]
        else:
            block = self._grow(size, is_small) if self._expandable else self._new_segment(size, is_small)
        self._split(block, size)
        block.is_free = False
        self._used[block.address] = (block, num_bytes)
        self.allocated += block.size
        self.requested += num_bytes
        return block.address

    def free(self, handle: int) -> None:
        """Frees a block. Raises KeyError if no block in use begins at this address."""
        if handle == 0:
            return
        block, num_bytes = self._used.pop(handle)
        self.allocated -= block.size
        self.requested -= num_bytes
        if block.following is not None and block.following.is_free:
            self._take(block.following)
            self._absorb(block, block.following)
        if block.previous is not None and block.previous.is_free:
            self._take(block.previous)
            self._absorb(block.previous, block)
            block = block.previous
        self._give(block)

    def blocks(self) -> list[tuple[int, int, bool]]:
        """Returns address, size and whether it is in use, of every block in order of addresses."""
        free = [(address, size, False) for pool in self._free.values() for size, address, _ in pool]
        return sorted(free + [(block.address, block.size, True) for block, _ in self._used.values()])

    def _give(self, block: _SegmentBlock) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.size, block.address, block))

    def _take(self, block: _SegmentBlock) -> None:
        pool = self._free[block.is_small]
        del pool[bisect.bisect_left(pool, (block.size, block.address))]

    def _new_segment(self, size: int, is_small: bool) -> _SegmentBlock:
        if is_small:
            num_bytes = SMALL_BUFFER
        else:
            num_bytes = LARGE_BUFFER if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        self.reserved += num_bytes
        address = self._next_address
        self._next_address += num_bytes + SMALL_BUFFER  # a gap, so that segments never touch
        return _SegmentBlock(address, num_bytes, is_small)

    def _grow(self, size: int, is_small: bool) -> _SegmentBlock:
        """Maps more of the pool's expandable segment, behind its last block, which is used if it is free."""
        step = SMALL_BUFFER if is_small else LARGE_BUFFER
        tail = self._tails[is_small]
        have = tail.size if tail is not None and tail.is_free else 0
        added = -(-(size - have) // step) * step
        self.reserved += added
        if tail is not None and have:
            self._take(tail)
            tail.size += added
            return tail
        address = (1 << 50) + (1 << 49) * is_small if tail is None else tail.address + tail.size
        block = self._tails[is_small] = _SegmentBlock(address, added, is_small, tail)
        if tail is not None:
            tail.following = block
        return block

    def _split(self, block: _SegmentBlock, size: int) -> None:
        remaining = block.size - size
        least = MIN_BLOCK if block.is_small or self._expandable else SMALL_SIZE + 1
        if remaining < least:
            return
        rest = _SegmentBlock(block.address + size, remaining, block.is_small, block)
        block.size = size
        self._join(rest, block.following)
        block.following = rest
        self._give(rest)

    def _absorb(self, block: _SegmentBlock, following: _SegmentBlock) -> None:
        """Makes one block of two neighbors."""
        block.size += following.size
        self._join(block, following.following)

    def _join(self, block: _SegmentBlock, following: _SegmentBlock | None) -> None:
        """Makes two blocks neighbors, or a block the last one of its segment."""
        block.following = following
        if following is not None:
            following.previous = block
        elif self._expandable:
            self._tails[block.is_small] = block
