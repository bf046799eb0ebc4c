"""Datasets over another one: `LeaveOut` never loads some samples, and `SeededSamples` seeds their random transforms."""

import operator
from collections.abc import Iterable
from typing import Any

from torch.utils.data import Dataset

from ..ddp.logical_ranks import random_streams
from .sampler import ResumableSampler, in_place_of


class _OverDataset(Dataset[Any]):
    """Has the length and the further attributes of a map-style dataset, but no methods that Python's protocols use."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # Pickle asks before there is a dataset. DataLoader asks for __getitems__, which would pass this class by.
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)


class LeaveOut(_OverDataset):
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


class SeededSamples(_OverDataset):
    """A map-style dataset that loads each sample with random numbers of its own.

    They follow from the sampler's seed, its epoch and the sample's index. The number of ranks and workers, the batch
    and what was loaded before make no difference. This holds for the default generators of torch, Python and NumPy,
    which continue afterwards as if nothing had been drawn. Further attributes come from the dataset.

    Args:
        dataset: A map-style dataset with random transforms.
        sampler: The sampler of its DataLoader. Its indices know their epoch from now on.

    Raises:
        TypeError: `sampler` is no ResumableSampler.
    """

    def __init__(self, dataset: Any, sampler: ResumableSampler) -> None:
        if not isinstance(sampler, ResumableSampler):
            raise TypeError(f"sampler is a {type(sampler).__name__}, expected a drivetrain.data.ResumableSampler")
        super().__init__(dataset)
        sampler.marks_epochs = True
        self._seed = sampler.seed

    def __getitem__(self, index: Any) -> Any:
        before = random_streams.states()
        place = int(operator.index(index))  # plain, as the dataset expects it
        random_streams.begin(random_streams.Use.SAMPLE, self._seed, place, getattr(index, "epoch", 0))
        try:
            return self.dataset[place]
        finally:
            random_streams.restore(before)


def position_of(index: int, length: int) -> int:
    """Returns the position of an index, which may be negative. Raises IndexError if it is out of range."""
    position = index + length if index < 0 else index
    if not 0 <= position < length:
        raise IndexError(f"index is {index}, expected {-length} to {length - 1}")
    return position
