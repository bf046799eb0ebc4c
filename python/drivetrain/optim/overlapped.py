"""Overlaps steps on the CPU with a GPU's work: gradients leave in backward, and values return in the next forward."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..wrapped import wrapper_in
from .kept import NAME, kept_of
from .sharded.gathers import Gathers, watch
from .twins import Chunk, Twin, Twins

if TYPE_CHECKING:
    from .base import FusedOptimizer


def _on_gradient(of: "weakref.ref[OverlappedOffload]", param: Tensor) -> None:
    if (overlapped := of()) is not None:
        overlapped.on_gradient(param)


@contextmanager
def final_gradients_leave(optimizers: Iterable[Any], is_final: bool) -> Iterator[None]:
    """Keeps gradients on their device in the backward of a micro-batch after which others follow."""
    found = [one for each in optimizers if (one := getattr(getattr(each, NAME, None), "overlapped", None)) is not None]
    for one in found:
        one.is_final = is_final
    try:
        yield
    finally:
        for one in found:
            one.is_final = True


class OverlappedOffload:
    """Overlaps an optimizer's steps on the CPU; `optimizer.overlap_offload()` returns it."""

    def __init__(self, optimizer: "FusedOptimizer", model: nn.Module, bucket_cap_mb: float) -> None:
        kept = kept_of(optimizer)
        if kept.offload is None:
            raise ValueError("overlap_offload() needs offload='cpu', and the optimizer has None")
        if kept.overlapped is not None:
            raise RuntimeError("overlap_offload() was called before: call remove() on what it returned first.")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}, expected a number above 0")
        self._optimizer = optimizer
        kept.twins = self._twins = kept.twins or Twins()
        owned = {p for group in optimizer.param_groups for p in group["params"] if p.device.type != "cpu"}
        self._names: dict[Tensor, str] = {
            param: name for name, param in model.named_parameters() if param.requires_grad and param in owned
        }
        if not self._names:
            what = f"the model, a {type(model).__name__}, has no parameter of this {type(optimizer).__name__}"
            raise ValueError(f"{what} on a device: move it there first, and give the module that the optimizer is for.")
        ddp = wrapper_in(model, "overlap_offload()")
        self.bucket_of: dict[int, int] = {}
        num_bytes = 0.0
        for param in self._names:
            self.bucket_of[id(param)] = int(num_bytes // (bucket_cap_mb * 2**20))
            num_bytes += param.nbytes
        self.due = Gathers(self.bucket_of)
        self._task: int | None = None  # of autograd, whose end awaits the last copy
        self._last: Twin | None = None  # whose gradient was the last to leave in this backward
        self.is_final = True  # see final_gradients_leave()
        self._ends: list[Callable[[], None]] = watch(model, self.due)
        if ddp is None:
            hook = functools.partial(_on_gradient, weakref.ref(self))
            self._ends += [param.register_post_accumulate_grad_hook(hook).remove for param in self._names]
        else:
            ddp.reducer.add_on_reduced(self._on_reduced)
            self._ends.append(functools.partial(ddp.reducer.remove_on_reduced, self._on_reduced))

    def wait(self) -> None:
        """Steps what no forward has used yet, as reads of parameters past their modules need."""
        self.due.end()

    def remove(self) -> None:
        """Ends the overlap. A second call has no effect."""
        kept = kept_of(self._optimizer)
        if kept.overlapped is self:
            self.wait()
            kept.overlapped = None
            for end in self._ends:
                end()

    def on_gradient(self, param: Tensor) -> None:
        """Handles the accumulated gradient of one parameter."""
        if param.grad is None or not self.is_final:
            return
        self._leave(param)
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _on_reduced(self, params: Sequence[Tensor], is_last: bool) -> None:
        for param in params:
            if param in self._names and param.grad is not None:
                param.grad = param.grad.clone()  # later buckets may lie where it lies
                self._leave(param)
        if is_last:
            self._end()

    def _leave(self, param: Tensor) -> None:
        chunk = self.due.pending.get(self.bucket_of[id(param)])
        if isinstance(chunk, Chunk) and chunk.is_due:
            raise RuntimeError(
                f"parameter {self._names[param]!r} got a gradient, and its last step is still due: something uses it "
                "past its module. Call wait() on what overlap_offload() returned before that."
            )
        self._last = self._twins.of(param)
        self._last.gradient = None  # of an earlier backward, whose memory this one's may have
        self._last.send_gradient(self._twins.gradient_pool)

    def _end(self) -> None:
        """Makes later work, which may write to gradients, wait until they have left."""
        self._task = None
        if self._last is not None and self._last.gradient is not None:
            self._last.gradient.await_copy_out()
        self._last = None
