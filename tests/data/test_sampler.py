"""Tests of ResumableSampler: torch's indices, each sample once at any sequence of world sizes, saved positions."""

import math
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from drivetrain.data import ResumableSampler
from drivetrain.data.sampler import Permutation
from effort import rounds


class Squares(Dataset[int]):
    """A map-style dataset whose sample i is i * i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index * index


def samplers(length: int, ranks: int, **options: Any) -> list[ResumableSampler]:
    return [ResumableSampler(length, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


@given(st.integers(1, 5000), st.integers(), st.integers())
@settings(max_examples=rounds(50, whole=200), deadline=None)
def test_a_permutation_has_each_element_once(length: int, seed: int, epoch: int) -> None:
    elements = Permutation(length, seed, epoch)(torch.arange(length))
    assert sorted(elements.tolist()) == list(range(length))


@pytest.mark.parametrize("length", [2**40 + 1, 2**60])
def test_a_permutation_of_any_length_is_one_to_one(length: int) -> None:
    positions = torch.cat([torch.arange(1000), torch.arange(length - 1000, length)])
    elements = Permutation(length, 1, 2)(positions)
    assert len(set(elements.tolist())) == 2000
    assert 0 <= int(elements.min()) <= int(elements.max()) < length


def test_the_order_never_changes() -> None:
    # A saved position means another sample if it does: a change of these needs a new format of the state.
    assert Permutation(10, 0, 0)(torch.arange(10)).tolist() == [9, 7, 2, 3, 4, 1, 8, 0, 5, 6]
    assert Permutation(10**9, 7, 3)(torch.arange(10**9 - 3, 10**9)).tolist() == [353218195, 307732637, 871033913]


def test_elements_and_neighbors_are_spread_evenly() -> None:
    """Chi-square tests of where element 0 and element 1 - element 0 lie, over 2,000 permutations of 20 elements."""
    length, count = 20, 2_000
    firsts: Counter[int] = Counter()
    steps: Counter[int] = Counter()
    for seed in range(count // 10):
        for epoch in range(10):
            first, second = Permutation(length, seed, epoch)(torch.arange(2)).tolist()
            firsts[first] += 1
            steps[(second - first) % length] += 1
    for found, cells in ((firsts, length), (steps, length - 1)):
        expected = count / cells
        chi_square = sum((found[cell] - expected) ** 2 / expected for cell in found)
        assert len(found) == cells
        assert chi_square < cells - 1 + 5 * math.sqrt(2 * (cells - 1))  # five standard deviations above the mean


@given(st.integers(1, 300), st.integers(1, 9), st.booleans())
@settings(max_examples=rounds(50, whole=200), deadline=None)
def test_draws_torchs_indices_without_shuffling(length: int, ranks: int, drop_last: bool) -> None:
    for rank, ours in enumerate(samplers(length, ranks, shuffle=False, drop_last=drop_last)):
        torchs = DistributedSampler(Squares(length), ranks, rank, shuffle=False, drop_last=drop_last)
        assert len(ours) == len(torchs)
        assert list(ours) == list(torchs)


@pytest.mark.parametrize("shuffle", [True, False])
def test_continues_in_the_middle_and_begins_again_afterwards(shuffle: bool) -> None:
    whole = ResumableSampler(100, shuffle=shuffle, seed=3)
    whole.set_epoch(5)
    expected = list(whole)
    begun = ResumableSampler(100, shuffle=shuffle, seed=3)
    begun.set_epoch(5)
    iteration = iter(begun)
    assert [next(iteration) for _ in range(37)] == expected[:37]
    resumed = ResumableSampler(100, shuffle=shuffle, seed=3)
    resumed.load_state_dict(begun.state_dict())
    resumed.set_epoch(5)  # a loop over epochs calls it again
    assert (resumed.epoch, len(resumed)) == (5, 63)
    assert list(resumed) == expected[37:]
    assert len(resumed) == 100
    assert list(resumed) == expected
    resumed.set_epoch(6)
    assert sorted(resumed) == list(range(100))
    assert not shuffle or list(resumed) != expected


def test_a_state_from_the_end_of_an_epoch_has_nothing_left_of_it() -> None:
    sampler = ResumableSampler(10)
    assert len(list(sampler)) == 10
    again = ResumableSampler(10)
    again.load_state_dict(sampler.state_dict())
    assert list(again) == []
    again.set_epoch(1)
    assert len(list(again)) == 10


def test_a_position_far_into_a_large_dataset_is_there_at_once() -> None:
    sampler = ResumableSampler(10**12, num_replicas=8, rank=3, seed=1)
    state = {**sampler.state_dict(), "position": 10**9}
    sampler.load_state_dict(state)
    expected = Permutation(10**12, 1, 0)(10**9 + 3 + 8 * torch.arange(5)).tolist()
    assert list(islice(sampler, 5)) == expected
    assert sampler.state_dict() == {**state, "position": 10**9 + 40}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_draws_ahead_resumes_by_what_was_consumed(workers: int) -> None:
    def loader() -> tuple[ResumableSampler, DataLoader[int]]:
        sampler = ResumableSampler(64, seed=2)
        options = {"prefetch_factor": 4} if workers else {}
        return sampler, DataLoader(Squares(64), batch_size=4, sampler=sampler, num_workers=workers, **options)

    expected = [batch.tolist() for batch in loader()[1]]
    sampler, begun = loader()
    iteration = iter(begun)
    consumed = [next(iteration).tolist() for _ in range(5)]
    state = sampler.state_dict(consumed=20)
    assert sampler.state_dict()["position"] >= state["position"] == 20
    del iteration
    sampler, rest = loader()
    sampler.load_state_dict(state)
    assert len(rest) == 11
    assert consumed + [batch.tolist() for batch in rest] == expected


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_stateful_loader_keeps_the_position(workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        return StatefulDataLoader(Squares(64), batch_size=4, sampler=ResumableSampler(64, seed=2), num_workers=workers)

    expected = [batch.tolist() for batch in loader()]
    begun, rest = loader(), loader()
    iteration = iter(begun)
    consumed = [next(iteration).tolist() for _ in range(5)]
    rest.load_state_dict(begun.state_dict())
    del iteration
    assert consumed + [batch.tolist() for batch in rest] == expected


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, {}), ValueError, "dataset is -1, expected a length of 0 or more"),
        ((iter([]), {}), TypeError, "dataset is of type list_iterator, which has no length"),
        ((8, {"num_replicas": 0}), ValueError, "num_replicas is 0, expected 1 or more"),
        ((8, {"num_replicas": 2, "rank": 2}), ValueError, "rank is 2, expected 0 to 1"),
    ],
)
def test_arguments_are_checked(arguments: tuple[Any, dict[str, Any]], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ResumableSampler(arguments[0], **arguments[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 9}, "state has length=9 and this sampler 8"),
        ({"seed": 1}, "state has seed=1 and this sampler 0"),
        ({"shuffle": False}, "state has shuffle=False and this sampler True"),
        ({"position": 9}, "state has position 9, expected 0 to 8"),
        ({"format": 2}, "state has format 2, expected 1"),
    ],
)
def test_a_state_of_another_order_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    sampler = ResumableSampler(8)
    assert len(list(islice(sampler, 3))) == 3
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**before, "epoch": 4, **change})
    assert sampler.state_dict() == before
    with pytest.raises(ValueError, match="consumed is 4, expected 0 to 3"):
        sampler.state_dict(consumed=4)


@pytest.mark.parametrize(("length", "ranks", "drop_last"), [(10, 4, False), (10, 4, True), (8, 4, False), (3, 4, True)])
def test_has_the_arguments_and_attributes_of_torchs_class(length: int, ranks: int, drop_last: bool) -> None:
    dataset = list(range(length))
    ours = ResumableSampler(dataset, ranks, 1, False, 3, drop_last)
    torchs = DistributedSampler(dataset, ranks, 1, False, 3, drop_last)
    assert ours.dataset is dataset
    names = ("num_replicas", "rank", "shuffle", "seed", "drop_last", "epoch", "num_samples", "total_size")
    assert [getattr(ours, name) for name in names] == [getattr(torchs, name) for name in names]
    assert len(ResumableSampler(dataset=dataset)) == length


def test_takes_rank_and_world_size_from_the_group(on_ranks: Any) -> None:
    assert on_ranks(_indices_of_this_rank) == [[0, 2, 4], [1, 3, 0]]


def _indices_of_this_rank() -> list[int]:
    return list(ResumableSampler(5, shuffle=False))
