"""Attaches the trace to a training loop: hooks around forward, backward and the optimizer step, and the batches."""

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _C
from ..phases import number_of

if TYPE_CHECKING:
    from .monitor import Monitor

_DATA, _FORWARD = number_of("data"), number_of("forward")
_BACKWARD, _OPTIMIZER = number_of("backward"), number_of("optimizer")


def attach(
    model: nn.Module | None,
    optimizers: Sequence[torch.optim.Optimizer] | None,
    on_optimizer_step: Callable[[torch.optim.Optimizer], None],
) -> ExitStack:
    """Marks the calls of a model, steps of optimizers, and backward passes, until the result is closed.

    None marks no model's calls, and every optimizer's steps. `on_optimizer_step` is called after each of them.

    `torch.autograd.backward`, which `Tensor.backward` calls, is replaced by a function that marks its beginning and end
    and passes all arguments on. Results do not change. Calls of `torch.autograd.grad`, and code that imported the
    function itself before, are not marked.
    """

    if isinstance(model, torch.jit.ScriptModule):
        model = None  # it takes no hooks

    def end_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        _C.trace_end(_OPTIMIZER)
        on_optimizer_step(optimizer)

    stack = ExitStack()

    def register(before: Callable[..., Any], begin: int, after: Callable[..., Any], end: Callable[..., None]) -> None:
        stack.callback(before(_Hook(lambda *_: _C.trace_begin(begin))).remove)
        stack.callback(after(_Hook(end)).remove)

    if model is not None:
        # always_call: the phase must end if forward raises.
        end_forward = functools.partial(model.register_forward_hook, always_call=True)
        register(model.register_forward_pre_hook, _FORWARD, end_forward, lambda *_: _C.trace_end(_FORWARD))
    if optimizers is None:
        register(register_optimizer_step_pre_hook, _OPTIMIZER, register_optimizer_step_post_hook, end_optimizer)
    for one in optimizers or ():
        register(one.register_step_pre_hook, _OPTIMIZER, one.register_step_post_hook, end_optimizer)
    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> Any:
        _C.trace_begin(_BACKWARD)
        try:
            return plain(*args, **kwargs)
        finally:
            _C.trace_end(_BACKWARD)

    def restore() -> None:
        if torch.autograd.backward is backward:  # other code may have replaced it since
            torch.autograd.backward = plain

    torch.autograd.backward = backward
    stack.callback(restore)
    return stack


class _Hook:
    """Calls a function as a hook. In copies and files of a model the hook does nothing, and needs no drivetrain."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # of the standard library: it takes any arguments


class Batches:
    """Iterates over a loader, and marks the time for which the loop waits for it.

    Args:
        loader: Any iterable of batches.
        monitor: Hears of waits, of each batch, and of the end, also where the loop is left before it.
        make_iterator: Returns the loader's iterator; None: `iter(loader)`.
    """

    def __init__(
        self, loader: Iterable[Any], monitor: "Monitor", make_iterator: Callable[[], Iterator[Any]] | None = None
    ) -> None:
        self.monitor, self._loader = monitor, loader
        self.make_iterator = make_iterator or (lambda: iter(loader))

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return _MarkedIterator(self)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of an object that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)


class _MarkedIterator:
    """Marks the waits of a loader's own iterator, whose length, attributes and class it shows."""

    def __init__(self, owner: Batches) -> None:
        self._own, self._owner, self._has_ended = iter(()), owner, False
        # Not later: a DataLoader's iterator draws its seed, and starts its workers, when it is made.
        owner.monitor._before_batch()
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
            self._owner.monitor._before_batch()
        self._made_at = 0.0  # the next wait is another one
        _C.trace_begin(_DATA)
        try:
            batch = next(self._own, _END)
        finally:
            _C.trace_end(_DATA)
        if batch is _END:
            self.close()
            raise StopIteration
        self._owner.monitor._take_batch(batch)
        return batch

    def close(self) -> None:
        """Ends the last step. A loop that is left by break does it when it drops the iterator."""
        if not self._has_ended:
            self._has_ended = True
            self._owner.monitor._end_batches()

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


def log_losses_of_accelerate(log: Callable[..., None]) -> Callable[[], None]:
    """Logs each loss that `Accelerator.backward` gets, if the script has imported Accelerate.

    Returns:
        A function that undoes it.
    """
    accelerate = sys.modules.get("accelerate")
    accelerator: Any = getattr(accelerate, "Accelerator", None)
    if accelerator is None:
        return lambda: None
    plain = accelerator.backward

    @functools.wraps(plain)
    def backward(self: Any, loss: torch.Tensor, **options: Any) -> Any:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            log(loss=loss)
        return plain(self, loss, **options)

    accelerator.backward = backward

    def undo() -> None:
        accelerator.backward = plain

    return undo


def replace_iterations(
    loader: Iterable[Any], marked: Callable[[Callable[[], Iterator[Any]]], Batches]
) -> Callable[[], None]:
    """Lets each `iter(loader)` go through `marked`, also in code that holds the loader already.

    The object gets a subclass of its class, because Python looks `__iter__` up there. `isinstance` holds as before.
    `marked` takes what makes the loader's own iterator. The result gives the loader its own class again.
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

    A batch may nest lists, tuples, mappings and objects like transformers' BatchEncoding.
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
