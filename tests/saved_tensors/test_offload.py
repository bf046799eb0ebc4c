"""Tests activations on the host: their values, the reserved memory, and on a GPU the order of streams."""

import gc
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain import _C
from effort import rounds
from warm_python import warm_python

on_devices = pytest.mark.usefixtures("device")
SLAB = 1 << 14
MIB = 1 << 20
DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def make_pool(max_bytes: int = 64 * MIB, slab_bytes: int = SLAB) -> _C.OffloadPool:
    return _C.OffloadPool(max_bytes, slab_bytes)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_comes_back(dtype: torch.dtype) -> None:
    pool = make_pool()
    for size in (0, 1, 511, 512, 513, 5000, 100_001):
        x = (100 * torch.randn(size)).to(dtype)
        offloaded = pool.begin(x)
        assert offloaded.nbytes == x.nbytes
        want = x.clone()
        offloaded.await_copy_out()
        x.zero_()
        for prefetches in (0, 1, 2, 1):  # take() returns the values any number of times.
            for _ in range(prefetches):
                offloaded.prefetch()
            y = offloaded.take()
            assert y.dtype == dtype
            assert y.device == x.device
            assert torch.equal(y, want)
            y.zero_()


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_the_host_writes_goes_back(dtype: torch.dtype) -> None:
    pool = make_pool()
    for size in (0, 1, 513, 5000):
        x, other = (100 * torch.randn(size)).to(dtype), (100 * torch.randn(size, device="cpu")).to(dtype)
        offloaded = pool.begin(x)
        here = offloaded.host()
        assert here.device.type == "cpu"
        assert torch.equal(here, x.cpu())
        here.copy_(other)
        for target in (torch.empty_like(x), x):
            offloaded.copy_back_to(target)
            offloaded.await_copy_back()
            assert torch.equal(target.cpu(), other)
            assert torch.equal(offloaded.host(), other)  # waits for the copy
            assert offloaded.is_back()
        assert pool.num_copies == 3 * [0, 1, 513, 5000].index(size) + 3


@on_devices
def test_what_a_step_reserves_the_next_finds() -> None:
    pool = make_pool(slab_bytes=MIB)
    slabs = []
    for _ in range(4):
        kept = [pool.begin(torch.randn(10_000 * (1 + i % 7))) for i in range(40)]
        for offloaded in reversed(kept):
            offloaded.prefetch()
            offloaded.take()
        del kept, offloaded
        slabs.append(pool.num_slabs)
        assert pool.bytes_in_use == 0
    assert slabs[1:] == slabs[1:2] * 3
    assert pool.num_copies == 4 * 80
    assert pool.bytes_copied == 4 * 2 * sum(40_000 * (1 + i % 7) for i in range(40))
    assert pool.peak_bytes_in_use <= pool.bytes_reserved < 1.3 * pool.peak_bytes_in_use


def test_small_pieces_share_slabs() -> None:
    pool = make_pool()
    pieces = [pool.begin(torch.ones(100, dtype=torch.uint8)) for _ in range(SLAB // 512)]
    assert (pool.num_slabs, pool.bytes_reserved, pool.bytes_in_use) == (1, SLAB, SLAB)
    pieces.append(pool.begin(torch.ones(1, dtype=torch.uint8)))
    assert (pool.num_slabs, pool.bytes_reserved) == (2, 2 * SLAB)
    # Free neighbors merge in any order.
    for index in (5, 3, 4, 0, 1, 2, -1):
        pieces[index] = None
    pieces.append(pool.begin(torch.ones(6 * 512, dtype=torch.uint8)))
    assert pool.num_slabs == 2


def test_large_ones_get_a_power_of_two() -> None:
    pool = make_pool()
    large = pool.begin(torch.ones(SLAB + 1, dtype=torch.uint8))
    rest = pool.begin(torch.ones(SLAB - 512, dtype=torch.uint8))
    assert (pool.num_slabs, pool.bytes_reserved) == (1, 2 * SLAB)
    assert large.take().numel() + rest.take().numel() == 2 * SLAB - 511


@on_devices
def test_the_limit_says_what_is_needed() -> None:
    pool = make_pool(max_bytes=3 * SLAB)
    x = torch.ones(SLAB, dtype=torch.uint8)
    kept = [pool.begin(x) for _ in range(3)]
    message = f"is {3 * SLAB}, .* {SLAB} bytes more needs at least {4 * SLAB}: {3 * SLAB} are reserved, {3 * SLAB} of"
    with pytest.raises(ValueError, match=message):
        pool.begin(x)
    assert pool.bytes_in_use == 3 * SLAB
    assert all(torch.equal(offloaded.take(), x) for offloaded in kept)
    kept.pop()
    kept.append(pool.begin(x[511:]))  # The pool still works after the error.
    assert (pool.num_slabs, pool.bytes_in_use) == (3, 3 * SLAB)


def test_unused_slabs_make_room_for_others() -> None:
    pool = make_pool(max_bytes=4 * SLAB)
    x = torch.ones(SLAB, dtype=torch.uint8)
    kept = [pool.begin(x) for _ in range(4)]
    with pytest.raises(ValueError, match="Raise the limit, or offload less"):
        pool.begin(torch.ones(2 * SLAB))
    del kept[1:]
    large = pool.begin(torch.ones(2 * SLAB, dtype=torch.uint8))
    assert pool.bytes_reserved <= 4 * SLAB
    assert torch.equal(kept[0].take(), x)
    assert large.take().numel() == 2 * SLAB


def test_what_is_no_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="slab_bytes is 1000, expected a power of two from 512 on"):
        _C.OffloadPool(MIB, 1000)
    with pytest.raises(ValueError, match="max_bytes is -1"):
        _C.OffloadPool(-1)
    with pytest.raises(ValueError, match=r"tensor has strides \[1, 4\], expected a contiguous tensor"):
        make_pool().begin(torch.zeros(3, 4).t())
    with pytest.raises(ValueError, match=r"max_bytes is 0, .* needs at least 512"):
        make_pool(max_bytes=0).begin(torch.zeros(1))


@on_devices
def test_what_is_offloaded_outlives_its_pool() -> None:
    x = torch.randn(5000)
    offloaded = make_pool().begin(x)
    gc.collect()
    offloaded.prefetch()
    assert torch.equal(offloaded.take(), x)


def test_gradients_do_not_matter() -> None:
    x = torch.randn(30, requires_grad=True)
    y = make_pool().begin(x).take()
    assert not y.requires_grad
    assert torch.equal(y, x)


@on_devices
def test_threads() -> None:
    pool, failures = make_pool(), []

    def work(device: torch.device) -> None:
        for i in range(100):
            x = torch.full((100 + 37 * i,), i, device=device)
            offloaded = pool.begin(x)
            x = None
            offloaded.prefetch()
            if not bool((offloaded.take() == i).all()):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(torch.get_default_device(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.bytes_in_use == 0


def pieces_of(pool: _C.OffloadPool, actions: list[tuple[str, int]]) -> Iterator[list[Any]]:
    """Offloads and takes tensors, and yields the live ones with their expected values after each action."""
    alive: list[Any] = []
    for count, (action, number) in enumerate(actions):
        if action == "begin":
            x = torch.arange(count, count + number, dtype=torch.int16)
            alive.append((pool.begin(x), x.clone()))
            x.fill_(-1)
        elif alive:
            offloaded, want = alive[number % len(alive)]
            if action == "prefetch":
                offloaded.prefetch()
            elif action == "take":
                got = offloaded.take()
                assert torch.equal(got, want)
                got.fill_(-1)
            else:
                del alive[number % len(alive)]
                del offloaded
        yield alive


ACTIONS = st.one_of(
    st.tuples(st.just("begin"), st.integers(0, 20_000)),
    st.tuples(st.sampled_from(["prefetch", "take", "drop", "drop"]), st.integers(0, 100)),
)


@given(actions=st.lists(ACTIONS, max_size=60))
@settings(max_examples=rounds(50, whole=150), deadline=None)
def test_any_sequence(actions: list[tuple[str, int]]) -> None:
    pool = make_pool(max_bytes=10 * MIB)
    for alive in pieces_of(pool, actions):
        assert pool.bytes_in_use == sum(max(512, -(-offloaded.nbytes // 512) * 512) for offloaded, _ in alive)
        assert pool.bytes_in_use <= pool.bytes_reserved
    for offloaded, want in alive if actions else []:
        assert torch.equal(offloaded.take(), want)
    if actions:
        alive.clear()
        offloaded = None
    assert pool.bytes_in_use == 0


@given(sizes=st.lists(st.integers(0, 30_000), min_size=1, max_size=30))
@settings(max_examples=rounds(50, whole=100), deadline=None)
def test_a_step_like_the_last_reserves_nothing(sizes: list[int]) -> None:
    """Offloads in forward order and takes in reverse order."""
    pool, slabs = make_pool(), []
    for _ in range(6):
        kept = [pool.begin(torch.zeros(size, dtype=torch.uint8)) for size in sizes]
        while kept:
            kept.pop().take()
        slabs.append(pool.num_slabs)
    assert slabs[-1] == slabs[-2] == slabs[-3]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("order.py", "all orders give what was there"),
        ("results.py", "gradients of what the pass made"),
        ("dropout.py", "the same bits"),
    ],
)
def test_on_a_late_device(repository: Path, late_device: Path, script: str, says: str) -> None:
    """Runs streams in a random order, which shows missing waits and missing releases of the GIL."""
    command = [warm_python(has_whole_end=True), str(repository / "tests/late_device" / script), str(late_device)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert says in run.stdout


# ---- Tests that need a GPU.

LONG = 500_000_000  # in cycles, some tenths of a second


def on_busy_stream() -> tuple[Tensor, torch.cuda.Stream]:
    x = torch.zeros(4 * MIB, device="cuda")
    torch.cuda.synchronize()
    return x, torch.cuda.Stream()


@pytest.mark.gpu
def test_copies_come_after_what_is_enqueued_and_nobody_waits_on_the_host() -> None:
    x, stream = on_busy_stream()
    pool, done = make_pool(64 * MIB, 16 * MIB), torch.cuda.Event()
    pool.begin(x).take()  # Slabs and streams exist from here on.
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        x.fill_(1)
        offloaded = pool.begin(x)
        del x
        offloaded.prefetch()
        y = offloaded.take() * 3
        done.record()
        assert not done.query()
    stream.synchronize()
    assert bool((y == 3).all())
    assert pool.num_slabs == 1


@pytest.mark.gpu
def test_memory_that_is_freed_at_once_is_not_written_before_it_is_copied() -> None:
    pool = make_pool(1024 * MIB, 128 * MIB)
    for _ in range(3):
        torch.cuda.synchronize()
        kept = []
        for i in range(16):
            x = torch.full((2 * MIB,), i, device="cuda", dtype=torch.float32)
            kept.append(pool.begin(x))
            del x
            torch.full((2 * MIB,), -1, device="cuda", dtype=torch.float32)  # The allocator may give it x's memory.
        for i, offloaded in reversed(list(enumerate(kept))):
            if i:
                kept[i - 1].prefetch()
            y = offloaded.take()
            assert bool((y == i).all())
            del y, offloaded
            kept.pop()


@pytest.mark.gpu
def test_host_memory_is_reused_only_after_its_copies() -> None:
    """The next owner of memory that is freed during a copy writes to it after that copy."""
    pool = make_pool(64 * MIB, 64 * MIB)
    busy, x = torch.cuda.Stream(), torch.ones(8 * MIB, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        first = pool.begin(x)
        torch.cuda._sleep(LONG)
        first.prefetch()  # waits for the sleep
        y = first.take()
        del first
    second = pool.begin(torch.full_like(x, 2))  # An idle stream writes to the same memory.
    assert pool.num_slabs == 1
    torch.cuda.synchronize()
    assert bool((y == 1).all())
    assert bool((second.take() == 2).all())


@pytest.mark.gpu
def test_what_is_prefetched_and_dropped_is_not_written_later() -> None:
    pool, x = make_pool(64 * MIB, 64 * MIB), torch.ones(8 * MIB, device="cuda")
    torch.cuda.synchronize()
    for _ in range(5):
        offloaded = pool.begin(x)
        offloaded.prefetch()
        del offloaded
        y = torch.full_like(x, 2)  # It must not get the copy's destination.
        torch.cuda.synchronize()
        assert bool((y == 2).all())


@pytest.mark.gpu
def test_taken_on_another_stream() -> None:
    pool, x, other = make_pool(64 * MIB, 64 * MIB), torch.ones(8 * MIB, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        offloaded = pool.begin(x)
        offloaded.prefetch()
        with torch.cuda.stream(other):
            y = offloaded.take()
            torch.cuda._sleep(LONG // 10)
            z = y * 1
            del y
        w = torch.full_like(x, 2)
        torch.cuda.synchronize()
        assert bool((z == 1).all())
        assert bool((w == 2).all())


@pytest.mark.gpu
def test_copies_run_beside_the_current_stream() -> None:
    x, stream = on_busy_stream()
    pool = make_pool(64 * MIB, 64 * MIB)
    pool.begin(x).take()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        offloaded = pool.begin(x)
        torch.cuda._sleep(4 * LONG)
        done = torch.cuda.Event()
        done.record()
    # The copy to the host does not wait for a sleep. Another stream's copy back shows its end.
    y = offloaded.take()
    torch.cuda.current_stream().synchronize()
    assert not done.query()
    assert torch.equal(y, x)
    stream.synchronize()
