"""Lets the first iteration over a sampler leave out the elements that a training has consumed."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

END, _TAKEN = object(), object()


class Skipping:
    """A sampler whose first used iteration leaves out the first `count` elements.

    DataLoader with workers makes an iterator that it drops. So one begins with its first element, or with `prime`, and
    calls `before` then.
    """

    def __init__(self, sampler: Iterable[Any], count: int, before: Callable[[], None] | None) -> None:
        self._sampler, self._count, self._before = sampler, count, before
        self._has_begun = False
        self._last: _Skipped | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._has_begun:
            return iter(self._sampler)
        self._last = _Skipped(self)
        return self._last

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def begin(self) -> Iterator[Any]:
        """Returns the sampler's iterator at the first element that is not left out."""
        self._has_begun = True
        if self._before is not None:
            self._before()
        elements = iter(self._sampler)
        for _ in range(self._count):
            next(elements, None)
        return elements

    def prime(self) -> None:
        """Begins now, so that the sampler draws its random numbers now."""
        if self._last is not None:
            self._last.prime()


class _Skipped:
    def __init__(self, skipping: Skipping) -> None:
        self._skipping = skipping
        self._elements: Iterator[Any] | None = None
        self._first: Any = _TAKEN

    def __iter__(self) -> "_Skipped":
        return self

    def prime(self) -> Iterator[Any]:
        if self._elements is None:
            self._elements = self._skipping.begin()
            self._first = next(self._elements, END)
        return self._elements

    def __next__(self) -> Any:
        elements = self.prime()
        first, self._first = self._first, _TAKEN
        if first is END:
            raise StopIteration
        return next(elements) if first is _TAKEN else first
