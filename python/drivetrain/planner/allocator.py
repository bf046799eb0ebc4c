"""Simulates memory allocators: torch's caching allocator of CUDA devices, and the host's plain one."""

from __future__ import annotations

import bisect

# The constants and rules follow c10/cuda/CUDACachingAllocator.cpp of torch 2.13.
MIN_BLOCK = 512
SMALL_SIZE = 1 << 20  # the largest request that the pool of small blocks serves
SMALL_BUFFER = 2 << 20
MIN_LARGE = 10 << 20  # larger requests get a segment of their own
LARGE_BUFFER = 20 << 20
ROUND_LARGE = 2 << 20


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
