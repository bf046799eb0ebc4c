"""Attaches the trace to a training loop: hooks around forward, backward and the optimizer step, and the batches."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
            self._handles.append(self._model.register_forward_pre_hook(_begin_forward))
            # always_call: the phase must end if forward raises.
            self._handles.append(self._model.register_forward_hook(_end_forward, always_call=True))
        if self._optimizers is None:
            self._handles.append(register_optimizer_step_pre_hook(self._begin_optimizer))
            self._handles.append(register_optimizer_step_post_hook(self._end_optimizer))
        for optimizer in self._optimizers or ():
            self._handles.append(optimizer.register_step_pre_hook(self._begin_optimizer))
            self._handles.append(optimizer.register_step_post_hook(self._end_optimizer))
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

    def _begin_optimizer(self, *_: Any) -> None:
        _C.trace_begin(_OPTIMIZER)

    def _end_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        _C.trace_end(_OPTIMIZER)
        self._on_optimizer_step(optimizer)


def _begin_forward(*_: Any) -> None:
    _C.trace_begin(_FORWARD)


def _end_forward(*_: Any) -> None:
    _C.trace_end(_FORWARD)


class Batches:
    """Iterates over a loader, and marks the time for which the loop waits for it.

    Args:
        loader: Any iterable of batches.
        on_wait: Called before the loop waits for a batch.
        on_batch: Called with each batch.
        on_end: Called after the last batch, and when the loop is left before it.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        on_wait: Callable[[], None],
        on_batch: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_end = on_end
        self._loader = loader
        self._on_wait = on_wait
        self._on_batch = on_batch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        # Not later: a DataLoader's iterator draws its seed, and starts its workers, when it is made.
        self._on_wait()
        _C.trace_begin(_DATA)  # starting workers counts as waiting for data
        try:
            batches = iter(self._loader)
        finally:
            _C.trace_end(_DATA)
        return self._marked(batches, time.monotonic())

    def marked_iterator(self) -> Iterator[Any]:
        """Returns the loader's own iterator, which marks the waits in its `__next__`.

        The object gets a subclass of its class, so that its length, attributes and `isinstance` stay as they are.
        """
        self._on_wait()
        _C.trace_begin(_DATA)
        try:
            batches = iter(self._loader)
        finally:
            _C.trace_end(_DATA)
        own = type(batches)
        if not issubclass(own, _MarkedIterator):
            if not own.__flags__ & _HEAP_TYPE:  # such as a generator, whose class cannot be set
                return self._marked(batches, time.monotonic())
            marked = type(own.__name__, (_MarkedIterator, own), {"__module__": own.__module__})
            batches.__class__ = marked
        left = weakref.finalize(batches, self._on_end)  # a loop that is left by break drops it
        left.atexit = False  # type: ignore[misc]
        vars(batches)["_marks"] = _Marks(self._on_wait, self._on_batch, self._on_end, left, time.monotonic())
        return batches

    def _marked(self, batches: Iterator[Any], made_at: float) -> Iterator[Any]:
        is_same_wait = time.monotonic() - made_at < _SAME_WAIT_S
        while True:
            if not is_same_wait:
                self._on_wait()
            is_same_wait = False
            _C.trace_begin(_DATA)
            try:
                batch = next(batches, _END)
            finally:
                _C.trace_end(_DATA)
            if batch is _END:
                self._on_end()
                return
            self._on_batch(batch)
            try:
                yield batch
            except GeneratorExit:  # the loop was left by break
                self._on_end()
                raise


@dataclass
class _Marks:
    """Functions that an iterator calls while a loop takes batches from it."""

    on_wait: Callable[[], None]
    on_batch: Callable[[Any], None]
    on_end: Callable[[], None]
    left: weakref.finalize[..., Any]
    made_at: float  # 0: it has been asked before


class _MarkedIterator:
    """Marks the waits for batches. It comes before a loader's own class of iterators among the bases."""

    _marks: _Marks

    def __next__(self) -> Any:
        marks = self._marks
        if time.monotonic() - marks.made_at >= _SAME_WAIT_S:
            marks.on_wait()
        marks.made_at = 0.0
        _C.trace_begin(_DATA)
        try:
            batch = super().__next__()  # type: ignore[misc]
        except StopIteration:
            _C.trace_end(_DATA)
            if marks.left.detach() is not None:
                marks.on_end()
            raise
        except BaseException:
            _C.trace_end(_DATA)
            raise
        _C.trace_end(_DATA)
        marks.on_batch(batch)
        return batch


_END = object()
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by Python code
_SAME_WAIT_S = 0.01  # a loop asks sooner for the first batch of an iterator that it has made


class Iterations:
    """Iterates over a loader by the `__iter__` of its own class, where another one has taken its place.

    Args:
        plain: The class's own `__iter__`.
        loader: The loader.
    """

    def __init__(self, plain: Callable[[Any], Iterator[Any]], loader: Iterable[Any]) -> None:
        self._plain, self._loader = plain, loader

    def __iter__(self) -> Iterator[Any]:
        return self._plain(self._loader)


def replace_iterations(loader: Iterable[Any], marked: Callable[[Iterable[Any]], Iterable[Any]]) -> Callable[[], None]:
    """Lets each `iter(loader)` go through `marked`, also in code that holds the loader already.

    The object gets a subclass of its class, because Python looks `__iter__` up there. `isinstance` holds as before.

    Args:
        loader: A loader whose class is a Python class.
        marked: Takes an iterable over the loader, and returns the one to use.

    Returns:
        A function that gives the loader its own class again.
    """
    own = type(loader)

    def __iter__(self: Any) -> Iterator[Any]:
        return iter(marked(Iterations(own.__iter__, self)))

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
