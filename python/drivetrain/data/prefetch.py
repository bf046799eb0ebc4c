"""`prefetch`: loads the next batches in a thread, and copies them to the device, while the training step runs."""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_log = logging.getLogger(__name__)
_FIRST_DEPTH, _MAX_DEPTH = 2, 8
_WARN_EVERY_S = 60.0
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
        loader: a DataLoader or another iterable. With `num_workers=0` the dataset's code runs in the thread. If it
            draws random numbers then, their order changes from run to run; workers have generators of their own.
        device: the device of the yielded tensors; None leaves them where they are.
        depth: batches loaded ahead, 1 or more. None measures: it begins with 2 and grows up to 8, one at a time. It
            grows when the step waits although the buffer was full before, which happens if the times of batches vary.
        timeout: seconds that a step waits for a batch at most. A warning comes every minute.

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
        loader: the loader.
        depth: batches loaded ahead now.
        waited_s: seconds that steps have waited for batches, in all epochs.
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
        if self._under_way is not None and (last := self._under_way()) is not None:
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
        self._is_done = False

    def __iter__(self) -> "_Epoch":
        return self

    def __next__(self) -> Any:
        if self._is_done:
            raise StopIteration
        if self._counter is not None:
            self._counter.begin_fetch()
        try:
            batch = self._first() if self._thread is None else self._take()
        except BaseException as error:
            self._is_done = True
            if self._counter is not None and isinstance(error, StopIteration):
                self._counter.end_epoch()
            self._buffer.stop()
            if not isinstance(error, TimeoutError):  # That thread waits for the loader, perhaps forever.
                self.close()
            raise
        if self._counter is not None:
            self._counter.count()
        return self._copier.received(batch)

    def _first(self) -> Any:
        batch = self._copier.copied(next(self._batches))
        self._thread = threading.Thread(
            target=_load, args=(self._batches, self._copier, self._buffer), name="drivetrain prefetch", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._buffer.stop)
        return batch

    def _take(self) -> Any:
        owner = self._owner
        begin = time.perf_counter()
        kind, value, grows = self._buffer.take(owner.timeout)
        owner.waited_s += time.perf_counter() - begin
        if grows and owner.is_measured and self._buffer.depth < _MAX_DEPTH:
            owner.depth = self._buffer.grow()
        if kind == "batch":
            return value
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
                f"prefetch: the loader has not returned the batch under way for {_JOIN_S:.0f} s after its iteration "
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

    def take(self, timeout: float) -> tuple[str, Any, bool]:
        """Returns an entry, and whether a deeper buffer could have held it ready.

        Raises:
            TimeoutError: No batch came within `timeout` seconds.
        """
        begin = time.monotonic()
        with self._changed:
            grows = not self._entries and self._was_full
            while not self._entries:
                left = begin + timeout - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"prefetch has waited {timeout:g} s for the loader's next batch, its timeout: look for a "
                        "dataset or worker that hangs, or pass a larger timeout"
                    )
                if not self._changed.wait(min(left, _WARN_EVERY_S)):
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
            return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device), batch), None
        with torch.cuda.stream(self._stream):
            # torch's allocator of pinned memory reuses a block after the copies from it.
            moved = pytree.tree_map_only(
                Tensor,
                lambda tensor: (tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()).to(
                    self.device, non_blocking=True
                ),
                batch,
            )
            return moved, self._stream.record_event()

    def received(self, entry: tuple[Any, Any]) -> Any:
        """Lets the current stream wait for the copies. Call it in the thread of the training."""
        batch, event = entry
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            pytree.tree_map_only(Tensor, lambda tensor: tensor.record_stream(stream), batch)
        return batch


def _load(batches: Iterator[Any], copier: _Copier, buffer: _Buffer) -> None:
    """Runs in the thread."""
    try:
        for batch in batches:
            if not buffer.put("batch", copier.copied(batch)):
                return
        buffer.put("end", None)
    except BaseException as error:
        buffer.put("error", error)
