"""`SeededSamples`: a dataset whose random transforms do not depend on where a sample is loaded."""

from __future__ import annotations

import operator
from typing import Any

from ..ddp.logical_ranks import random_streams
from .over_dataset import OverDataset
from .sampler import ResumableSampler


class SeededSamples(OverDataset):
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
