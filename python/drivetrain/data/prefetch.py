"""`prefetch`: loads the next batches in a thread, and copies them to the device, while the training step runs."""

import copy
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..threads import Thread

_log = logging.getLogger(__name__)
_FIRST_DEPTH, _MAX_DEPTH = 2, 8
_WARN_EVERY_S = 60.0
_LOOK_EVERY_S = 1.0  # whether the thread lives
_JOIN_S = 60.0


def prefetch(
    loader: Iterable[Any],
    device: torch.device | str | int | None = None,
    *,
    depth: int | None = None,
    timeout: float = 1800.0,
) -> "Prefetcher":
    """Returns an iterable over the loader's batches that are loaded ahead, in the same order.

    A thread takes batches from the loader. For a CUDA device it also copies their tensors into pinned memory and from
    there to the device. The copies have a stream of their own, so that they overlap with the step. The current stream
    waits for the copies on the device, not on the host. The first batch of an epoch is loaded by the caller, because
    samplers draw their seeds then. The training therefore has the same random numbers as without prefetch.

    Example:
        for inputs, targets in drivetrain.data.prefetch(loader, "cuda"):
            ...

    Args:
        loader: A DataLoader or another iterable. With `num_workers=0` the dataset's code runs in the thread. If it
            draws random numbers then, their order changes from run to run; workers have generators of their own.
        device: The device of the yielded tensors; None leaves them where they are.
        depth: Batches loaded ahead, 1 or more. None measures: it begins with 2 and grows up to 8, one at a time. It
            grows when the step waits although the buffer was full before, which happens if the times of batches vary.
        timeout: Seconds that a step waits for a batch at most. A warning comes every minute.

    Raises:
        TypeError: `loader` is not iterable.
        ValueError: `depth` or `timeout` is out of range.
    """
    return Prefetcher(loader, device, depth=depth, timeout=timeout)


class Prefetcher:
    """The iterable that `prefetch` returns. Other attributes are the loader's.

    Args:
        loader: A DataLoader or another iterable.
        device: The device of the yielded tensors; None leaves them where they are.
        depth: Batches loaded ahead; None measures how many are needed.
        timeout: Seconds that a step waits for a batch at most.

    Attributes:
        loader: The loader.
        depth: Batches loaded ahead now.
        waited_s: Seconds that steps have waited for batches, in all epochs.
    """

    def __init__(
        self, loader: Iterable[Any], device: torch.device | str | int | None, *, depth: int | None, timeout: float
    ) -> None:
        if not hasattr(loader, "__iter__"):
            raise TypeError(f"loader is a {type(loader).__name__}, expected a DataLoader or another iterable")
        if depth is not None and (not isinstance(depth, int) or depth < 1):
            raise ValueError(f"depth is {depth!r}, expected a number of batches, 1 or more, or None")
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout!r}, expected seconds above 0")
        self.loader = loader
        self.device = None if device is None else torch.device(device)
        self.depth = depth if depth is not None else _FIRST_DEPTH
        self.is_measured = depth is None
        self.timeout = timeout
        self.waited_s = 0.0
        self._under_way: weakref.ref[_Epoch] | None = None

    def __iter__(self) -> Iterator[Any]:
        last = None if self._under_way is None else self._under_way()
        has_kept_workers = getattr(self.loader, "persistent_workers", False) and getattr(self.loader, "num_workers", 0)
        # Two iterations take batches from one iterator, or a Checkpointer counts the batches of one at a time.
        is_shared = has_kept_workers or hasattr(self.loader, "__next__")
        if last is not None and (is_shared or last._counter is not None):
            last.close()  # An iteration that was left early must not take batches from the next one.
        epoch = _Epoch(self)
        self._under_way = weakref.ref(epoch)
        return epoch

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, while this is unpickled or copied
            raise AttributeError(name)
        return getattr(self.loader, name)


class _Epoch:
    """One iteration: the caller takes batches that the thread has put into the buffer."""

    def __init__(self, owner: Prefetcher) -> None:
        self._owner = owner
        batches = iter(owner.loader)
        # Checkpointer counts the batches that the training has taken, not those loaded ahead.
        apart: Callable[[], tuple[Iterator[Any], Any]] | None = getattr(batches, "apart", None)
        self._counter: Any = None
        self._batches: Iterator[Any] = batches
        if apart is not None:
            self._batches, self._counter = apart()
        self._copier = _Copier(owner.device)
        self._buffer = _Buffer(owner.depth)
        self._thread: threading.Thread | None = None
        self._process = 0
        self._is_done = False
        self._has_loaded = False  # the thread has given its last entry

    def __iter__(self) -> "_Epoch":
        return self

    def __len__(self) -> int:
        return len(self._owner)

    def __next__(self) -> Any:
        if self._is_done:
            raise StopIteration
        if self._counter is not None:
            self._counter.fetching()
        try:
            batch = self._first() if self._thread is None else self._take()
        except BaseException as error:
            self._is_done = True
            if self._counter is not None and isinstance(error, StopIteration):
                self._counter.end()
            self._buffer.stop()
            # Otherwise it came from the wait, as of a signal: the thread may wait for the loader for long, or forever.
            if self._has_loaded:
                self.close()
            raise
        if self._counter is not None:
            self._counter.batches += 1
        return self._copier.received(batch)

    def _first(self) -> Any:
        batch = self._copier.copied(next(self._batches))
        self._thread = Thread(_load, "drivetrain prefetch", (self._batches, self._copier, self._buffer))
        self._thread.start()
        self._process = os.getpid()
        weakref.finalize(self, self._buffer.stop)
        return batch

    def _take(self) -> Any:
        owner, thread = self._owner, self._thread
        assert thread is not None
        if os.getpid() != self._process:  # before the buffer's lock, which the thread may have held
            raise RuntimeError(
                "prefetch: this process is a fork of the one that began the iteration, and has not its thread: begin "
                "another iteration here"
            )
        begin = time.perf_counter()
        kind, value, grows = self._buffer.take(owner.timeout, thread.is_alive)
        owner.waited_s += time.perf_counter() - begin
        if grows and owner.is_measured and self._buffer.depth < _MAX_DEPTH:
            owner.depth = self._buffer.grow()
        if kind == "batch":
            return value
        self._has_loaded = True
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """Stops the thread after the batch that it is loading."""
        self._buffer.stop()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_JOIN_S)
        if thread.is_alive():
            raise RuntimeError(
                f"prefetch: the loader has not returned the current batch for {_JOIN_S:.0f} s after its iteration "
                "was left, so no other can begin. Set the DataLoader's timeout to find out why."
            )


class _Buffer:
    """A queue of limited depth between the thread and the caller."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._entries: deque[tuple[str, Any]] = deque()
        self._changed = threading.Condition()
        self._was_full = self._is_stopped = False

    def put(self, kind: str, value: Any) -> bool:
        """Waits for room, which the caller makes or stop() ends. Returns False after stop()."""
        with self._changed:
            while len(self._entries) >= self.depth and not self._is_stopped:
                self._was_full = True
                self._changed.wait(_WARN_EVERY_S)
            if self._is_stopped:
                return False
            self._entries.append((kind, value))
            self._changed.notify_all()
            return True

    def take(self, timeout: float, is_filled: Callable[[], bool]) -> tuple[str, Any, bool]:
        """Returns an entry, and whether a deeper buffer could have held it ready.

        Raises:
            TimeoutError: No batch came within `timeout` seconds.
            RuntimeError: No batch will come, because the buffer was stopped or its thread has ended.
        """
        begin = time.monotonic()
        warn_at = begin + _WARN_EVERY_S
        with self._changed:
            grows = not self._entries and self._was_full
            while not self._entries:
                if self._is_stopped or not is_filled():
                    raise RuntimeError(
                        "prefetch: this iteration has ended, because another one began over the same loader or its "
                        "thread has ended: take each batch from the newest iteration"
                    )
                left = begin + timeout - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"prefetch has waited {timeout:g} s for the loader's next batch, its timeout: look for a "
                        "dataset or worker that hangs, or pass a larger timeout"
                    )
                if not self._changed.wait(min(left, _LOOK_EVERY_S)) and time.monotonic() >= warn_at:
                    warn_at += _WARN_EVERY_S
                    _log.warning("prefetch has waited %.0f s for the loader's next batch", time.monotonic() - begin)
            if grows:
                self._was_full = False
            entry = self._entries.popleft()
            self._changed.notify_all()
            return *entry, grows

    def grow(self) -> int:
        with self._changed:
            self.depth += 1
            self._changed.notify_all()
            return self.depth

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._entries.clear()
            self._changed.notify_all()


class _Copier:
    """Copies batches to a device, on a CUDA stream of its own."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        is_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None

    def copied(self, batch: Any) -> tuple[Any, Any]:
        """Returns the batch on the device, and an event that follows its copies."""
        if self.device is None:
            return batch, None
        if self._stream is None:
            return moved(batch, self.device, is_pinned=False), None
        # The end of torch's stream() sets the thread's device, and would make a context there.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            # torch's allocator of pinned memory reuses a block after the copies from it.
            return moved(batch, self.device, is_pinned=True), self._stream.record_event()

    def received(self, entry: tuple[Any, Any]) -> Any:
        """Lets the current stream wait for the copies. Call it in the thread of the training."""
        batch, event = entry
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            for tensor in _tensors(batch):
                tensor.record_stream(stream)
        return batch


def moved(batch: Any, device: torch.device, is_pinned: bool) -> Any:
    """Returns a batch on a device: what torch's `pin_memory` and Accelerate's `send_to_device` accept.

    Args:
        batch: Tensors and objects with `to()`, in mappings, tuples, lists and nodes that torch.utils._pytree knows.
        device: The device.
        is_pinned: Copies through pinned memory, and without a wait of the host.

    Raises:
        TypeError: An object holds tensors and has no `to()`.
    """
    if isinstance(batch, Tensor):
        if not is_pinned:
            return batch.to(device)
        return (batch if batch.is_cuda or batch.is_pinned() else batch.pin_memory()).to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        if is_pinned and callable(getattr(batch, "pin_memory", None)):
            batch = batch.pin_memory()
        return batch.to(device)
    if isinstance(batch, Mapping):
        parts = {name: moved(value, device, is_pinned) for name, value in batch.items()}
        if isinstance(batch, MutableMapping):
            copied = copy.copy(batch)
            copied.update(parts)
            return copied
        return type(batch)(parts)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device, is_pinned) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(value, device, is_pinned) for value in batch)
    if type(batch) in pytree.SUPPORTED_NODES:
        leaves, structure = pytree.tree_flatten(batch)
        return pytree.tree_unflatten([moved(leaf, device, is_pinned) for leaf in leaves], structure)
    if any(isinstance(value, Tensor) for value in getattr(batch, "__dict__", {}).values()):
        raise TypeError(
            f"the loader's batch has a {type(batch).__name__}, which holds tensors that prefetch cannot move: give it "
            "a method to(device), or collate the tensors into a dict"
        )
    return batch


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yields the tensors of a batch that has been moved."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from (tensor for value in batch.values() for tensor in _tensors(value))
    elif isinstance(batch, (list, tuple)):
        yield from (tensor for value in batch for tensor in _tensors(value))
    elif type(batch) in pytree.SUPPORTED_NODES:
        yield from (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
    else:
        yield from (value for value in getattr(batch, "__dict__", {}).values() if isinstance(value, Tensor))


def _load(batches: Iterator[Any], copier: _Copier, buffer: _Buffer) -> None:
    """Runs in the thread."""
    try:
        for batch in batches:
            if not buffer.put("batch", copier.copied(batch)):
                return
        buffer.put("end", None)
    except BaseException as error:
        buffer.put("error", error)
