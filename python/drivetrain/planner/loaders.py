"""Stands in for the workers of a planned script's DataLoaders, because tensors without values stay in their process."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker

from ..data.prefetch import Prefetcher, moved
from .period import Period

TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"  # the module of its loader
_ALONE = {"num_workers": 0, "timeout": 0, "pin_memory": False}  # what an iterator in this process needs


def load_in_process(
    put: Callable[[Any, str, object], None], loaders: Any, iterators: Any, period: Period, batch: BatchSize
) -> None:
    """Lets a class of loaders load in this process, as the one worker of a loader that has some.

    `put` replaces an attribute. `iterators` is the class of iterators without workers.
    """
    put(loaders, "__init__", taking_batch(loaders.__init__, batch))
    put(loaders, "_get_iterator", _iterator_of(loaders._get_iterator))
    put(iterators, "_next_data", _noted(iterators._next_data, period))


def _iterator_of(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get_iterator(loader: Any) -> Any:
        worker, before = None, {name: getattr(loader, name) for name in (*_ALONE, "dataset")}
        vars(loader).update(_ALONE)
        if before["num_workers"]:
            vars(loader)["dataset"] = copy.copy(loader.dataset)
            worker = torch_worker.WorkerInfo(id=0, num_workers=1, seed=torch.initial_seed(), dataset=loader.dataset)
            if "_num_yielded" not in (getattr(loader, "next_iter_state", None) or ()):
                vars(loader)["next_iter_state"] = None  # of workers, which a plan does not read
        try:
            with _found_by_data_sets(worker):
                if worker is not None and loader.worker_init_fn is not None:
                    loader.worker_init_fn(0)
                batches = plain(loader)
        finally:
            vars(loader).update(before)
        fetcher = batches._dataset_fetcher
        collate = fetcher.collate_fn

        def collated(samples: Any) -> Any:
            """Collates as outside of a worker, where no batch goes into shared memory."""
            with _found_by_data_sets(None):
                return collate(samples)

        fetcher.collate_fn = collated
        batches._of_plan = loader, worker
        return batches

    return get_iterator


@contextlib.contextmanager
def _found_by_data_sets(worker: Any) -> Iterator[None]:
    """Lets data sets find themselves in a worker; None: in none."""
    before, torch_worker._worker_info = torch_worker._worker_info, worker
    try:
        yield
    finally:
        torch_worker._worker_info = before


def _noted(plain: Callable[[Any], Any], period: Period) -> Callable[[Any], Any]:
    """Returns what takes the place of `_next_data`, and lets the period learn of batches."""

    def next_data(batches: Any) -> Any:
        if not hasattr(batches, "_of_plan"):  # torchdata's loader skips the batches of an earlier run
            return plain(batches)
        loader, worker = batches._of_plan
        period.ask(loader)
        try:
            with _found_by_data_sets(worker):
                batch = plain(batches)
        except StopIteration:
            period.pause()
            raise
        period.take(loader)
        return batch

    return next_data


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


class BatchSize:
    """Holds the batch size of all DataLoaders; None keeps the script's. `is_taken` tells whether one has taken it."""

    def __init__(self, size: int | None) -> None:
        self.size, self.is_taken = size, False


def taking_batch(plain: Callable[..., None], batch: BatchSize) -> Callable[..., None]:
    """Returns what takes the place of `DataLoader.__init__`, with another batch size."""

    def init(self: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
        batch_sampler = args[2] if len(args) > 2 else kwargs.get("batch_sampler")
        if batch.size is not None and batch_size is not None and batch_sampler is None:
            batch_size, batch.is_taken = batch.size, True
        plain(self, dataset, batch_size, *args, **kwargs)

    return init
