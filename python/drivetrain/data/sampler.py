"""`ResumableSampler`: a distributed sampler that continues in the middle of an epoch, at once and at any world size."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

_FORMAT = 1
_POSITIONS_AT_ONCE = 8192  # the permutation's fixed cost per call, many small tensor operations, is shared by all
_ROUNDS = 8
_MIN_HALF_BITS = 3  # fewer bits leave a network little to mix; a domain of 64 elements costs nothing
_MAX_LENGTH = 2**60  # both halves, and products of a half with the multiplier, then fit into int64
_MASK_32 = 0xFFFFFFFF
_MULTIPLIER = 0x45D9F3B
_MASK_64 = 0xFFFFFFFFFFFFFFFF


class IndexInEpoch(int):
    """An index that knows the epoch for which it was drawn, in a worker process as well."""

    epoch: int

    @classmethod
    def of(cls, index: int, epoch: int) -> IndexInEpoch:
        """Returns the index of an epoch."""
        made = cls(index)
        made.epoch = epoch
        return made


def in_place_of(index: Any, other: int) -> int:
    """Returns another index for the same epoch, if the first knows its epoch."""
    return IndexInEpoch.of(other, index.epoch) if isinstance(index, IndexInEpoch) else other


class ResumableSampler(Sampler[int]):
    """Draws each index of a map-style dataset once per epoch, split over ranks, from a position that can be saved.

    Use it in place of `torch.utils.data.DistributedSampler`. Without shuffling it draws the same indices. With
    shuffling it computes each index from its position: no list of indices exists, and any position is restored at once.

    The position counts the samples that all ranks together have drawn in the epoch. A state that was saved on one
    number of ranks therefore continues on another one, and every sample is still drawn once per epoch. If the ranks do
    not divide the samples that are left, the epoch ends with up to `num_replicas - 1` repeated samples. With
    `drop_last` it leaves out as many instead.

    Args:
        dataset: The dataset, or its length. The attribute of that name holds it.
        num_replicas: Number of ranks; default: the world size of the initialized process group, or 1 without one.
        rank: This rank, 0 to `num_replicas - 1`; default: the rank in the process group, or 0 without one.
        shuffle: Draw in a pseudo-random order, another one per epoch; otherwise in the order of the dataset.
        seed: Chooses the order; must be equal on all ranks.
        drop_last: Leave out the last samples if ranks cannot share them evenly, instead of repeating some of the first.
        logical_ranks: As of DistributedDataParallel. Each rank draws the samples of its logical ranks in the order of
            `accumulate`'s windows. An epoch has whole windows: its last one repeats samples, or is left out.
        part: With logical_ranks, the samples that each of them draws per window: `steps` of `accumulate` times the
            loader's batch size. Save the position only between two windows.

    Raises:
        TypeError: `dataset` has no length.
        ValueError: An argument is out of its range, or `num_replicas` does not divide `logical_ranks`.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        logical_ranks: int | None = None,
        part: int | None = None,
    ) -> None:
        is_grouped = dist.is_available() and dist.is_initialized()
        self.num_replicas = num_replicas if num_replicas is not None else dist.get_world_size() if is_grouped else 1
        self.rank = rank if rank is not None else dist.get_rank() if is_grouped else 0
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas is {self.num_replicas}, expected 1 or more")
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank is {self.rank}, expected 0 to {self.num_replicas - 1}, as num_replicas says")
        if not isinstance(dataset, int | Sized):
            kind = type(dataset).__name__
            raise TypeError(f"dataset is of type {kind}, which has no length: expected a map-style dataset or an int")
        self.dataset = dataset
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        if self.length < 0:
            raise ValueError(f"dataset is {self.length}, expected a length of 0 or more")
        if (logical_ranks is None) != (part is None) or (part is not None and part < 1):
            raise ValueError(f"part is {part} and logical_ranks {logical_ranks}: expected 1 or more for both, or None")
        if logical_ranks is not None and (logical_ranks < 1 or logical_ranks % self.num_replicas):
            raise ValueError(
                f"logical_ranks is {logical_ranks}, expected a multiple of num_replicas {self.num_replicas}"
            )
        self.logical_ranks, self.part = logical_ranks, part
        # Whole windows of so many samples per rank.
        self._unit = part * (logical_ranks // self.num_replicas) if part and logical_ranks else 1
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.marks_epochs = False  # draws indices with an attribute `epoch`, for SeededSamples
        self._begin = 0  # the position at which the current iteration began, or the next one begins
        self._drawn = 0  # indices that this rank has drawn since
        self._is_resumed = False  # the next iteration continues at _begin; any other begins an epoch
        self._is_done = False  # the iteration has ended

    @property
    def num_samples(self) -> int:
        """The indices that this rank draws in a whole epoch, as with torch's class."""
        return self._drawn_of(self.length)

    @property
    def total_size(self) -> int:
        """The indices that all ranks draw in a whole epoch, repeated ones included."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        """Returns how many indices the current iteration, or the next one, draws on this rank."""
        return self._drawn_of(self.length - (0 if self._is_done else self._begin))

    def _drawn_of(self, left: int) -> int:
        """Returns how many indices this rank draws of so many samples."""
        of_all = self.num_replicas * self._unit
        return (left // of_all if self.drop_last else -(-left // of_all)) * self._unit

    def __iter__(self) -> Iterator[int]:
        if not self._is_resumed:
            self._begin = 0
        self._is_resumed = self._is_done = False
        self._drawn = 0
        return self._indices(self._begin, len(self), self.epoch)

    def _indices(self, begin: int, count: int, epoch: int) -> Iterator[int]:
        permutation = Permutation(self.length, self.seed, epoch) if self.shuffle and count else None
        for first in range(0, count, _POSITIONS_AT_ONCE):
            turns = torch.arange(first, min(first + _POSITIONS_AT_ONCE, count), device="cpu")
            positions = (begin + self._places(turns)) % self.length  # repeats the first, as torch does
            for index in (positions if permutation is None else permutation(positions)).tolist():
                self._drawn += 1
                yield IndexInEpoch.of(index, epoch) if self.marks_epochs else index
        self._is_done = True

    def _places(self, turns: torch.Tensor) -> torch.Tensor:
        """Returns the places, counted over all ranks, of the samples that this rank draws in these turns."""
        if self.logical_ranks is None or self.part is None:
            return self.rank + turns * self.num_replicas
        window, turn = turns // self._unit, turns % self._unit
        logical_rank = self.rank * (self._unit // self.part) + turn // self.part
        return (window * self.part + turn % self.part) * self.logical_ranks + logical_rank

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration, as with torch's class; a restored position in `epoch` stays."""
        if epoch != self.epoch:
            self.epoch, self._begin, self._drawn = epoch, 0, 0
            self._is_resumed = self._is_done = False

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Returns the position as plain integers, equal on all ranks if all have drawn as many indices.

        A `DataLoader` with workers draws ahead of the training. Pass `consumed`: the samples that this rank has trained
        on since the iteration began. torchdata's `StatefulDataLoader` keeps count by itself and needs no argument.

        Raises:
            ValueError: `consumed` is negative or more than this rank has drawn, or ends inside of a window.
        """
        drawn = self._drawn if consumed is None else consumed
        if not 0 <= drawn <= self._drawn:
            raise ValueError(
                f"consumed is {consumed}, expected 0 to {self._drawn}, what this rank has drawn since it began"
            )
        if drawn % self._unit:
            raise ValueError(
                f"{drawn} samples are consumed, expected a multiple of {self._unit}: with logical_ranks save between "
                "two windows only, where window.backward() has returned True"
            )
        return {
            "format": _FORMAT,
            "epoch": self.epoch,
            "position": min(self._begin + drawn * self.num_replicas, self.length),
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iteration continue at the position of `state`, which any number of ranks may have saved.

        Raises:
            ValueError: `state` comes from another dataset length, seed or order, or from a later drivetrain. The
                sampler then stays as it was.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(f"state has format {state.get('format')!r}, expected {_FORMAT}: it is not of this version")
        for name in ("length", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"state has {name}={state[name]!r} and this sampler {getattr(self, name)!r}, another order. "
                    "Make the sampler with the arguments of the run that saved the state."
                )
        position = state["position"]
        if not 0 <= position <= self.length:
            raise ValueError(f"state has position {position}, expected 0 to {self.length}")
        self.epoch, self._begin, self._drawn = state["epoch"], position, 0
        self._is_resumed, self._is_done = True, False


# ---- The order of samples.


def _round_keys(seed: int, epoch: int) -> list[int]:
    """Returns one 32-bit key per round, from SplitMix64 (Steele et al., 2014) over the seed and the epoch."""
    state = (seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03) & _MASK_64
    keys = []
    for _ in range(_ROUNDS):
        state = (state + 0x9E3779B97F4A7C15) & _MASK_64
        mixed = state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
        keys.append((mixed ^ (mixed >> 31)) & _MASK_32)
    return keys


class Permutation:
    """Maps positions to elements of a permutation of `range(length)`, which `seed` and `epoch` choose.

    A balanced Feistel network (Luby and Rackoff, 1988) permutes the smallest domain of an even number of bits that
    holds `length`. Results outside `range(length)` are permuted again until they are inside (cycle walking, Black and
    Rogaway, 2002). This takes four times at most on average, from 16 elements on. Memory does not depend on `length`.

    Args:
        length: Number of elements, 1 to 2**60.
        seed: Any integer; equal seeds give equal permutations, on every machine and torch version.
        epoch: Any integer; another one gives an independent permutation.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        if not 1 <= length <= _MAX_LENGTH:
            raise ValueError(f"length is {length}, expected 1 to 2**60")
        self._length = length
        self._half_bits = max(_MIN_HALF_BITS, ((length - 1).bit_length() + 1) // 2)
        self._keys = _round_keys(seed, epoch)

    def __call__(self, positions: Tensor) -> Tensor:
        """Returns the elements at `positions`, an int64 tensor of any shape with values in `range(length)`."""
        elements = self._network(positions)
        outside = elements >= self._length
        while bool(outside.any()):
            elements[outside] = self._network(elements[outside])
            outside = elements >= self._length
        return elements

    def _network(self, values: Tensor) -> Tensor:
        bits, mask = self._half_bits, (1 << self._half_bits) - 1
        left, right = values >> bits, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right, key) & mask)
        return (left << bits) | right


def _mixed(half: Tensor, key: int) -> Tensor:
    """Returns 32 bits that depend on every bit of `half` and `key`: multiplications and xorshifts modulo 2**32."""
    value = (half ^ key) & _MASK_32
    for _ in range(2):
        value = ((value ^ (value >> 16)) * _MULTIPLIER) & _MASK_32
    return value ^ (value >> 16)
