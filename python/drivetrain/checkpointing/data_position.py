"""Chooses how to save and restore the position in the training data."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ..data import Prefetcher, ResumableSampler
from .loader import IN_USE, KEY, MapStyleLoader, StatefulLoader
from .position import Direct, Position, Several, Stateful
from .prepared import position_of_prepared

_STATEFUL = "torchdata.stateful_dataloader.StatefulDataLoader"


def position_of(data: Any) -> Position:
    """Returns how to save the position in `data`, the argument of Checkpointer.

    Raises:
        TypeError: The position in `data` cannot be saved. The message says what to use.
    """
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
            return position_of_prepared(data)
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
