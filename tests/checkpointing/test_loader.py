"""Tests that a loop continues with the next batch: each loader, every place of an epoch, and a second resume.

Loaders that a restart finds changed continue rightly, or raise an error.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import multiprocessing
import random
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from drivetrain.checkpointing import Checkpointer
from drivetrain.checkpointing.preemption.notices import Notices
from drivetrain.checkpointing.restore import warn_of_differences
from drivetrain.checkpointing.state import rng
from drivetrain.checkpointing.state.data_position import position_of
from drivetrain.checkpointing.state.encoding import Encoder, decode
from drivetrain.data import ResumableSampler, prefetch
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


# ---- Loaders and loops that a restart finds changed, or that draw in ways of their own: right, or an error.

ROWS = 12
Loop = Callable[[Any, Any, int], Iterator[Any]]


class Buckets:
    """Batches in a random order, whose generator draws for `iter()`, at the first batch, or with each batch."""

    def __init__(self, kind: str, draws: str) -> None:
        self.inner = {"deep": make_generator(kind)}
        self.draws = draws

    def __len__(self) -> int:
        return ROWS // 2

    def __iter__(self) -> Iterator[list[int]]:
        if self.draws == "at iter()":
            return iter([[2 * one, 2 * one + 1] for one in drawn_order(self.inner["deep"], ROWS // 2)])
        return self.drawn_later()

    def drawn_later(self) -> Iterator[list[int]]:
        left = list(range(ROWS // 2))
        if self.draws == "first":
            left = [left[at] for at in drawn_order(self.inner["deep"], len(left))]
        while left:
            at = drawn_order(self.inner["deep"], len(left))[0] if self.draws == "each" else 0
            one = left.pop(at)
            yield [2 * one, 2 * one + 1]


def make_generator(kind: str) -> Any:
    return {
        "torch": lambda: torch.Generator().manual_seed(3),
        "python": lambda: random.Random(3),
        "numpy": lambda: np.random.default_rng(3),
        "numpy state": lambda: np.random.RandomState(3),
        "torch's global": lambda: None,
        "python's global": lambda: random,
    }[kind]()


def drawn_order(generator: Any, count: int) -> list[int]:
    if generator is None or isinstance(generator, torch.Generator):
        return torch.randperm(count, generator=generator).tolist()
    if generator is random or isinstance(generator, random.Random):
        return generator.sample(range(count), count)
    return [int(one) for one in generator.permutation(count)]


def plain_loop(ckpt: Any, loader: Any, epoch: int) -> Iterator[Any]:
    for batch in loader:
        yield batch
        ckpt.step()


def peek_loop(ckpt: Any, loader: Any, epoch: int) -> Iterator[Any]:
    next(iter(loader))
    yield from plain_loop(ckpt, loader, epoch)


def accuracy_loop(ckpt: Any, loader: Any, epoch: int) -> Iterator[Any]:
    yield from plain_loop(ckpt, loader, epoch)
    for _ in loader:
        assert ckpt.steps


def peek_and_accuracy_loop(ckpt: Any, loader: Any, epoch: int) -> Iterator[Any]:
    next(iter(loader))
    yield from accuracy_loop(ckpt, loader, epoch)
    if epoch == 1:
        ckpt.save()


def seen_batches(folder: Path, make: Callable[[], Any], loop: Loop, stop: int | None = None) -> list[Any]:
    """Returns (epoch, batch) for each batch of a training that ends at a step, or after all epochs."""
    torch.manual_seed(0)
    random.seed(0)
    seen: list[Any] = []
    model, loader = nn.Linear(1, 1), make()
    with Checkpointer(folder, model=model, data=loader, every=None) as ckpt:
        for epoch in range(ckpt.epoch, EPOCHS):
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            for batch in loop(ckpt, loader, epoch):
                seen.append((epoch, batch.tolist()))
                if len(seen) == stop:
                    ckpt.step()
                    return seen
    return seen


def shuffled_rows(**options: Any) -> Any:
    return DataLoader(range(ROWS), 2, shuffle=True, **options)  # type: ignore[arg-type]


def resumable_rows(size: int = 2, length: int = ROWS, **options: Any) -> Any:
    return DataLoader(range(length), size, sampler=ResumableSampler(length), **options)  # type: ignore[arg-type]


KINDS = ("torch", "python", "numpy", "numpy state", "torch's global", "python's global")
DRAWS = ("at iter()", "first", "each")
WITHOUT_WORKERS = [(*row, 0) for row in itertools.product(KINDS, DRAWS)]


@pytest.mark.parametrize(("kind", "draws", "workers"), [*WITHOUT_WORKERS, *covering(1, KINDS, DRAWS, [2])])
def test_samplers_that_draw_by_themselves(kind: str, draws: str, workers: int, tmp_path: Path) -> None:
    def make() -> Any:
        options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        return DataLoader(range(ROWS), batch_sampler=Buckets(kind, draws), **options)  # type: ignore[arg-type]

    whole = seen_batches(tmp_path / "whole", make, plain_loop)
    for stop in (8,) if workers else (4, 6, 8, 15):
        folder = tmp_path / str(stop)
        assert seen_batches(folder, make, plain_loop, stop) + seen_batches(folder, make, plain_loop) == whole, stop


WORKERS = ((0, 0, 0), (2, 2, 2), (0, 2, 0), (0, 2, 2), (2, 0, 0), (2, 0, 2))


@pytest.mark.parametrize(("workers", "kind", "draws"), covering(1, WORKERS, ("python", "torch's global"), DRAWS[:2]))
def test_an_epoch_that_is_interrupted_twice(kind: str, draws: str, workers: tuple[int, ...], tmp_path: Path) -> None:
    def make(workers: int) -> Callable[[], Any]:
        options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        return lambda: DataLoader(range(ROWS), batch_sampler=Buckets(kind, draws), **options)  # type: ignore[arg-type]

    whole = seen_batches(tmp_path / "whole", make(workers[0]), plain_loop)
    folder = tmp_path / "parts"
    found = seen_batches(folder, make(workers[0]), plain_loop, 8)  # two batches of the second epoch
    with Checkpointer(folder, model=nn.Linear(1, 1), data=make(workers[1])(), every=None) as ckpt:
        ckpt.save()  # before it is iterated over
    found += seen_batches(folder, make(workers[1]), plain_loop, 1)
    found += [one for one in seen_batches(folder, make(workers[2]), plain_loop) if one[0] == 1]
    assert found == [one for one in whole if one[0] <= 1]


class CountsEpochs(Sampler[int]):
    """Counts its epochs, at the begin of each or, as Accelerate's, at its end. With workers that is early."""

    def __init__(self, at_end: bool) -> None:
        self.epoch, self._at_end = 0, at_end

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += not self._at_end
        yield from order
        self.epoch += self._at_end


class CountsEpochsOfBatches(CountsEpochs):
    """Counts as a batch sampler, which has no sampler."""

    def __iter__(self) -> Iterator[Any]:
        yield from (list(pair) for pair in zip(*[super().__iter__()] * 2, strict=True))


def prefetch_loop(ckpt: Any, loader: Any, epoch: int) -> Iterator[Any]:
    for batch in prefetch(loader, "cpu"):
        time.sleep(0.001)  # the thread gets ahead
        yield batch
        ckpt.step()


@pytest.mark.parametrize(("loop", "workers"), [(plain_loop, 0), (plain_loop, 2), (prefetch_loop, 0)])
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_samplers_that_count_epochs_themselves(
    name: str, at_end: bool, loop: Loop, workers: int, tmp_path: Path
) -> None:
    def make() -> Any:
        options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        if name == "batch_sampler":
            return DataLoader(range(ROWS), batch_sampler=CountsEpochsOfBatches(at_end), **options)  # type: ignore[arg-type]
        return DataLoader(range(ROWS), 2, sampler=CountsEpochs(at_end), **options)  # type: ignore[arg-type]

    whole = seen_batches(tmp_path / "whole", make, loop)
    assert len({str(batch) for _, batch in whole}) == len(whole)  # each epoch has another order
    for stop in (1, 5, 6, 8, 12, 15):
        folder = tmp_path / str(stop)
        assert seen_batches(folder, make, loop, stop) + seen_batches(folder, make, loop) == whole, stop


def test_a_counted_sampler_and_a_look_at_the_first_batch(tmp_path: Path) -> None:
    """The pass without a step counts an epoch of its own, and the restart has one more of them."""

    def make() -> Any:
        return DataLoader(range(ROWS), 2, sampler=CountsEpochs(at_end=False))  # type: ignore[arg-type]

    found = seen_batches(tmp_path, make, plain_loop, 3)
    found += seen_batches(tmp_path, make, peek_loop)[: ROWS // 2 - 3]
    assert sorted(row for _, batch in found for row in batch) == list(range(ROWS))


@pytest.mark.filterwarnings("error")
def test_a_loader_that_is_made_again_in_each_epoch_warns(tmp_path: Path) -> None:
    loader = shuffled_rows()
    with Checkpointer(tmp_path, model=nn.Linear(1, 1), data=loader, every=None) as ckpt:
        for _ in loader:
            ckpt.step()
        ckpt.step()  # as that of a last window of micro-batches
        with pytest.warns(UserWarning, match="data has ended, and steps are made without another batch of it"):
            ckpt.step()
        ckpt.step()  # It warns once.


def test_copies_of_a_counted_loader_are_loaders(tmp_path: Path) -> None:
    loader = shuffled_rows()
    with Checkpointer(tmp_path, model=nn.Linear(1, 1), data=loader, every=None) as ckpt:
        next(iter(loader))
        ckpt.step()
        for other in (copy.copy(loader), type(loader)(range(ROWS), 2)):
            assert len(list(other)) == ROWS // 2
        assert ckpt._state._position.state()["batches"] == 1


@pytest.mark.parametrize("make", [shuffled_rows, resumable_rows], ids=["shuffled", "resumable"])
@pytest.mark.parametrize("loop", [peek_loop, accuracy_loop, peek_and_accuracy_loop], ids=lambda loop: loop.__name__)
def test_iterations_without_a_step_are_no_epochs(make: Callable[[], Any], loop: Loop, tmp_path: Path) -> None:
    whole = seen_batches(tmp_path / "whole", make, loop)
    assert [epoch for epoch, _ in whole] == sorted([0, 1, 2] * (ROWS // 2))
    for stop in (1, 3, 6, 8, 12, 17):
        folder = tmp_path / str(stop)
        found = seen_batches(folder, make, loop, stop)
        if loop is not accuracy_loop and stop in (6, 12):  # No batch of the epoch is left to look at.
            with pytest.raises(RuntimeError, match="raised StopIteration"):
                seen_batches(folder, make, loop)
            continue
        found += seen_batches(folder, make, loop)
        assert found == whole, stop


def test_a_restart_between_epochs_after_an_iteration_without_a_step(tmp_path: Path) -> None:
    """The last save is one after the training has measured its accuracy on the same data."""
    whole = seen_batches(tmp_path / "whole", resumable_rows, accuracy_loop)

    def first_epoch(ckpt: Any, loader: Any, epoch: int) -> Iterator[Any]:
        yield from accuracy_loop(ckpt, loader, epoch)
        ckpt.save()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        seen_batches(tmp_path / "run", resumable_rows, first_epoch)
    assert seen_batches(tmp_path / "run", resumable_rows, accuracy_loop) == whole[ROWS // 2 :]


def test_a_script_that_only_saves_counts_every_iteration(tmp_path: Path) -> None:
    def save_loop(ckpt: Any, loader: Any, epoch: int) -> Iterator[Any]:
        yield from loader
        ckpt.save()
        if epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        seen_batches(tmp_path, resumable_rows, save_loop)
    assert [epoch for epoch, _ in seen_batches(tmp_path, resumable_rows, save_loop)] == [2] * (ROWS // 2)


def test_batches_in_any_order_are_refused() -> None:
    for kind in (DataLoader, StatefulDataLoader):
        with pytest.raises(TypeError, match=r"in_order=False.* pass in_order=True"):
            position_of(kind(range(ROWS), num_workers=2, in_order=False))  # type: ignore[arg-type]
    position_of(DataLoader(range(ROWS), in_order=False))  # type: ignore[arg-type]


def test_an_iterator_of_before_the_block_raises_at_the_first_step(tmp_path: Path) -> None:
    loader = shuffled_rows()
    batches = iter(loader)
    ckpt = Checkpointer(tmp_path, model=nn.Linear(1, 1), data=loader, every=None)
    with ckpt:
        next(batches)
        with pytest.raises(RuntimeError, match=r"data was not iterated over .* Call iter\(\) on the loader"):
            ckpt.step()


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader], ids=["plain", "stateful"])
def test_a_grown_dataset_or_another_batch_size_raises_within_an_epoch(kind: Any, tmp_path: Path) -> None:
    def make(size: int, length: int) -> Callable[[], Any]:
        return lambda: kind(range(length), size, shuffle=True)

    seen_batches(tmp_path, make(2, ROWS), plain_loop, 3)
    for size, length, message in (
        (3, ROWS, "another batch_size, 3, expected 2"),
        (2, 20, "dataset, 20, expected 12"),
    ):
        with pytest.raises(ValueError, match=f"{message}.* drivetrain.data.ResumableSampler"):
            seen_batches(tmp_path, make(size, length), plain_loop)


def test_a_grown_dataset_begins_with_the_next_epoch(tmp_path: Path) -> None:
    seen_batches(tmp_path, shuffled_rows, plain_loop)
    seen_batches(tmp_path, lambda: DataLoader(range(30), 2, shuffle=True), plain_loop)  # type: ignore[arg-type]


def test_a_resumable_sampler_takes_another_batch_size_and_refuses_another_length(tmp_path: Path) -> None:
    first = seen_batches(tmp_path, resumable_rows, plain_loop, 2)
    rest = seen_batches(tmp_path, lambda: resumable_rows(4), plain_loop)
    samples = [sample for epoch, batch in first + rest if epoch == 0 for sample in batch]
    assert sorted(samples) == list(range(ROWS))
    with pytest.raises(ValueError, match="length"):
        seen_batches(tmp_path, lambda: resumable_rows(2, 30), plain_loop)


class Counter:
    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("a state of another number of ranks was loaded")


@pytest.mark.parametrize("make", [Counter, lambda: StatefulDataLoader(range(ROWS), 2)], ids=["object", "stateful"])
def test_another_number_of_ranks_raises_where_no_sampler_knows_it(make: Callable[[], Any]) -> None:
    position = position_of(make())
    state = position.state()
    position.check(state, True)
    with pytest.raises(ValueError, match=r"on as many ranks only\. .*ResumableSampler"):
        position.check(state, False)


def test_the_warning_claims_what_was_checked(tmp_path: Path) -> None:
    seen_batches(tmp_path, resumable_rows, plain_loop, 2)
    with Checkpointer(tmp_path, model=nn.Linear(1, 1), data=resumable_rows(), every=None) as ckpt:
        checkpoint = ckpt.restored
        assert ckpt.position.resumes_on(1)
        assert not ckpt.position.resumes_on(4)  # its sampler splits the samples over one rank
    assert not position_of(None).resumes_on(2)
    for resumes, text in ((True, "each once per epoch"), (False, "up to the script")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_differences(checkpoint, 2, resumes, False, [])
        assert text in str(caught[0].message)


def test_a_batch_by_hand_after_the_last_step_of_an_epoch(tmp_path: Path) -> None:
    seen_batches(tmp_path, shuffled_rows, plain_loop, ROWS // 2)
    loader = shuffled_rows()
    with Checkpointer(tmp_path, model=nn.Linear(1, 1), data=loader, every=None), pytest.raises(StopIteration):
        next(iter(loader))


class PerBatch:
    """Draws each batch from Python's default generator."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(ROWS // 2):
            yield [random.randrange(ROWS), random.randrange(ROWS)]

    def __len__(self) -> int:
        return ROWS // 2


def prologue_loop(ckpt: Any, loader: Any, epoch: int) -> Iterator[Any]:
    drawn = torch.rand(1)
    for batch in loader:
        yield batch + drawn
        ckpt.step()


def drawing_loop(ckpt: Any, loader: Any, epoch: int) -> Iterator[Any]:
    for batch in loader:
        yield batch + random.randrange(ROWS)
        ckpt.step()


def test_a_sampler_without_workers_may_draw_each_batch_as_the_script_does(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(range(ROWS), batch_sampler=PerBatch())  # type: ignore[arg-type]

    whole = seen_batches(tmp_path / "whole", make, drawing_loop)
    for stop in (1, 3, 6, 8):
        folder = tmp_path / str(stop)
        found = seen_batches(folder, make, drawing_loop, stop) + seen_batches(folder, make, drawing_loop)
        assert found == whole, stop


def ahead_loop(ckpt: Any, loader: Any, epoch: int) -> Iterator[Any]:
    batches = iter(loader)
    following = next(batches)
    while following is not None:
        batch, following = following, next(batches, None)
        yield batch
        ckpt.step()


def in_phases(first: Any, second: Any) -> Iterator[Any]:
    yield from first
    yield from second


def cycled(first: Any, second: Any) -> Iterator[Any]:
    def cycle() -> Iterator[Any]:
        while True:
            yield from second

    for pair in zip(first, cycle(), strict=False):
        yield torch.stack(pair)


def seen_of_two(folder: Path, order: Callable[[Any, Any], Iterator[Any]], stop: int | None = None) -> list[Any]:
    """Returns the batches of two epochs over two loaders, or those up to a step."""
    torch.manual_seed(0)
    seen: list[Any] = []
    loaders = [DataLoader(range(6), 2, shuffle=True), shuffled_rows()]  # type: ignore[arg-type]
    with Checkpointer(folder, model=nn.Linear(1, 1), data=loaders, every=None) as ckpt:
        for _ in range(ckpt.epoch, 2):
            for batch in order(*loaders):
                seen.append(batch.tolist())
                ckpt.step()
                if len(seen) == stop:
                    return seen
    return seen


def test_what_the_documentation_says_is_not_seen(tmp_path: Path) -> None:
    """The table of docs/checkpoints.md names these."""

    def drawn_per_batch() -> Any:
        options: Any = {"num_workers": 2, "multiprocessing_context": "fork"}
        return DataLoader(range(ROWS), batch_sampler=PerBatch(), **options)  # type: ignore[arg-type]

    for make, loop in ((drawn_per_batch, drawing_loop), (shuffled_rows, prologue_loop)):
        whole = seen_batches(tmp_path / f"{loop.__name__}-whole", make, loop)
        folder = tmp_path / loop.__name__
        found = seen_batches(folder, make, loop, 3) + seen_batches(folder, make, loop)
        assert len(found) == len(whole)
        assert found != whole
    whole = seen_batches(tmp_path / "ahead-whole", shuffled_rows, ahead_loop)
    found = seen_batches(tmp_path / "ahead", shuffled_rows, ahead_loop, 3)
    assert found + seen_batches(tmp_path / "ahead", shuffled_rows, ahead_loop) == whole[:3] + whole[4:]
    for order, stop in ((in_phases, ROWS // 2 + 2), (cycled, 3)):
        whole = seen_of_two(tmp_path / f"{order.__name__}-whole", order)
        found = seen_of_two(tmp_path / order.__name__, order, stop)
        assert found + seen_of_two(tmp_path / order.__name__, order) != whole
    seen_batches(tmp_path / "changed", shuffled_rows, plain_loop, 2)
    other = seen_batches(
        tmp_path / "changed",
        lambda: DataLoader(range(100, 100 + ROWS), 2, shuffle=True),
        plain_loop,  # type: ignore[arg-type]
    )
    assert min(min(batch) for _, batch in other) >= 100
