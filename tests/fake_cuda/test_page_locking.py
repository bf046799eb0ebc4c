"""Tests how much memory saves and offloading page-lock for copies of a GPU, in which thread, and for how long."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fake_cuda
from drivetrain import _C
from drivetrain.checkpointing import Checkpointer, Store
from drivetrain.checkpointing.store import pinned_memory
from drivetrain.checkpointing.store.device_copies import DeviceCopies, Slabs

CHUNK = 1 << 20
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def locking_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes chunks small, and returns the names of the threads that lock them."""
    names, lock = [], _C.HostPages.lock

    def noted(pages: _C.HostPages, size: int) -> bool:
        names.append(threading.current_thread().name)
        return lock(pages, size)

    monkeypatch.setattr(pinned_memory, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(_C.HostPages, "lock", noted)
    return names


@pytest.fixture
def before(new_errors: Callable[[], list[str]]) -> Iterator[int]:
    """Returns the bytes that other tests have left page-locked, and checks that no race is found."""
    gc.collect()
    torch.ones(1, device="cuda").item()  # takes a page of torch's
    torch.cuda.synchronize()
    left = fake_cuda.pinned_bytes()
    fake_cuda.peak_pinned_bytes()
    yield left
    assert not new_errors()


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def odd_model() -> nn.Module:
    return nn.Sequential(nn.Linear(1031, 517), nn.Linear(517, 1009), nn.Linear(1009, 3)).cuda()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 1031, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_checkpointer_locks_what_it_saves_and_returns_it(
    tmp_path: Path, before: int, locking_threads: list[str]
) -> None:
    model = odd_model()
    optimizer = torch.optim.AdamW(model.parameters())
    num_bytes = 3 * sum(param.nbytes for param in model.parameters())
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, every=3, signals=()) as checkpointer:
        saver = checkpointer._open_saver()
        for number in range(1, 10):
            step(model, optimizer)
            torch.cuda.synchronize()
            waits = fake_cuda.num_host_waits()
            checkpointer.step()
            assert fake_cuda.num_host_waits() == waits, number
            if number % 3 == 2:  # the memory of the next save is being locked
                wait_until(lambda: fake_cuda.pinned_bytes() - before >= num_bytes)
            if number % 3 == 0:
                saver.wait()
            assert fake_cuda.pinned_bytes() - before <= 1.1 * num_bytes
        assert set(locking_threads) == {"drivetrain-pinned"}
        assert saver._slabs._memory is not None
        saver._slabs._idle_s = saver._slabs._memory._idle_s = 0.1
        locked = len(locking_threads)
        step(model, optimizer)
        checkpointer.save()
        wait_until(lambda: fake_cuda.pinned_bytes() == before)  # idle
        step(model, optimizer)
        checkpointer.save()
    assert len(locking_threads) > locked
    assert fake_cuda.peak_pinned_bytes() - before <= 1.1 * num_bytes + CHUNK
    wait_until(lambda: fake_cuda.pinned_bytes() == before)
    with Store(tmp_path) as store:
        saved = store.checkpoints()[-1].load()
    values = {f"model/{name}": value for name, value in model.state_dict().items()}
    assert all(torch.equal(saved[name], value.cpu()) for name, value in values.items())


def tensors(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "transposed": torch.randn(700, 900, device="cuda").t(),
        "scalar": torch.randn((), device="cuda"),
        "empty": torch.randn(0, 3, device="cuda"),
        "large": torch.randn(1_300_001, device="cuda"),
        "bytes": torch.randint(0, 255, (1_500_001,), dtype=torch.uint8, device="cuda"),
        "halves": torch.randn(333_333, device="cuda").to(torch.bfloat16),
        "last": torch.randn(700_001, device="cuda"),
    }


def wait_for_chunks(slabs: Slabs, most: int = 1 << 20) -> None:
    memory = slabs._memory
    assert memory is not None
    wait_until(lambda: memory.locked_bytes == min(most * CHUNK, memory.nbytes))


@pytest.mark.parametrize("num_locked", [0, 1, 3, 100])
def test_values_are_right_however_much_is_locked(monkeypatch: pytest.MonkeyPatch, before: int, num_locked: int) -> None:
    lock, may_lock = _C.HostPages.lock, threading.Semaphore(num_locked)
    monkeypatch.setattr(_C.HostPages, "lock", lambda *given: may_lock.acquire(blocking=False) and lock(*given))
    slabs = Slabs()
    slabs.prepare(lambda: tensors(0).values())
    for seed in range(2):
        sources = tensors(seed)
        expected = {name: tensor.cpu() for name, tensor in sources.items()}
        if seed == 1:
            wait_for_chunks(slabs, num_locked)
        copies = DeviceCopies(sources, slabs)
        for tensor in sources.values():
            tensor.zero_()
        copies.wait(LIMIT_S)
        assert all(torch.equal(copies.host[name], value) for name, value in expected.items())
        del copies
        slabs.give_back()
    slabs.close(LIMIT_S)
    assert fake_cuda.pinned_bytes() == before


def test_memory_stays_while_a_snapshot_or_the_device_uses_it(before: int) -> None:
    slabs = Slabs()
    copies = DeviceCopies(tensors(0), slabs)
    copies.wait(LIMIT_S)
    host = copies.host["large"]
    value = host.clone()
    del copies
    slabs.give_back()
    memory = slabs._memory
    assert memory is not None
    wait_for_chunks(slabs)
    slabs.close(0.6)
    assert fake_cuda.pinned_bytes() > before
    assert torch.equal(host, value)
    del host
    wait_until(lambda: fake_cuda.pinned_bytes() == before)
    memory.join(LIMIT_S)
    fake_cuda.set_delay(200_000)
    try:
        slabs = Slabs()
        slabs.prepare(lambda: tensors(0).values())
        wait_for_chunks(slabs)
        DeviceCopies(tensors(0), slabs)
        slabs.close(LIMIT_S)  # the copies have hardly begun
    finally:
        fake_cuda.set_delay(1000)
    assert fake_cuda.pinned_bytes() == before


def test_offloading_locks_what_it_counts(before: int) -> None:
    most = 3_000_000
    pool = _C.OffloadPool(most, slab_bytes=1 << 16)
    source = torch.randn(600_000, device="cuda")
    offloaded = [pool.begin(part) for part in source.split([500_001, 3, 99_996])]
    assert 2_400_000 <= pool.bytes_reserved <= 1.1 * 2_400_000 + (1 << 16)
    assert fake_cuda.pinned_bytes() - before == pool.bytes_reserved
    assert torch.equal(torch.cat([one.take() for one in offloaded]), source)
    del offloaded
    larger = pool.begin(torch.ones(700_000, device="cuda"))  # takes the place of the others
    assert fake_cuda.pinned_bytes() - before == pool.bytes_reserved <= most
    assert larger.take().sum().item() == 700_000
    del larger, pool
    assert fake_cuda.pinned_bytes() == before
