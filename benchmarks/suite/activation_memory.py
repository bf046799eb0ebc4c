"""Counts the bytes of activations from outside, in the same way for torch and drivetrain."""

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
_END = "drivetrain bench: the end of forward"


class Alive(TorchDispatchMode):
    """Counts the bytes of live storages that a forward pass, or its recomputation, allocated.

    Sees every operation of torch. In backward, operations that run with gradients enabled belong to a recomputation,
    since backward's own operations run without. The peak starts at the end of forward, like the peak of a plan. It
    includes what an operation reads and writes while it is recomputed.
    """

    def __init__(self, model: nn.Module, batch: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live_bytes = 0
        self._in_forward = True
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._before = [t.untyped_storage() for t in (*model.parameters(), *model.buffers(), *batch)]
        self._known = {id(storage) for storage in self._before}

    def end_forward(self) -> None:
        gc.collect()  # frees cycles of Python objects that backward does not need
        self._in_forward = False
        self.peak_bytes = self._live_bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._in_forward or torch.is_grad_enabled():
            for leaf in tree_leaves(made):
                if isinstance(leaf, Tensor):
                    self._note(leaf.untyped_storage())
            if not self._in_forward:
                self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._known:
            return
        num_bytes = storage.nbytes()

        def gone(_: object) -> None:
            self._live_bytes -= num_bytes
            self._known.discard(key)
            del self._storages[key]

        self._known.add(key)
        self._storages[key] = weakref.ref(storage, gone)
        self._live_bytes += num_bytes


def peak_of_alive(forward: Callable[[], Tensor], model: nn.Module, batch: Iterable[Tensor]) -> int:
    """Returns the peak bytes of live activations in a step of torch; see Alive. Cannot see drivetrain's replays, which
    run below the dispatch mode."""
    with Alive(model, batch) as alive:
        loss = forward()
        alive.end_forward()
        loss.backward()
    peak: int = alive.peak_bytes
    return peak


def allocated(forward: Callable[[], Tensor]) -> tuple[int, int]:
    """Returns the bytes allocated and not freed at the end of forward, and their peak in the step including gradients,
    both beyond the bytes before. The figures are the allocator's events in torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        loss = forward()
        with record_function(_END):
            pass
        loss.backward()
    events: list[Any] = []
    todo = list(profiled.profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation or event.name == _END:
            events.append(event)
    live = peak = end = 0
    for event in sorted(events, key=lambda event: event.start_time_ns):
        if event.tag == _EventType.Allocation:
            live += event.extra_fields.alloc_size
            peak = max(peak, live)
        else:
            end = live
    return end, peak


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the rest of this process. By default, large blocks return to the system and are
    mapped again page by page. That costs every side the same time, and varies by more than the measured differences."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
