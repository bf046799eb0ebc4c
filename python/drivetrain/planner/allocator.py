"""Simulates memory allocators: torch's caching allocator of CUDA devices, and the host's plain one."""

from __future__ import annotations

import bisect
from typing import Protocol

# The constants and rules follow c10/cuda/CUDACachingAllocator.cpp of torch 2.13.
MIN_BLOCK = 512
SMALL_SIZE = 1 << 20  # the largest request that the pool of small blocks serves
SMALL_BUFFER = 2 << 20
MIN_LARGE = 10 << 20  # larger requests get a segment of their own
LARGE_BUFFER = 20 << 20
ROUND_LARGE = 2 << 20


class OutOfMemory(MemoryError):
    """A simulated allocation does not fit into the device, even after all cached segments were released."""


class Allocator(Protocol):
    """Gives addresses for sizes, and counts bytes."""

    @property
    def allocated(self) -> int:
        """Bytes in use."""

    @property
    def reserved(self) -> int:
        """Bytes that the allocator holds."""

    def malloc(self, num_bytes: int) -> int:
        """Returns a handle of new memory."""

    def free(self, handle: int) -> None:
        """Frees the memory of a handle."""


class HostAllocator:
    """Counts live bytes, as torch's CPU allocator does.

    Attributes:
        allocated: Bytes in use.
        reserved: Equal to `allocated`, because freed memory counts as returned.
    """

    def __init__(self) -> None:
        self.allocated = 0
        self._sizes: dict[int, int] = {}
        self._next = 0

    @property
    def reserved(self) -> int:
        return self.allocated

    def malloc(self, num_bytes: int) -> int:
        """Returns a handle of `num_bytes` of memory."""
        self._next += 1
        self._sizes[self._next] = num_bytes
        self.allocated += num_bytes
        return self._next

    def free(self, handle: int) -> None:
        """Frees the memory of a handle. Raises KeyError if it is not in use."""
        self.allocated -= self._sizes.pop(handle)


class _SegmentBlock:
    """A part of a segment. `previous` and `following` are its neighbors in the segment."""

    __slots__ = ("address", "following", "is_free", "is_small", "previous", "segment", "size")

    def __init__(self, address: int, size: int, segment: int, is_small: bool) -> None:
        self.address, self.size, self.segment, self.is_small = address, size, segment, is_small
        self.is_free = False
        self.previous: _SegmentBlock | None = None
        self.following: _SegmentBlock | None = None


class _FreeBlocks:
    """The free blocks of a pool, by size and then by address."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._blocks: dict[tuple[int, int], _SegmentBlock] = {}

    def add(self, block: _SegmentBlock) -> None:
        key = (block.size, block.address)
        bisect.insort(self._keys, key)
        self._blocks[key] = block

    def remove(self, block: _SegmentBlock) -> None:
        key = (block.size, block.address)
        del self._keys[bisect.bisect_left(self._keys, key)]
        del self._blocks[key]

    def best_fit(self, size: int) -> _SegmentBlock | None:
        """Returns the smallest block of at least `size` bytes, at the lowest address."""
        index = bisect.bisect_left(self._keys, (size, -1))
        return self._blocks[self._keys[index]] if index < len(self._keys) else None

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(list(self._blocks.values()))


class CachingAllocator:
    """Follows the rules of torch's CUDA caching allocator with its default settings, for one stream.

    Requests are rounded up to 512 bytes. Requests up to 1 MiB share segments of 2 MiB, and those below 10 MiB share
    segments of 20 MiB. Larger ones get a segment rounded up to 2 MiB. The best fit among the free blocks is split where
    enough remains. Freed blocks merge with free neighbors and stay reserved. If a new segment exceeds the capacity, all
    segments without blocks in use are released first.

    Args:
        capacity: Bytes of the device for segments; None: no limit.
        expandable: Model `expandable_segments:True`: one segment per pool grows in steps of 2 or 20 MiB.

    Attributes:
        allocated: Bytes of blocks in use, rounded.
        requested: Bytes in use, as asked for.
        reserved: Bytes of segments.
        num_releases: Number of times that cached segments were released to make room.
    """

    def __init__(self, capacity: int | None = None, *, expandable: bool = False) -> None:
        self.allocated = self.requested = self.reserved = self.num_releases = 0
        self._capacity = capacity
        self._expandable = expandable
        self._free = {True: _FreeBlocks(), False: _FreeBlocks()}
        self._used: dict[int, tuple[_SegmentBlock, int]] = {}
        self._segments: dict[int, int] = {}  # bytes by address
        self._tails: dict[bool, _SegmentBlock | None] = {True: None, False: None}  # of the expandable segments
        self._next_address = 1 << 30

    @staticmethod
    def rounded(num_bytes: int) -> int:
        """Returns the size of the block that serves a request."""
        return max(MIN_BLOCK, -(-num_bytes // MIN_BLOCK) * MIN_BLOCK)

    @staticmethod
    def segment_size(rounded: int) -> int:
        """Returns the size of the segment that is reserved for a block, where no segment is expandable."""
        if rounded <= SMALL_SIZE:
            return SMALL_BUFFER
        if rounded < MIN_LARGE:
            return LARGE_BUFFER
        return -(-rounded // ROUND_LARGE) * ROUND_LARGE

    def malloc(self, num_bytes: int) -> int:
        """Returns the address of a block for `num_bytes`.

        Raises:
            OutOfMemory: The device has no room for another segment.
        """
        if num_bytes == 0:
            return 0
        size = self.rounded(num_bytes)
        is_small = size <= SMALL_SIZE
        block = self._free[is_small].best_fit(size)
        if block is not None:
            self._free[is_small].remove(block)
        elif self._expandable:
            block = self._grow(size, is_small)
        else:
            block = self._new_segment(self.segment_size(size), is_small)
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
        self._make_free(block)

    def release_cached(self) -> None:
        """Releases every segment without a block in use, as `torch.cuda.empty_cache` does."""
        for is_small, pool in self._free.items():
            for block in pool:
                if self._expandable:
                    if block.following is None:
                        self._shrink(block, is_small)
                elif block.previous is None and block.following is None:
                    pool.remove(block)
                    self.reserved -= self._segments.pop(block.segment)

    def blocks(self) -> list[tuple[int, int, bool]]:
        """Returns address, size and whether it is in use, of every block in order of addresses."""
        free = [block for pool in self._free.values() for block in pool]
        used = [block for block, _ in self._used.values()]
        return sorted((block.address, block.size, not block.is_free) for block in free + used)

    def _reserve(self, num_bytes: int) -> None:
        if self._capacity is not None and self.reserved + num_bytes > self._capacity:
            self.num_releases += 1
            self.release_cached()
            if self.reserved + num_bytes > self._capacity:
                raise OutOfMemory(
                    f"a segment of {num_bytes} bytes does not fit: {self.reserved} of {self._capacity} are reserved"
                )
        self.reserved += num_bytes

    def _new_segment(self, num_bytes: int, is_small: bool) -> _SegmentBlock:
        self._reserve(num_bytes)
        address = self._next_address
        self._next_address += num_bytes + SMALL_BUFFER  # a gap, so that segments never touch
        self._segments[address] = num_bytes
        return _SegmentBlock(address, num_bytes, address, is_small)

    def _grow(self, size: int, is_small: bool) -> _SegmentBlock:
        """Maps more of the pool's expandable segment, behind its last block, which is used if it is free."""
        step = SMALL_BUFFER if is_small else LARGE_BUFFER
        tail = self._tails[is_small]
        have = tail.size if tail is not None and tail.is_free else 0
        added = -(-(size - have) // step) * step
        self._reserve(added)
        tail = self._tails[is_small]  # a release may have taken the free tail
        if tail is not None and tail.is_free and tail.size == have:
            self._free[is_small].remove(tail)
            tail.size += added
            self._segments[tail.segment] += added
            return tail
        if have:  # the release took it: map what it had as well
            more = -(-size // step) * step - added
            self._reserve(more)
            added += more
        if tail is None:
            segment = address = (1 << 50) + (1 << 49) * is_small
            self._segments[segment] = 0
        else:
            segment, address = tail.segment, tail.address + tail.size
        block = _SegmentBlock(address, added, segment, is_small)
        self._segments[segment] += added
        block.previous = tail
        if tail is not None:
            tail.following = block
        self._tails[is_small] = block
        return block

    def _shrink(self, tail: _SegmentBlock, is_small: bool) -> None:
        """Unmaps the free end of an expandable segment, in whole steps from the segment's begin."""
        step = SMALL_BUFFER if is_small else LARGE_BUFFER
        keep = -(tail.address - tail.segment) % step
        if keep >= tail.size:
            return
        self._free[is_small].remove(tail)
        removed = tail.size - keep
        self.reserved -= removed
        self._segments[tail.segment] -= removed
        if keep:
            tail.size = keep
            self._free[is_small].add(tail)
            return
        self._tails[is_small] = tail.previous
        if tail.previous is not None:
            tail.previous.following = None

    def _split(self, block: _SegmentBlock, size: int) -> None:
        remaining = block.size - size
        least = MIN_BLOCK if block.is_small or self._expandable else SMALL_SIZE + 1
        if remaining < least:
            return
        rest = _SegmentBlock(block.address + size, remaining, block.segment, block.is_small)
        rest.previous, rest.following = block, block.following
        if rest.following is not None:
            rest.following.previous = rest
        elif self._expandable:
            self._tails[block.is_small] = rest
        block.following, block.size = rest, size
        rest.is_free = True
        self._free[block.is_small].add(rest)

    def _make_free(self, block: _SegmentBlock) -> None:
        pool = self._free[block.is_small]
        before, after = block.previous, block.following
        if after is not None and after.is_free:
            pool.remove(after)
            self._absorb(block, after)
        if before is not None and before.is_free:
            pool.remove(before)
            self._absorb(before, block)
            block = before
        block.is_free = True
        pool.add(block)

    def _absorb(self, block: _SegmentBlock, following: _SegmentBlock) -> None:
        """Makes one block of two neighbors."""
        block.size += following.size
        block.following = following.following
        if block.following is not None:
            block.following.previous = block
        elif self._expandable:
            self._tails[block.is_small] = block
