"""Tests the stand-in's device memory: forbidden host accesses, races between streams, and its limited size."""

import ctypes
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.usefixtures("synchronized")
Errors = Callable[[], list[str]]


@pytest.mark.fake_cuda_errors
def test_a_host_access_is_found_and_named(new_errors: Errors) -> None:
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    at = (ctypes.c_float * 4).from_address(x.data_ptr())
    assert at[1] == 1
    (found,) = new_errors()
    assert f"host access: the host reads device memory at {x.data_ptr() + 4:#x} (byte " in found
    assert "aten::fill_" in found


@pytest.mark.fake_cuda_errors
def test_a_report_does_not_use_the_alternate_signal_stack(new_errors: Errors) -> None:
    class Stack(ctypes.Structure):
        _fields_ = (("begin", ctypes.c_void_p), ("flags", ctypes.c_int), ("bytes", ctypes.c_size_t))

    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    memory = ctypes.create_string_buffer(1 << 16)
    libc, former = ctypes.CDLL(None), Stack()
    assert libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 1 << 16)), ctypes.byref(former)) == 0
    ctypes.string_at(x.data_ptr(), 1)
    assert libc.sigaltstack(ctypes.byref(former), None) == 0
    assert new_errors()
    assert not any(memory.raw)


@pytest.mark.fake_cuda_errors
def test_a_host_access_ends_the_process() -> None:
    script = "import torch, ctypes; x = torch.ones(4, device='cuda'); ctypes.memset(x.data_ptr(), 0, 4); print('on')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**_environment(), "FAKE_CUDA_ON_ERROR": "exit"},
    )
    assert done.returncode == 86
    assert "the host writes device memory" in done.stderr
    assert 'File "<string>", line 1' in done.stderr
    assert "on" not in done.stdout


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)


@pytest.mark.fake_cuda_errors
@pytest.mark.parametrize("reads_first", [False, True])
def test_a_race_is_found_and_named(reads_first: bool, new_errors: Errors) -> None:
    x = torch.zeros(64, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        if reads_first:
            x.sum()
        else:
            x.fill_(1)
    if reads_first:
        x.fill_(1)
    else:
        x.sum()
    (found,) = new_errors()
    assert "aten::sum" in found
    assert "aten::fill_" in found
    assert "the default stream of device 0" in found
    assert "nothing orders the two" in found


@pytest.mark.fake_cuda_errors
def test_memory_reused_too_early_is_found(new_errors: Errors) -> None:
    side = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.sum()
    address = x.data_ptr()
    del x
    y = torch.ones(1 << 20, device="cuda")
    assert y.data_ptr() == address
    (found,) = new_errors()
    assert "race" in found
    assert "aten::sum" in found


def test_memory_recorded_on_a_stream_is_not(new_errors: Errors) -> None:
    side = torch.cuda.Stream()
    x = torch.zeros(1 << 20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    x.record_stream(side)
    del x
    for _ in range(5):
        torch.ones(1 << 20, device="cuda")
    assert not new_errors()


def test_ordered_work_is_no_race(new_errors: Errors) -> None:
    x = torch.zeros(64, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    last = torch.cuda.current_stream()
    for stream in streams * 3:
        stream.wait_stream(last)
        with torch.cuda.stream(stream):
            x.add_(1)
        last = stream
    torch.cuda.current_stream().wait_stream(last)
    assert x.tolist() == [9] * 64
    assert not new_errors()


def test_other_parts_of_a_tensor_are_no_race(new_errors: Errors) -> None:
    x = torch.zeros(16, 16, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x[:, ::2].fill_(1)
    x[:, 1::2].fill_(2)
    assert not new_errors()
    assert x.sum().item() == 16 * 8 * 3


@pytest.mark.fake_cuda_errors
def test_kernels_of_ours_race_too(new_errors: Errors) -> None:
    from drivetrain import optim

    param = torch.zeros(300, device="cuda", requires_grad=True)
    param.grad = torch.ones(300, device="cuda")
    optimizer = optim.SGD([param], lr=1.0)
    optimizer.step()
    assert not new_errors()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        param.grad.fill_(2)
    optimizer.step()
    found = new_errors()
    assert found
    assert "our kernel" in found[0]
    assert "aten::fill_" in found[0]


def test_memory_runs_out() -> None:
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] <= free - (64 << 20)
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free


def test_tensors_of_another_device_are_refused() -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x.add_(torch.ones(4))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + torch.ones(4, device="cuda:1")


@pytest.mark.fake_cuda_errors
def test_work_that_fails_is_named(new_errors: Errors) -> None:
    x = torch.ones(4, device="cuda")
    x.gather(0, torch.tensor([9], device="cuda"))
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        torch.cuda.synchronize()
    (found,) = new_errors()
    assert "failed work: aten::gather" in found
    assert "index 9 is out of bounds" in found


def test_random_numbers_follow_the_generators_state() -> None:
    state = torch.cuda.get_rng_state()
    first = torch.randn(100, device="cuda"), torch.nn.functional.dropout(torch.ones(100, device="cuda"))
    second = torch.randn(100, device="cuda")
    assert not torch.equal(first[0], second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first[0], torch.randn(100, device="cuda"))
    assert torch.equal(first[1], torch.nn.functional.dropout(torch.ones(100, device="cuda")))
    before = torch.get_rng_state()
    torch.rand(4, device="cuda")
    assert torch.equal(before, torch.get_rng_state())
