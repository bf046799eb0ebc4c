"""Follows the DataLoaders of a script: which samples it takes, and puts others in their places."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..data.sampler import in_place_of
from .record import Batch

_SEEN = "_drivetrain_seen"  # an attribute of iterators
_LISTS_OF_FILES = ("samples", "imgs", "files", "filenames", "image_paths", "paths")


class _Iteration:
    """The batches of one iteration over a DataLoader."""

    def __init__(self, loader: int) -> None:
        self.loader, self.count = loader, 0
        self.ahead: deque[Batch] = deque()  # asked for, and not yet taken by the script


class TakenBatches:
    """Notes the batches that this process takes.

    Args:
        replaced: Indices to load in the place of others: by "loader:number" of the batch, by position in it.
    """

    def __init__(self, replaced: Mapping[str, Mapping[str, int]]) -> None:
        self._replaced = replaced
        self._num_iterations = 0
        self._datasets: list[Any] = []
        self._taken: list[Batch] = []
        self.names: dict[str, str] = {}  # of replaced samples, by index

    def begin(self) -> None:
        """Follows all DataLoaders from now on."""
        kind: Any = _BaseDataLoaderIter
        next_index, next_batch, reset = kind._next_index, kind.__next__, kind._reset

        def take_index(iterator: Any) -> Any:
            return self._asked(iterator, next_index(iterator))

        def take_batch(iterator: Any) -> Any:
            batch = next_batch(iterator)
            if ahead := self._of(iterator).ahead:
                taken = ahead.popleft()
                self._taken += [taken] if torch.is_grad_enabled() else []  # no sample of a validation
            return batch

        def begin_again(iterator: Any, *args: Any, **kwargs: Any) -> None:
            vars(iterator).pop(_SEEN, None)
            reset(iterator, *args, **kwargs)

        kind._next_index, kind.__next__, kind._reset = take_index, take_batch, begin_again

    def take(self) -> list[Batch]:
        """Returns the batches taken since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def _of(self, iterator: Any) -> _Iteration:
        if _SEEN not in vars(iterator):
            setattr(iterator, _SEEN, _Iteration(self._num_iterations))
            self._num_iterations += 1
        found: _Iteration = getattr(iterator, _SEEN)
        return found

    def _number_of(self, dataset: Any) -> int:
        for number, known in enumerate(self._datasets):
            if known is dataset:
                return number
        self._datasets.append(dataset)
        return len(self._datasets) - 1

    def _asked(self, iterator: Any, asked: Any) -> Any:
        """Notes the indices that the DataLoader is about to load, and returns those that it shall load."""
        iteration = self._of(iterator)
        is_several = isinstance(asked, list | tuple)
        try:
            indices = [operator.index(one) for one in (asked if is_several else [asked])]
        except TypeError:  # an IterableDataset has none
            indices = []
        iteration.ahead.append(Batch(iteration.loader, iteration.count, self._number_of(iterator._dataset), indices))
        swaps = self._replaced.get(f"{iteration.loader}:{iteration.count}", {})
        iteration.count += 1
        if not swaps:
            return asked
        for position in swaps:
            index = indices[int(position)]
            if (name := name_of(iterator._dataset, index)) is not None:
                self.names[str(index)] = name
        loaded = list(asked) if is_several else [asked]
        for position, donor in swaps.items():
            loaded[int(position)] = in_place_of(loaded[int(position)], donor)
        return loaded if is_several else loaded[0]


def name_of(dataset: Any, index: int) -> str | None:
    """Returns the file of a sample, where the dataset has a list of files, as torchvision's have."""
    if isinstance(dataset, Subset):
        index = operator.index(dataset.indices[index])
        return name_of(dataset.dataset, index) or f"index {index} of the {type(dataset.dataset).__name__}"
    for name in _LISTS_OF_FILES:
        files = getattr(dataset, name, None)
        if isinstance(files, list | tuple) and len(files) == len(dataset):
            file = files[index][0] if isinstance(files[index], list | tuple) and files[index] else files[index]
            return str(file)
    return None
