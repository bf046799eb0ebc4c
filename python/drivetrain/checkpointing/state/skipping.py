"""Lets the first iteration over a sampler leave out the elements that a training has consumed."""

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
        self._has_begun = False
        self._last: _Skipped | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun:
            return iter(self._sampler)
        if self._early:
            self._early -= 1
            self._elements = iter(self._sampler)
        self._last = _Skipped(self)
        return self._last

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def begin(self) -> Iterator[Any]:
        """Returns the sampler's iterator at the first element that is not left out."""
        self._has_begun = True
        if self._before is not None:
            self._before()
            self._before = None  # it refers to the loader, whose workers would then wait for garbage collection
        for _ in range(self._late):
            self._elements = iter(self._sampler)
        for _ in range(self._count):
            next(self._elements, None)
        return self._elements

    def prime(self) -> None:
        """Begins now, so that the sampler draws its random numbers now. One that was asked early has drawn them."""
        if self._last is not None:
            self._last.prime(takes_one=self._late > 0)


class _Skipped:
    def __init__(self, skipping: Skipping) -> None:
        self._skipping = skipping
        self._elements: Iterator[Any] | None = None

    def __iter__(self) -> "_Skipped":
        return self

    def prime(self, takes_one: bool = False) -> Iterator[Any]:
        if self._elements is None:
            elements = self._skipping.begin()
            self._elements = itertools.chain(list(itertools.islice(elements, int(takes_one))), elements)
        return self._elements

    def __next__(self) -> Any:
        return next(self.prime())
