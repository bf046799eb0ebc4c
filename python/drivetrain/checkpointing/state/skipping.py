"""Defines a sampler that leaves out what the training has consumed, and draws its random numbers when it first did."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Skipping:
    """A sampler whose first used iteration leaves out the first `count` elements.

    DataLoader with workers makes an iterator that it drops. So an iteration is used from its first element on, or from
    `prime`, and calls `before` then.

    Args:
        sampler: Some draw random numbers for `iter()`, others for their first element or for each.
        count: Number of elements to leave out.
        before: Called before the first element is taken.
        early: Number of the iterations that ask the sampler at once. A further one uses the iterator of the last.
        late: Number of times that the used iteration asks the sampler after `before`.
    """

    def __init__(
        self, sampler: Iterable[Any], count: int, before: Callable[[], None] | None, early: int, late: int
    ) -> None:
        self._sampler, self._count, self._before = sampler, count, before
        self._early, self._late = early, late
        self._elements: Iterator[Any] = iter(())
        self._has_begun = self._is_asked = False

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun:
            return iter(self._sampler)
        self._is_asked = True
        if self._early:
            self._early -= 1
            self._elements = iter(self._sampler)
        return self._used()

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def _used(self) -> Iterator[Any]:
        self._begin()
        yield from self._elements

    def _begin(self) -> None:
        """Takes the sampler's iterator up to the first element that is not left out, unless `prime` has."""
        if self._has_begun:
            return
        self._has_begun = True
        if self._before is not None:
            self._before()
            self._before = None  # it refers to the loader, whose workers would then wait for garbage collection
        for _ in range(self._late):
            self._elements = iter(self._sampler)
        for _ in range(self._count):
            next(self._elements, None)

    def prime(self) -> None:
        """Begins now, so that the sampler draws its random numbers now. One that was asked early has drawn them."""
        if self._is_asked and not self._has_begun:
            self._begin()
            first = list(itertools.islice(self._elements, int(self._late > 0)))
            self._elements = itertools.chain(first, self._elements)
