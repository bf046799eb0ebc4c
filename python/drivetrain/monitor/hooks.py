"""Attaches the trace to a training loop: hooks around forward, backward and the optimizer step, and the batches."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _C
from ..phases import number_of

_DATA, _FORWARD = number_of("data"), number_of("forward")
_BACKWARD, _OPTIMIZER = number_of("backward"), number_of("optimizer")


class Hooks:
    """Marks the phases of one model and its optimizers while it is attached.

    `torch.autograd.backward`, which `Tensor.backward` calls, is replaced by a function that marks its beginning and end
    and passes all arguments on. Results do not change. Calls of `torch.autograd.grad`, and code that imported the
    function itself before, are not marked.

    Args:
        model: Its calls are the forward passes; None marks none.
        optimizers: Their `step` calls are marked; None marks every optimizer's.
        on_optimizer_step: Called with the optimizer after each `step`.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        on_optimizer_step: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._on_optimizer_step = on_optimizer_step
        self._handles: list[Any] = []
        self._plain_backward: Any = None
        self._marked_backward: Any = None

    def attach(self) -> None:
        """Registers all hooks."""
        if self._model is not None:
            self._handles += [
                self._model.register_forward_pre_hook(lambda *_: _C.trace_begin(_FORWARD)),
                # always_call: the phase must end if forward raises.
                self._model.register_forward_hook(lambda *_: _C.trace_end(_FORWARD), always_call=True),
            ]
        registers = [(register_optimizer_step_pre_hook, register_optimizer_step_post_hook)]
        if self._optimizers is not None:
            registers = [(one.register_step_pre_hook, one.register_step_post_hook) for one in self._optimizers]
        for before, after in registers:
            self._handles += [before(lambda *_: _C.trace_begin(_OPTIMIZER)), after(self._end_optimizer)]
        plain = torch.autograd.backward

        @functools.wraps(plain)
        def backward(*args: Any, **kwargs: Any) -> Any:
            _C.trace_begin(_BACKWARD)
            try:
                return plain(*args, **kwargs)
            finally:
                _C.trace_end(_BACKWARD)

        self._plain_backward, self._marked_backward = plain, backward
        torch.autograd.backward = backward

    def detach(self) -> None:
        """Removes all hooks. It leaves a `torch.autograd.backward` that other code has replaced since."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._marked_backward is not None and torch.autograd.backward is self._marked_backward:
            torch.autograd.backward = self._plain_backward

    def _end_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        _C.trace_end(_OPTIMIZER)
        self._on_optimizer_step(optimizer)


class Batches:
    """Iterates over a loader, and marks the time for which the loop waits for it.

    Args:
        loader: Any iterable of batches.
        on_wait: Called before the loop waits for a batch.
        on_batch: Called with each batch.
        on_end: Called after the last batch, and when the loop is left before it.
        make_iterator: Returns the loader's iterator; None: `iter(loader)`.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        on_wait: Callable[[], None],
        on_batch: Callable[[Any], None],
        on_end: Callable[[], None],
        make_iterator: Callable[[], Iterator[Any]] | None = None,
    ) -> None:
        self.on_wait, self.on_batch, self.on_end = on_wait, on_batch, on_end
        self.make_iterator = make_iterator or (lambda: iter(loader))
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return _MarkedIterator(self)


class _MarkedIterator:
    """Marks the waits of a loader's own iterator, whose length, attributes and class it shows."""

    def __init__(self, owner: Batches) -> None:
        self._own, self._owner, self._has_ended = iter(()), owner, False
        # Not later: a DataLoader's iterator draws its seed, and starts its workers, when it is made.
        owner.on_wait()
        _C.trace_begin(_DATA)  # starting workers counts as waiting for data
        try:
            self._own = owner.make_iterator()
        finally:
            _C.trace_end(_DATA)
        self._made_at = time.monotonic()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if time.monotonic() - self._made_at >= _SAME_WAIT_S:
            self._owner.on_wait()
        self._made_at = 0.0  # the next wait is another one
        _C.trace_begin(_DATA)
        try:
            batch = next(self._own, _END)
        finally:
            _C.trace_end(_DATA)
        if batch is _END:
            self.close()
            raise StopIteration
        self._owner.on_batch(batch)
        return batch

    def close(self) -> None:
        """Ends the last step. A loop that is left by break does it when it drops the iterator."""
        if not self._has_ended:
            self._has_ended = True
            self._owner.on_end()

    __del__ = close

    def __len__(self) -> int:
        return len(self._own)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._own)


_END = object()
_SAME_WAIT_S = 0.01  # a loop asks sooner for the first batch of an iterator that it has made


def replace_iterations(
    loader: Iterable[Any], marked: Callable[[Callable[[], Iterator[Any]]], Batches]
) -> Callable[[], None]:
    """Lets each `iter(loader)` go through `marked`, also in code that holds the loader already.

    The object gets a subclass of its class, because Python looks `__iter__` up there. `isinstance` holds as before.

    Args:
        loader: A loader whose class is a Python class.
        marked: Takes what makes the loader's own iterator, and returns the iterable to use.

    Returns:
        A function that gives the loader its own class again.
    """
    own = type(loader)

    def __iter__(self: Any) -> Iterator[Any]:
        return iter(marked(lambda: own.__iter__(self)))

    subclass = type(own.__name__, (own,), {"__iter__": __iter__, "__module__": own.__module__})
    # Accelerate's loaders have a __class__ of their own that cannot be set.
    set_class = object.__dict__["__class__"].__set__
    set_class(loader, subclass)

    def restore() -> None:
        if type(loader) is subclass:
            set_class(loader, own)

    return restore


def first_dimension(batch: Any) -> int:
    """Returns the size of the first dimension of the first tensor in a batch; 0 if there is none.

    Args:
        batch: A tensor, or tensors in nested lists, tuples, mappings and objects like transformers' BatchEncoding.
    """
    if isinstance(batch, torch.Tensor):
        shape = batch.shape
        return shape[0] if shape else 1
    if hasattr(batch, "values") and callable(batch.values):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        return 0
    for part in batch:
        if size := first_dimension(part):
            return size
    return 0
