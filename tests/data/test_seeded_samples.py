"""Tests that `SeededSamples` gives a sample the same random numbers wherever it is loaded."""

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from drivetrain.data import LeaveOut, ResumableSampler, SeededSamples


class Noisy(Dataset[Any]):
    """Has the index of a sample and what a random transform draws for it."""

    name = "noisy"

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        return torch.tensor([index, *torch.rand(2).tolist(), random.random(), np.random.random()], dtype=torch.float64)


def epochs(
    world_size: int, batch_size: int, begin: int = 0, over: Any = lambda samples: samples, **options: Any
) -> list[dict[int, list[float]]]:
    """Returns what all ranks load in two epochs, by index. over: makes a dataset of the seeded samples."""
    found: list[dict[int, list[float]]] = [{}, {}]
    for rank in range(world_size):
        torch.manual_seed(rank)
        sampler = ResumableSampler(24, world_size, rank, seed=3)
        loader = DataLoader(over(SeededSamples(Noisy(), sampler)), batch_size, sampler=sampler, **options)
        for epoch in range(begin, 2):
            sampler.set_epoch(epoch)
            for batch in loader:
                found[epoch].update({int(row[0]): row[1:].tolist() for row in batch})
    return found


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}, {"num_workers": 1}]
)
def test_ranks_and_workers_make_no_difference(options: dict[str, Any]) -> None:
    first, second = epochs(1, 4)
    assert len(first) == len(second) == 24
    assert all(one != other for one, other in zip(first.values(), second.values(), strict=True))
    assert len({tuple(values) for values in [*first.values(), *second.values()]}) == 48
    for world_size, batch_size in ((1, 3), (2, 4)):
        assert epochs(world_size, batch_size, **options) == [first, second]
    assert epochs(2, 4, begin=1, **options)[1] == second


@pytest.mark.parametrize(
    "over",
    [
        lambda samples: LeaveOut(samples, [3]),
        lambda samples: SeededSamples(Subset(samples.dataset, range(24)), ResumableSampler(24, seed=3)),
        lambda samples: SeededSamples(LeaveOut(samples.dataset, [3]), ResumableSampler(24, seed=3)),
    ],
    ids=["left out", "of a subset", "of those not left out"],
)
def test_datasets_over_datasets(over: Any) -> None:
    """DataLoader asks a Subset and a LeaveOut for all samples of a batch at once."""
    alone = epochs(1, 4, over=over)
    assert all(one != other for one, other in zip(alone[0].values(), alone[1].values(), strict=True))
    assert epochs(2, 3, over=over, num_workers=2) == alone


def test_other_random_numbers_stay_as_they_are() -> None:
    sampler = ResumableSampler(24)
    samples = SeededSamples(Noisy(), sampler)
    drawn = []
    for loads in (False, True):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        if loads:
            list(DataLoader(samples, 4, sampler=sampler, generator=torch.Generator()))
        drawn.append((torch.rand(3).tolist(), random.random(), np.random.random()))
    assert drawn[0] == drawn[1]


def test_another_seed_gives_other_numbers() -> None:
    one, other = (SeededSamples(Noisy(), ResumableSampler(24, seed=seed))[5] for seed in (1, 2))
    assert not torch.equal(one[1:], other[1:])


def test_it_passes_for_its_dataset() -> None:
    samples = SeededSamples(LeaveOut(Noisy(), [3]), ResumableSampler(24))
    assert (len(samples), samples.name, samples[3][0]) == (24, "noisy", 4)
    again = pickle.loads(pickle.dumps(samples))
    assert torch.equal(again[7], samples[7])
    with pytest.raises(TypeError, match=r"sampler is a RandomSampler, expected a drivetrain\.data\.ResumableSampler"):
        SeededSamples(Noisy(), torch.utils.data.RandomSampler(Noisy()))  # type: ignore[arg-type]
