"""`LeaveOut`: a dataset some of whose samples are never loaded."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from .over_dataset import OverDataset
from .sampler import in_place_of


class LeaveOut(OverDataset):
    """A map-style dataset that gives the next sample in the place of each that is left out.

    Lengths, batches and positions stay as they are, so that a checkpoint of the training without it continues with it.
    `drivetrain explain` names samples to leave out. Further attributes come from the dataset.

    Args:
        dataset: A map-style dataset.
        indices: Indices of the samples to leave out, 0 to `len(dataset) - 1`.

    Raises:
        TypeError: `dataset` has no length, or an index is no integer.
        IndexError: An index is out of range.
        ValueError: Nothing is left.
    """

    def __init__(self, dataset: Any, indices: Iterable[int]) -> None:
        length = len(dataset)
        out = {operator.index(index) for index in indices}
        if wrong := [index for index in out if not 0 <= index < length]:
            raise IndexError(
                f"indices has {min(wrong)}, expected 0 to {length - 1} as the dataset has {length} samples"
            )
        if out and len(out) == length:
            raise ValueError(f"indices has all {length} samples of the dataset, expected some to be left")
        super().__init__(dataset)
        self._instead: dict[int, int] = {}
        for index in out:
            other = index
            while other in out:
                other = (other + 1) % length
            self._instead[index] = other

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self._index(index)]

    def __getitems__(self, indices: Any) -> Any:
        found = [self._index(index) for index in indices]
        if (several := getattr(self.dataset, "__getitems__", None)) is not None:
            return several(found)
        return [self.dataset[index] for index in found]

    def _index(self, index: Any) -> Any:
        place = operator.index(index)
        other = self._instead.get(place + len(self.dataset) if place < 0 else place)
        return index if other is None else in_place_of(index, other)
