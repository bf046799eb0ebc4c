"""Tests that a loop continues with the next batch: each loader, every place of an epoch, and a second resume."""

from __future__ import annotations

import gc
import json
import multiprocessing
import random
import signal
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from drivetrain.checkpointing.preemption.notices import Notices
from drivetrain.checkpointing.state import rng
from drivetrain.checkpointing.state.data_position import position_of
from drivetrain.checkpointing.state.encoding import Encoder, decode
from drivetrain.data import ResumableSampler
from effort import covering

# torchdata 0.11 sets a vital sign that this torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

LENGTH, BATCH_SIZE, EPOCHS = 11, 3, 3


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


def resumable(**options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), BATCH_SIZE, sampler=ResumableSampler(LENGTH, num_replicas=1, rank=0), **options)


def shuffled(**options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), BATCH_SIZE, shuffle=True, **options)


def with_generator(**options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(4), **options)


def with_replacement(**options: Any) -> DataLoader[int]:
    sampler = RandomSampler(Numbers(), replacement=True, num_samples=40, generator=torch.Generator().manual_seed(4))
    return DataLoader(Numbers(), BATCH_SIZE, sampler=sampler, **options)


def distributed(**options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), BATCH_SIZE, sampler=DistributedSampler(Numbers(), 1, 0), **options)


def own_batches(**options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), BATCH_SIZE, True), **options)


def unbatched(**options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), batch_size=None, sampler=ResumableSampler(LENGTH, num_replicas=1, rank=0), **options)


def stateful(**options: Any) -> DataLoader[int]:
    return StatefulDataLoader(Numbers(), BATCH_SIZE, shuffle=True, **options)


LOADERS = [resumable, shuffled, with_generator, with_replacement, distributed, own_batches, unbatched, stateful]
WITH_WORKERS = [resumable, shuffled, with_generator, own_batches, stateful]  # the others draw as one of these does


def seed() -> None:
    random.seed(1)
    torch.manual_seed(1)


def saved(position: Any) -> Any:
    """Returns the position and the random states as a checkpoint gives them back, and ends counting."""
    encoder = Encoder(lambda _: False, "")
    text = json.dumps(encoder.encode({"position": position.state(), "rng": rng.capture()}, ""))
    position.close()
    return decode(json.loads(text), encoder.tensors)


def follow(
    loader: DataLoader[Any],
    position: Any,
    state: Any = None,
    stop_after: int | None = None,
    stop_at_end_of: int | None = None,
) -> tuple[list[Any], Any]:
    """Runs a loop over epochs with random draws between. It starts at a saved state, and ends after so many batches or
    at the end of an epoch.

    Returns the batches and draws, and the saved state.
    """
    found: list[Any] = []
    position.open()
    if state is not None:
        position.check(state["position"], True)
        position.restore(state["position"])
        rng.restore(state["rng"])
    for epoch in range(position.epoch, EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            found.append((epoch, batch.tolist() if isinstance(batch, torch.Tensor) else batch, torch.rand(()).item()))
            if len(found) == stop_after:
                return found, saved(position)
        if epoch == stop_at_end_of:
            return found, saved(position)
    position.close()
    return found, None


@pytest.mark.parametrize("make", LOADERS, ids=lambda make: make.__name__)
def test_every_place_of_every_epoch(make: Any) -> None:
    seed()
    loader = make()
    whole, _ = follow(loader, position_of(loader))
    for stop in range(1, len(whole) + 1):
        seed()
        loader = make()
        first, state = follow(loader, position_of(loader), stop_after=stop)
        torch.rand(stop)  # a new process has other random states
        loader = make()
        rest, _ = follow(loader, position_of(loader), state)
        assert first + rest == whole, stop


@pytest.mark.parametrize("make", LOADERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_the_end_of_an_epoch_is_the_beginning_of_the_next(make: Any, options: dict[str, Any]) -> None:
    """Scripts save after the loop over the loader and scheduler.step(): no empty epoch may follow."""
    seed()
    loader = make(**options)
    whole, _ = follow(loader, position_of(loader))
    for epoch in range(EPOCHS):
        seed()
        loader = make(**options)
        first, state = follow(loader, position_of(loader), stop_at_end_of=epoch)
        torch.rand(epoch + 1)
        loader = make(**options)
        position = position_of(loader)
        position.restore(state["position"])
        assert position.epoch == epoch + 1
        rest, _ = follow(loader, position, state)
        if make is stateful:  # torchdata draws another seed when it begins an epoch after a restored end
            first, rest, expected = ([one[:2] for one in part] for part in (first, rest, whole))
            assert first + rest == expected, epoch
        else:
            assert first + rest == whole, epoch


def together(stop_after: int | None, state: Any = None) -> tuple[list[Any], Any]:
    """Iterates over two loaders together, the second of which begins one batch later."""
    seed()
    first, second = shuffled(), with_replacement()
    position = position_of([first, second])
    position.open()
    found: list[Any] = []
    if state is not None:
        position.restore(state["position"])
        rng.restore(state["rng"])
    for _ in range(position.epoch, EPOCHS):
        ours, theirs = iter(first), iter(second)
        is_first = position.state()[0]["start"] is not None and not found and state is None
        for batch in ours:
            found.append((batch.tolist(), [] if is_first else next(theirs).tolist(), torch.rand(()).item()))
            is_first = False
            position.stepped()
            if len(found) == stop_after:
                return found, saved(position)
    position.close()
    return found, None


def test_loaders_that_are_iterated_together() -> None:
    whole, _ = together(None)
    for place in range(1, len(whole)):
        begun, state = together(place)
        rest, _ = together(None, state)
        assert begun + rest == whole, place


SOME_WORKERS: list[dict[str, Any]] = [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}]


@pytest.mark.parametrize(("make", "options"), covering(1, WITH_WORKERS, SOME_WORKERS))
def test_workers_and_a_second_resume(make: Any, options: dict[str, Any]) -> None:
    seed()
    loader = make(**options)
    whole, _ = follow(loader, position_of(loader))
    seed()
    found: list[Any] = []
    state = None
    for stop in (2, 3, None):
        loader = make(**options)
        part, state = follow(loader, position_of(loader), state, stop)
        found += part
        torch.rand(5)
    assert found == whole


@pytest.mark.parametrize(("make", "is_persistent"), covering(1, WITH_WORKERS, [True, False]))
def test_workers_that_end_under_a_notice_start_again(make: Any, is_persistent: bool) -> None:
    """Servers of forkserver end by a signal to the group, with their workers, before the rank has saved."""

    def batches_of(killed_at: int) -> list[Any]:
        seed()
        loader = make(num_workers=2, persistent_workers=is_persistent, multiprocessing_context="fork")
        position, found = position_of(loader), []
        others = multiprocessing.active_children()
        notices = Notices([signal.SIGUSR1], None, None)
        notices.open()
        position.open(lambda: notices.reason is not None)
        for _ in range(2):
            for batch in loader:
                found.append((torch.as_tensor(batch).tolist(), random.random(), torch.rand(1).item()))
                if len(found) == killed_at:
                    signal.raise_signal(signal.SIGUSR1)
                    workers = [one for one in multiprocessing.active_children() if one not in others]
                    assert len(workers) == 2
                    for worker in workers:
                        worker.kill()
                        worker.join(30)
        position.close()
        notices.close()
        return found

    whole = batches_of(0)
    for killed_at in (2, len(whole) // 2 + 1):
        assert batches_of(killed_at) == whole


def test_a_resumed_loader_is_freed_at_once() -> None:
    """Persistent workers of a loader that waits for garbage collection end 5 s late."""
    loader = resumable(num_workers=1, persistent_workers=True)
    _, state = follow(loader, position_of(loader), stop_at_end_of=0)
    loader = resumable(num_workers=1, persistent_workers=True)
    follow(loader, position_of(loader), state)
    freed = weakref.ref(loader)
    gc.disable()
    del loader
    left = freed()
    gc.enable()
    assert left is None


def test_the_loader_is_given_back_as_it_was() -> None:
    loader = shuffled()
    position = position_of(loader)
    position.open()
    with pytest.raises(RuntimeError, match="another Checkpointer"):
        position_of(loader).open()
    position.close()
    assert type(loader) is DataLoader
    assert not any("drivetrain" in name for name in vars(loader))


class Ahead(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader(Stream()), "torchdata.stateful_dataloader.StatefulDataLoader"),
        (ResumableSampler(3), "expected its DataLoader"),
        (Ahead(Numbers()), "may fetch ahead"),
        ([1, 2], "data is a int"),
    ],
    ids=["iterable", "sampler", "own iteration", "list"],
)
def test_data_without_a_position_is_refused(data: Any, message: str) -> None:
    with pytest.raises(TypeError) as raised:
        position_of(data)
    assert message in str(raised.value)


def test_another_loader_than_in_the_checkpoint_is_refused() -> None:
    loader = shuffled()
    position = position_of(loader)
    position.open()
    next(iter(loader))
    state = position.state()
    position.close()
    with pytest.raises(ValueError, match="no ResumableSampler"):
        position_of(resumable()).check(state, True)
    with pytest.raises(ValueError, match="another number of ranks"):
        position.check(state, False)
    with pytest.raises(ValueError, match="generators of its own"):
        position_of(with_generator()).check(state, True)
    with pytest.raises(ValueError, match="2 loaders, expected 1"):
        position_of([shuffled(), shuffled()]).check([state], True)
