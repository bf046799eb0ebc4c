"""A pseudo-random permutation of 0 to n - 1 that computes each element by itself, without a list of the others."""

from torch import Tensor

_ROUNDS = 8
_MIN_HALF_BITS = 3  # fewer bits leave a network little to mix; a domain of 64 elements costs nothing
_MAX_LENGTH = 2**60  # both halves, and products of a half with the multiplier, then fit into int64
_MASK_32 = 0xFFFFFFFF
_MULTIPLIER = 0x45D9F3B
_MASK_64 = 0xFFFFFFFFFFFFFFFF


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
