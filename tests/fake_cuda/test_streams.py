"""Tests the stand-in's streams, events and copies: work runs late, in any allowed order, and by CUDA's rules."""

import ctypes
import time
from collections.abc import Callable

import pytest
import torch

import fake_cuda

RUNTIME = ctypes.CDLL(None)
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
INVALID_VALUE, INVALID_HANDLE, NOT_READY = 1, 400, 600
pytestmark = pytest.mark.usefixtures("synchronized")
LONG = 100_000_000  # cycles of torch.cuda._sleep: 50 ms


def copy_async(to: int, source: int, num_bytes: int, kind: int, stream: torch.cuda.Stream) -> int:
    pointers = (ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(num_bytes))
    return int(RUNTIME.cudaMemcpyAsync(*pointers, kind, ctypes.c_void_p(stream.cuda_stream)))


@pytest.fixture
def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def test_work_is_late(stream: torch.cuda.Stream) -> None:
    pinned = torch.zeros(4, pin_memory=True)
    x = torch.ones(4, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        pinned.copy_(x, non_blocking=True)
    assert pinned.tolist() == [0] * 4
    assert not stream.query()
    stream.synchronize()
    assert pinned.tolist() == [1] * 4
    assert stream.query()


def test_work_goes_on_without_a_wait_of_the_hosts(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.zeros(4, device="cuda")
    end = time.monotonic() + 20
    while not stream.query():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_wait_for_one_stream_leaves_the_others_late(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2 * LONG)
    torch.ones(1, device="cuda").item()
    assert not stream.query()


def test_orders_of_streams_are_drawn() -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    orders = set()
    for seed in range(20):
        fake_cuda.seed(seed)
        events = []
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.zeros(1, device="cuda")
            events.append(stream.record_event(torch.cuda.Event(enable_timing=True)))
        torch.cuda.synchronize()
        orders.add(tuple(sorted(range(3), key=lambda i: events[0].elapsed_time(events[i]))))
    assert len(orders) > 1


def test_pinned_sources_are_read_late(stream: torch.cuda.Stream) -> None:
    pinned = torch.ones(4, pin_memory=True)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        x = pinned.to("cuda", non_blocking=True)
        pinned.fill_(7)
        assert x.tolist() == [7] * 4


def test_pageable_sources_are_read_at_the_call(stream: torch.cuda.Stream) -> None:
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    pageable = torch.ones(4)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        before = fake_cuda.num_host_waits()
        assert copy_async(x.data_ptr(), pageable.data_ptr(), 16, HOST_TO_DEVICE, stream) == 0
        assert fake_cuda.num_host_waits() == before
        pageable.fill_(7)
        assert x.tolist() == [1] * 4


def test_pageable_targets_are_waited_for(stream: torch.cuda.Stream) -> None:
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    pageable = torch.zeros(4)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
    before = fake_cuda.num_host_waits()
    assert copy_async(pageable.data_ptr(), x.data_ptr(), 16, DEVICE_TO_HOST, stream) == 0
    assert pageable.tolist() == [1] * 4
    assert fake_cuda.num_host_waits() == before + 1


def test_wrong_copies_are_refused(stream: torch.cuda.Stream) -> None:
    x = torch.ones(4, device="cuda")
    host = torch.zeros(4)
    assert copy_async(host.data_ptr(), x.data_ptr(), 16, HOST_TO_DEVICE, stream) == INVALID_VALUE
    assert copy_async(x.data_ptr() + (1 << 30), host.data_ptr(), 16, HOST_TO_DEVICE, stream) == INVALID_VALUE
    bogus = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(host.data_ptr()), ctypes.c_size_t(16), HOST_TO_DEVICE)
    assert RUNTIME.cudaMemcpyAsync(*bogus, ctypes.c_void_p(host.data_ptr())) == INVALID_HANDLE
    RUNTIME.cudaGetLastError()


@pytest.mark.fake_cuda_errors
@pytest.mark.parametrize("is_blocking", [False, True])
def test_the_default_stream_and_others(is_blocking: bool, new_errors: Callable[[], list[str]]) -> None:
    handle = ctypes.c_void_p()
    assert RUNTIME.cudaStreamCreateWithFlags(ctypes.byref(handle), 0 if is_blocking else 1) == 0
    other = torch.cuda.ExternalStream(handle.value)
    x = torch.zeros(4, device="cuda")
    assert (x + 1).tolist() == [1] * 4  # an operator's first call may take longer than the sleep
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * LONG)
    x.fill_(1)
    with torch.cuda.stream(other):
        y = x + 1
    other.synchronize()
    assert torch.cuda.default_stream().query() == is_blocking
    found = new_errors()
    assert RUNTIME.cudaStreamDestroy(handle) == 0
    if is_blocking:
        assert y.tolist() == [2] * 4
        assert not found
    else:
        assert "race" in found[0]


def test_an_events_last_record_counts(stream: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    assert event.query()  # never recorded
    event.record(stream)
    event.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
    event.record(stream)
    assert not event.query()
    event.synchronize()
    assert stream.query()


def test_a_wait_is_for_the_record_before_it(stream: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    event.record(stream)
    torch.cuda.current_stream().wait_event(event)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2 * LONG)
    event.record(stream)
    torch.ones(1, device="cuda").item()
    assert not event.query()


def test_elapsed_times(stream: torch.cuda.Stream) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        start.record()
        torch.cuda._sleep(LONG)
        end.record()
    milliseconds = ctypes.c_float()
    handles = (ctypes.c_void_p(start.cuda_event), ctypes.c_void_p(end.cuda_event))
    assert RUNTIME.cudaEventElapsedTime(ctypes.byref(milliseconds), *handles) == NOT_READY
    RUNTIME.cudaGetLastError()
    end.synchronize()
    assert 45 < start.elapsed_time(end) < 5000


def test_host_waits_are_counted(stream: torch.cuda.Stream) -> None:
    x = torch.ones(1, device="cuda")
    before = fake_cuda.num_host_waits()
    x.add_(1).mul_(2)
    assert fake_cuda.num_host_waits() == before
    waits: list[Callable[[], object]] = [x.item, stream.synchronize, torch.cuda.synchronize, x.nonzero]
    for number, wait in enumerate(waits, start=1):
        wait()
        assert fake_cuda.num_host_waits() == before + number


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_sync_debug_mode_works() -> None:
    x = torch.ones(4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            x.nonzero()
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            x.sum().item()
        x.add_(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_other_devices_streams_are_their_own() -> None:
    x = torch.arange(4.0, device="cuda:1")
    assert (x.to("cuda:0") + 1).tolist() == [1, 2, 3, 4]
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(0))
    other = torch.cuda.Stream(1)
    handles = (ctypes.c_void_p(event.cuda_event), ctypes.c_void_p(other.cuda_stream))
    assert RUNTIME.cudaEventRecord(*handles) == INVALID_HANDLE
    RUNTIME.cudaGetLastError()
