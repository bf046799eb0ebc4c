"""Tests data.prefetch: order, errors, early exits, depth, random numbers, and checkpoints of prefetched loaders."""

import dataclasses
import os
import signal
import threading
import time
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import drivetrain
from drivetrain.checkpointing import Checkpointer
from drivetrain.data import ResumableSampler, prefetch


class Numbers(Dataset[Tensor]):
    def __init__(self, count: int = 40, fails_at: int = -1) -> None:
        self.count, self.fails_at = count, fails_at

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if index == self.fails_at:
            raise KeyError("no such sample")
        return torch.tensor(float(index))


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "drivetrain prefetch"]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("depth", [None, 1, 5])
def test_batches_are_the_loaders_in_order(num_workers: int, depth: int | None) -> None:
    loader = DataLoader(Numbers(), batch_size=3, num_workers=num_workers)
    batches = prefetch(loader, depth=depth)
    for _ in range(2):
        assert torch.equal(torch.cat(list(batches)), torch.arange(40.0))
    assert len(batches) == 14
    assert batches.batch_size == 3
    assert prefetch_threads() == []


def test_any_iterable_and_structures() -> None:
    entries = [{"x": torch.ones(2) * i, "name": str(i), "more": (i, [torch.zeros(i)])} for i in range(5)]
    found = list(prefetch(entries, "cpu"))
    assert [entry["name"] for entry in found] == list("01234")
    for i, (entry, original) in enumerate(zip(found, entries, strict=True)):
        assert torch.equal(entry["x"], original["x"])
        assert len(entry["more"][1][0]) == i
    assert list(prefetch([])) == []


def test_iterators_of_one_object_are_their_own() -> None:
    batches = prefetch(DataLoader(Numbers(12), batch_size=3))
    kept = iter(batches)
    assert len(kept) == 4
    first = next(kept)
    assert torch.equal(torch.cat(list(batches)), torch.arange(12.0))  # such as a validation pass
    assert torch.equal(torch.cat([first, *kept]), torch.arange(12.0))
    assert all(torch.equal(one, other) for one, other in zip(batches, batches, strict=True))


def test_an_iterator_whose_thread_is_gone_raises_at_once() -> None:
    batches = prefetch(iter([torch.ones(1)] * 9))  # all iterations take from one iterator
    old = iter(batches)
    next(old)
    next(iter(batches))
    with pytest.raises(RuntimeError, match="this iteration has ended"):
        next(old)
    kept = iter(prefetch(DataLoader(Numbers(60), batch_size=3)))
    next(kept)
    child = os.fork()
    if child == 0:
        try:
            next(kept)
        except RuntimeError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kept.close()


class Pair(NamedTuple):
    x: Tensor
    length: int


@dataclasses.dataclass
class Sample:
    x: Tensor


class Movable:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> "Movable":
        return Movable(self.x.to(device))


def test_batches_of_many_kinds_are_moved() -> None:
    x = torch.ones(2, 3)
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4), [3, 2])
    kinds = [UserDict(x=x, name="a"), Pair(x, 1), Movable(x), packed, OrderedDict(x=x), (x, None, 3.5), [b"c", x]]
    (batch,) = prefetch([kinds], "meta")
    assert batch[0]["x"].is_meta
    assert batch[0]["name"] == "a"
    assert type(batch[0]) is UserDict
    assert batch[1].x.is_meta
    assert batch[1].length == 1
    assert batch[2].x.is_meta
    assert batch[3].data.is_meta
    assert batch[4]["x"].is_meta
    assert batch[5][0].is_meta
    assert batch[5][1:] == (None, 3.5)
    assert batch[6][1].is_meta
    assert not x.is_meta
    assert not kinds[0]["x"].is_meta
    with pytest.raises(TypeError, match="Sample, which holds tensors that prefetch cannot move"):
        next(iter(prefetch([Sample(x)], "meta")))


def test_an_error_of_the_loader_comes_after_the_batches_before_it() -> None:
    iterator = iter(prefetch(DataLoader(Numbers(fails_at=17), batch_size=5)))
    assert len([next(iterator) for _ in range(3)]) == 3
    with pytest.raises(KeyError, match="no such sample"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    assert prefetch_threads() == []


def test_an_error_of_the_wait_does_not_wait_for_the_loader() -> None:
    """A worker that dies raises in the main thread, by a handler of SIGCHLD, while the thread asks its queue."""
    goes_on = threading.Event()

    def batches() -> Iterator[int]:
        yield 0
        goes_on.wait()
        yield 1

    def die(*_: object) -> None:
        raise ConnectionError("a worker has died")

    found = iter(prefetch(batches()))
    assert next(found) == 0
    before = signal.signal(signal.SIGALRM, die)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(ConnectionError):  # not that the loader has not returned within a minute
            next(found)
    finally:
        signal.signal(signal.SIGALRM, before)
        goes_on.set()
    for thread in prefetch_threads():
        thread.join()


def test_a_loop_that_is_left_ends_the_thread_and_the_next_one_begins_again() -> None:
    batches = prefetch(DataLoader(Numbers(), batch_size=4))
    for _ in range(3):
        iterator = iter(batches)
        assert torch.equal(next(iterator), torch.arange(4.0))
        assert torch.equal(next(iterator), torch.arange(4.0, 8.0))
    for most in (1, 0):
        deadline = time.monotonic() + 30
        while len(prefetch_threads()) > most and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(prefetch_threads()) <= most
        iterator = None


class Endless(IterableDataset[Tensor]):
    """Counts what it was asked for; `gate` holds it back."""

    def __init__(self) -> None:
        self.loaded = 0
        self.gate = threading.Event()
        self.gate.set()

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.gate.wait(60)
            self.loaded += 1
            yield torch.tensor(self.loaded)


def loaded_at_last(data: Endless, wanted: int) -> int:
    deadline = time.monotonic() + 30
    while data.loaded < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # in which a buffer that is too deep would take more
    return data.loaded


def test_no_more_is_loaded_than_the_depth_says() -> None:
    data = Endless()
    iterator = iter(prefetch(data, depth=3))
    next(iterator)
    # One was returned, three lie in the buffer, and the thread holds one.
    assert loaded_at_last(data, 5) == 5
    next(iterator)
    assert loaded_at_last(data, 6) == 6


def test_the_depth_grows_when_a_full_buffer_was_too_small() -> None:
    data = Endless()
    batches = prefetch(data)
    iterator = iter(batches)
    next(iterator)
    assert batches.depth == 2
    for expected in (3, 4, 5, 6, 7, 8, 8):
        full = data.loaded + 100
        deadline = time.monotonic() + 30
        while data.loaded < full and time.monotonic() < deadline:  # until the buffer is full
            before = data.loaded
            time.sleep(0.02)
            if data.loaded == before:
                break
        data.gate.clear()
        threading.Timer(0.2, data.gate.set).start()
        for _ in range(batches.depth + 2):  # empties the buffer and waits
            next(iterator)
        assert batches.depth == expected
    fixed = prefetch(Endless(), depth=2)
    for _ in zip(fixed, range(20), strict=False):
        pass
    assert fixed.depth == 2


def test_a_loader_that_hangs_is_named() -> None:
    data = Endless()
    iterator = iter(prefetch(data, depth=1, timeout=0.3))
    next(iterator)
    data.gate.clear()
    with pytest.raises(TimeoutError, match=r"waited 0\.3 s for the loader's next batch"):
        list(iterator)
    data.gate.set()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_training_has_the_same_random_numbers(num_workers: int) -> None:
    def run(wrap: Any) -> list[Tensor]:
        torch.manual_seed(0)
        loader = DataLoader(Numbers(), batch_size=8, shuffle=True, num_workers=num_workers)
        return [torch.cat([batch, torch.rand(3)]) for _ in range(2) for batch in wrap(loader)]

    assert all(torch.equal(a, b) for a, b in zip(run(iter), run(prefetch), strict=True))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loader": 3}, TypeError, "loader is a int, expected a DataLoader"),
        ({"depth": 0}, ValueError, "depth is 0, expected"),
        ({"depth": 1.5}, ValueError, "depth is 1.5, expected"),
        ({"timeout": 0}, ValueError, "timeout is 0, expected"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prefetch(**{"loader": [1]} | arguments)


def steps_of(folder: Any, num_workers: int, stop: int | None) -> list[float]:
    """Trains for two epochs, or until step `stop`, whose checkpoint the next call resumes. Returns what it saw."""
    dataset = Numbers(48)
    loader = DataLoader(dataset, batch_size=4, sampler=ResumableSampler(dataset, seed=3), num_workers=num_workers)
    batches = prefetch(loader, depth=3)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    with Checkpointer(folder, model=model, optimizer=optimizer, data=batches, every="1step") as ckpt:
        for epoch in range(ckpt.epoch, 2):
            loader.sampler.set_epoch(epoch)
            for batch in batches:
                seen.extend(batch.tolist())
                model(batch[:, None]).sum().backward()
                optimizer.step()
                ckpt.step()
                if stop is not None and len(seen) >= stop * 4:
                    return seen
    return seen


def test_a_checkpoint_counts_the_batches_that_the_training_took(tmp_path: Any) -> None:
    whole = steps_of(tmp_path / "whole", 1, None)
    first = steps_of(tmp_path / "cut", 1, 5)
    second = steps_of(tmp_path / "cut", 1, 9)  # crosses the epoch's end
    third = steps_of(tmp_path / "cut", 1, None)
    assert first + second + third == whole


def test_a_checkpointer_refuses_what_it_cannot_resume_exactly(tmp_path: Any) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"num_workers=0.*num_workers=1 or more"):
        Checkpointer(tmp_path, model=model, optimizer=optimizer, data=prefetch(DataLoader(Numbers())))


@pytest.mark.gpu
def test_batches_arrive_on_the_gpu() -> None:
    loader = DataLoader(Numbers(4000), batch_size=100)
    found = [batch * 1 for batch in drivetrain.data.prefetch(loader, "cuda")]
    assert all(batch.is_cuda for batch in found)
    assert torch.equal(torch.cat(found).cpu(), torch.arange(4000.0))
