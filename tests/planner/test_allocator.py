"""Tests the simulated allocators: rules of torch's caching allocator by example, and invariants by property."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.planner.memory import LARGE_BUFFER, SMALL_BUFFER, CachingAllocator, HostAllocator
from effort import rounds

MIB = 1 << 20
SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 64 * MIB))
# A number frees the block with that index, modulo those in use; a tuple allocates.
ACTIONS = st.lists(st.one_of(st.tuples(SIZES), st.integers(0, 1000)), max_size=60)


@pytest.mark.parametrize(
    ("requested", "rounded", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (50 * MIB, 50 * MIB, 50 * MIB),
    ],
)
def test_first_request_reserves_torchs_segment(requested: int, rounded: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(requested)
    assert (allocator.requested, allocator.allocated, allocator.reserved) == (requested, rounded, segment)


def test_small_and_large_requests_do_not_share_segments() -> None:
    allocator = CachingAllocator()
    allocator.malloc(MIB)
    allocator.malloc(2 * MIB)
    assert allocator.reserved == 22 * MIB
    allocator.malloc(MIB)  # the second half of the small segment
    allocator.malloc(18 * MIB - 512)  # larger than 10 MiB, and yet the large segment's rest is the best fit
    assert allocator.reserved == 22 * MIB


def test_best_fit_takes_the_smallest_block_that_is_large_enough() -> None:
    allocator = CachingAllocator()
    handles = [allocator.malloc(size * MIB) for size in (40, 30, 20)]
    for handle in handles:
        allocator.free(handle)
    assert allocator.malloc(25 * MIB) == handles[1]
    assert allocator.malloc(20 * MIB) == handles[2]


def test_rest_of_up_to_one_mib_stays_in_a_large_block() -> None:
    allocator = CachingAllocator()
    handle = allocator.malloc(12 * MIB)
    allocator.free(handle)
    allocator.malloc(11 * MIB)
    assert allocator.allocated == allocator.reserved == 12 * MIB


def test_expandable_segments_avoid_fragmentation() -> None:
    reserved = {}
    for expandable in (False, True):
        allocator = CachingAllocator(expandable=expandable)
        for size in range(20, 60, 2):
            handle = allocator.malloc(size * MIB)
            allocator.free(handle)
        reserved[expandable] = allocator.reserved
    assert reserved[True] < reserved[False] / 10
    assert reserved[True] == 60 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@settings(max_examples=rounds(50, whole=150), deadline=None)
@given(actions=ACTIONS)
def test_invariants(expandable: bool, actions: list[tuple[int] | int]) -> None:
    allocator = CachingAllocator(expandable=expandable)
    live: dict[int, int] = {}
    for action in actions:
        if isinstance(action, tuple):
            handle = allocator.malloc(action[0])
            assert handle not in live
            live[handle] = action[0]
        elif live:
            handle = list(live)[action % len(live)]
            allocator.free(handle)
            del live[handle]
        check(allocator, live)
    for handle in live:
        allocator.free(handle)
    assert (allocator.allocated, allocator.requested) == (0, 0)
    check(allocator, {})


def check(allocator: CachingAllocator, live: dict[int, int]) -> None:
    blocks = allocator.blocks()
    for (address, size, _), (following, _, _) in itertools.pairwise(blocks):
        assert address + size <= following
    for (address, size, in_use), (following, _, next_in_use) in itertools.pairwise(blocks):
        assert in_use or next_in_use or address + size < following  # free neighbors have merged
    used = {address: size for address, size, in_use in blocks if in_use}
    assert used.keys() == live.keys()
    assert all(used[handle] >= size for handle, size in live.items())
    assert sum(used.values()) == allocator.allocated
    assert sum(live.values()) == allocator.requested
    assert sum(size for _, size, _ in blocks) == allocator.reserved
    assert allocator.reserved % SMALL_BUFFER == 0


@given(actions=st.lists(SIZES, max_size=40))
def test_reserved_is_bounded(actions: list[int]) -> None:
    """Without frees, waste is at most a segment of each pool, and the rests that are too small to split."""
    allocator = CachingAllocator()
    for size in actions:
        allocator.malloc(size)
    assert allocator.reserved <= 2 * allocator.allocated + LARGE_BUFFER + SMALL_BUFFER


def test_host_counts_live_bytes() -> None:
    allocator = HostAllocator()
    first, second = allocator.malloc(100), allocator.malloc(7)
    allocator.free(first)
    assert (allocator.allocated, allocator.reserved) == (7, 7)
    with pytest.raises(KeyError):
        allocator.free(first)
    allocator.free(second)
    assert allocator.allocated == 0
