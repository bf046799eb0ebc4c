"""Chooses how to save and restore the position in the training data, which may be loaders that Accelerate prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ...data import Prefetcher, ResumableSampler
from . import rng
from .loader import IN_USE, KEY, CountedBatches, MapStyleLoader, StatefulLoader
from .position import Direct, Position, Several, Stateful

_STATEFUL = "torchdata.stateful_dataloader.StatefulDataLoader"


def position_of(data: Any) -> Position:
    """Returns how to save the position in `data`, the argument of Checkpointer."""
    if data is None:
        return Position()
    if isinstance(data, Prefetcher):
        if not getattr(data.loader, "num_workers", 1):
            raise TypeError(
                "data prefetches from a DataLoader with num_workers=0, whose dataset draws random numbers from the "
                "training's generators too early: give the DataLoader num_workers=1 or more"
            )
        if isinstance(data.loader, Stateful):
            raise TypeError(
                f"data prefetches from a {type(data.loader).__name__}, whose state counts the batches loaded ahead: "
                "prefetch from a DataLoader with drivetrain.data.ResumableSampler, or pass the loader without prefetch"
            )
        return position_of(data.loader)
    if isinstance(data, list | tuple):
        return Several([position_of(one) for one in data])
    if isinstance(data, ResumableSampler):
        raise TypeError("data is a ResumableSampler, expected its DataLoader, which knows what the training consumed")
    if isinstance(data, DataLoader):
        if hasattr(data, KEY):
            raise RuntimeError(IN_USE)
        if data.num_workers > 0 and not data.in_order:
            raise TypeError(
                "data has in_order=False, with which batches come in an order that no restart repeats: pass "
                "in_order=True to the DataLoader, or num_workers=0"
            )
        if hasattr(data, "base_dataloader"):  # It has a state_dict() that does not restore the order of a shuffle.
            return _position_of_prepared(data)
        if isinstance(data, Stateful):
            return StatefulLoader(data)
        if isinstance(data.dataset, IterableDataset):
            raise TypeError(
                f"data is a DataLoader over the IterableDataset {type(data.dataset).__name__}, whose position it "
                f"cannot tell: use {_STATEFUL}, and give the dataset state_dict() and load_state_dict()"
            )
        if type(data).__iter__ is not DataLoader.__iter__:
            raise TypeError(
                f"data is a {type(data).__name__}, which iterates in a way of its own and may fetch ahead: pass a "
                f"DataLoader or {_STATEFUL}"
            )
        return MapStyleLoader(data)
    if isinstance(data, Stateful):
        return Direct(data)
    raise TypeError(
        f"data is a {type(data).__name__}, expected a DataLoader, {_STATEFUL}, or an object with state_dict() and "
        "load_state_dict()"
    )


def _position_of_prepared(data: Any) -> Position:
    """Returns how to save the position in a prepared loader."""
    from accelerate.data_loader import DataLoaderShard

    if type(data) is not DataLoaderShard or type(data.base_dataloader) is not DataLoader or data.skip_batches:
        raise TypeError(
            f"data is Accelerate's {type(data).__name__} over a {type(data.base_dataloader).__name__}, whose position "
            "cannot be saved. Leave the loader out of accelerator.prepare(), and give it drivetrain.data."
            "ResumableSampler, which splits samples over ranks"
        )
    return _Prepared(data)


class _Prepared(MapStyleLoader):
    """A DataLoaderShard, which yields a batch once it has fetched the next one from the loader that it wraps.

    The wrapped loader is counted. All batches that it has handed out but the last one were trained on. That one is
    loaded again after a restart. A dataset that draws random numbers in this process then draws the same ones again.
    """

    def __init__(self, shard: Any) -> None:
        super().__init__(shard.base_dataloader)
        self._shard = shard
        self._sampler = None  # the shard calls set_epoch() for it
        self._order: Any = shard.get_sampler()
        self._iteration = shard.iteration  # the shard's number of the current epoch
        self._before: Any = None  # random states before the last fetch, if the dataset shares them

    def call_before_fetch(self, call: Callable[[], None]) -> None:
        raise TypeError("data was prepared by Accelerate, which fetches ahead: a callback sees no single batches")

    def state(self) -> Any:
        common = super().state()
        is_ahead = common["start"] is not None and self.batches > 0 and not self.is_exhausted
        return common | {
            "batches": common["batches"] - is_ahead,
            "iteration": self._iteration if common["start"] is not None else self._shard.iteration,
            "seed": getattr(self._order, "initial_seed", None),
            "before": self._before if is_ahead else None,
        }

    def check(self, state: Any, is_same_world: bool) -> None:
        if "iteration" not in state:
            raise ValueError("data was prepared by Accelerate, but the checkpoint is of a loader that was not")
        super().check(state, is_same_world)

    def restore(self, state: Any) -> None:
        super().restore(state)
        self._iteration = self._shard.iteration = state["iteration"]
        if state["seed"] is not None:
            self._order.initial_seed = state["seed"]
        self._shard.iteration += self._is_next

    def begin(self) -> Iterator[Any]:
        self._iteration = self._shard.iteration
        return super().begin()

    def _hand_out(self, batches: Iterator[Any], state: Any) -> CountedBatches:
        return _Ahead(batches, self, state["before"] if state else None)

    def _own_generators(self) -> list[Any]:
        if hasattr(self._order, "initial_seed"):  # seeds its generator in each epoch
            return []
        found = [self._loader.generator, getattr(self._order, "generator", None)]
        return list({id(one): one for one in found if one is not None}.values())


class _Ahead(CountedBatches):
    """Fetches the first batch with given random states, and remembers those before each later fetch."""

    def __init__(self, batches: Iterator[Any], counted: _Prepared, first: Any) -> None:
        super().__init__(batches, counted)
        self._prepared, self._first = counted, first
        self._is_shared = counted._loader.num_workers == 0

    def __next__(self) -> Any:
        first, self._first = self._first, None
        if not self._is_shared:
            return super().__next__()
        if first is None:
            self._prepared._before = rng.capture_host()
            return super().__next__()
        self._prepared._before, now = first, rng.capture_host()
        rng.restore_host(first)
        try:
            return super().__next__()
        finally:
            rng.restore_host(now)
