"""Stands in for the workers of a planned script's DataLoaders, because tensors without values stay in their process."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _SingleProcessDataLoaderIter

from ..data.prefetch import Prefetcher, moved
from .period import Period

TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"  # the module of its loader


class InProcess(_SingleProcessDataLoaderIter):
    """Iterates over a DataLoader in this process. Data sets find themselves in the workers that the loader has.

    Workers take turns, as in torch, and each has its own shallow copy of the data set.
    """

    period: Period  # which learns of the batches; set for a plan

    def __init__(self, loader: DataLoader[Any]) -> None:
        is_pinned, loader.pin_memory = loader.pin_memory, False
        try:
            if loader.num_workers:
                _BaseDataLoaderIter.__init__(self, loader)
            else:
                super().__init__(loader)
        finally:
            loader.pin_memory = is_pinned
        self._loader = loader
        self._turn = 0
        self._fetchers: dict[int, Any] = {}
        self._ended: set[int] = set()

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._turn = 0
        self._ended.clear()
        if self._dataset_kind == _DatasetKind.Iterable:
            self._fetchers.clear()

    def _next_data(self) -> Any:
        return _noted(self.period, self._loader, self._of_worker if self._num_workers else super()._next_data)

    def _of_worker(self) -> Any:
        index = self._next_index()  # type: ignore[no-untyped-call]
        while len(self._ended) < self._num_workers:
            number, self._turn = self._turn % self._num_workers, self._turn + 1
            if number in self._ended:
                continue
            try:
                with self._as_worker(number):
                    return self._fetchers[number].fetch(index)
            except StopIteration:  # of this worker's part of an iterable data set
                self._ended.add(number)
        raise StopIteration

    @contextlib.contextmanager
    def _as_worker(self, number: int) -> Iterator[None]:
        """Lets code find itself in a worker, and makes the worker at its first turn."""
        loader, module = self._loader, torch_worker
        known = self._fetchers.get(number)
        dataset = copy.copy(loader.dataset) if known is None else known.dataset_of_worker
        info = torch_worker.WorkerInfo(
            id=number, num_workers=self._num_workers, seed=int(self._base_seed) + number, dataset=dataset
        )
        before, module._worker_info = module._worker_info, info
        try:
            if known is None:
                if loader.worker_init_fn is not None:
                    loader.worker_init_fn(number)
                made = _DatasetKind.create_fetcher(
                    self._dataset_kind, dataset, self._auto_collation, _outside(self._collate_fn), self._drop_last
                )
                made.dataset_of_worker = dataset
                self._fetchers[number] = made
            yield
        finally:
            module._worker_info = before


def _noted(period: Period, loader: DataLoader[Any], next_batch: Callable[[], Any]) -> Any:
    """Returns the next batch of a loader, and lets the period learn of it."""
    period.ask(loader)
    try:
        batch = next_batch()
    except StopIteration:
        period.pause()
        raise
    period.take(loader)
    return batch


def stand_in_for_torchdata(period: Period, take: Callable[[Any], Any]) -> Callable[[ModuleType], None]:
    """Returns what lets StatefulDataLoader, whose class has iterators of its own, load in this process.

    Args:
        period: Learns of the batches.
        take: Returns what takes the place of a loader's `__init__`.
    """

    def stand_in(module: ModuleType) -> None:
        class InProcessWithState(module._StatefulSingleProcessDataLoaderIter):  # type: ignore[misc, name-defined]
            def __init__(self, loader: Any, state: Any) -> None:
                facts = ("num_workers", "timeout", "pin_memory")
                before = {name: getattr(loader, name) for name in facts}
                vars(loader).update(num_workers=0, timeout=0, pin_memory=False)
                is_of_workers = state is not None and self._NUM_YIELDED not in state  # which a plan does not read
                try:
                    super().__init__(loader, None if is_of_workers else state)
                finally:
                    vars(loader).update(before)
                self._loader = loader

            def _next_data(self) -> Any:
                return _noted(period, self._loader, super()._next_data)

        def get_iterator(loader: Any) -> Any:
            state, loader.next_iter_state = loader.next_iter_state, None
            return InProcessWithState(loader, state)

        module.StatefulDataLoader._get_iterator = get_iterator
        module.StatefulDataLoader.__init__ = take(module.StatefulDataLoader.__init__)

    return stand_in


def loaded_ahead(prefetcher: Prefetcher) -> Iterator[Any]:
    """Yields the batches of `prefetch` without its thread, which a plan does not follow, and keeps as many as it."""
    waiting: deque[Any] = deque()
    for batch in prefetcher.loader:
        device = prefetcher.device
        waiting.append(batch if device is None else moved(batch, device, is_pinned=False))
        if len(waiting) > prefetcher.depth + 1:  # the buffer's, and the one that waits for a place there
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def _outside(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that collates as outside of a worker, where no batch goes into shared memory."""

    def collated(samples: Any) -> Any:
        before, torch_worker._worker_info = torch_worker._worker_info, None
        try:
            return collate(samples)
        finally:
            torch_worker._worker_info = before

    return collated


def iterator_of(period: Period) -> Callable[[DataLoader[Any]], _BaseDataLoaderIter]:
    """Returns what takes the place of `DataLoader._get_iterator`."""
    InProcess.period = period
    return lambda loader: InProcess(loader)


def taking_batch(plain: Callable[..., None], batch: int | None, on_taken: Callable[[], None]) -> Callable[..., None]:
    """Returns what takes the place of `DataLoader.__init__`, with another batch size.

    Args:
        plain: The method.
        batch: The batch size; None keeps the script's.
        on_taken: Called for each loader that takes it.
    """

    def init(self: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
        batch_sampler = args[2] if len(args) > 2 else kwargs.get("batch_sampler")
        if batch is not None and batch_size is not None and batch_sampler is None:
            batch_size = batch
            on_taken()
        plain(self, dataset, batch_size, *args, **kwargs)

    return init
