"""Works for optimizers in backward: steps a parameter as soon as its gradient exists, or sends the gradient away.

Steps on the CPU overlap with a GPU's work: gradients leave in backward, and values return in the next forward.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor, nn

from .. import _C
from ..wrapped import ReducingWrapper, wrapper_in
from .engine import Engine
from .kept import NAME, WHY_NOT_CLIPPED, kept_of
from .native_step import step_groups
from .rule import part_of_group, torchs_base
from .sharded.dtensors import is_dtensor, local_sum_of_squares
from .sharded.gathers import Gathers, watch
from .sharded.pieces import piece_of
from .twins import Chunk, Twin, Twins

if TYPE_CHECKING:
    from .base import FusedOptimizer

_InBackward = Union["StepInBackward", "OverlappedOffload"]
_STEPPED_BY = "_drivetrain_stepped_by"  # the name of an attribute of parameters


def is_stepped_in_backward(param: Tensor) -> bool:
    """Returns whether an optimizer steps the parameter in backward."""
    return getattr(param, _STEPPED_BY, None) is not None


def _on_gradient(of: "weakref.ref[_InBackward]", param: Tensor) -> None:
    if (found := of()) is not None and param.grad is not None:
        found.on_gradient(param)


def _names_in(
    model: nn.Module, optimizer: "FusedOptimizer", owned: set[Tensor], bucket_cap_mb: float, lacks: str
) -> dict[Tensor, str]:
    """Returns the model's names of those parameters of the optimizer. Raises ValueError if it has none."""
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}, expected a number above 0")
    named = model.named_parameters()
    names: dict[Tensor, str] = {param: name for name, param in named if param.requires_grad and param in owned}
    if not names:
        what = f"the model, a {type(model).__name__}, has no parameter of this {type(optimizer).__name__}"
        raise ValueError(f"{what} {lacks}")
    return names


def _follow(found: "_InBackward", ddp: ReducingWrapper | None, params: Iterable[Tensor]) -> list[Callable[[], None]]:
    """Lets the object learn of each accumulated gradient, or of reduced buckets. Returns the calls that end it."""
    if ddp is None:
        hook = functools.partial(_on_gradient, weakref.ref(found))
        return [param.register_post_accumulate_grad_hook(hook).remove for param in params]
    ddp.reducer.add_on_reduced(found._on_reduced)
    return [functools.partial(ddp.reducer.remove_on_reduced, found._on_reduced)]


class StepInBackward:
    """Steps an optimizer's parameters in backward; `optimizer.step_in_backward()` returns it.

    Attributes:
        divisor: Divides the gradients of the next backward that steps. It is 1.0 unless a caller sets it.
    """

    def __init__(
        self, optimizer: "FusedOptimizer", model: nn.Module, clip_by_previous_norm: float | None, bucket_cap_mb: float
    ) -> None:
        kept = kept_of(optimizer)
        if kept.steps_as_torch:
            name = torchs_base(type(optimizer)).__name__
            raise NotImplementedError(
                f"step_in_backward() steps no parameter by torch's own {name}, and this optimizer leaves them to it: "
                "call step() after backward."
            )
        if kept.in_backward is not None:
            raise RuntimeError("step_in_backward() was called before: call remove() on what it returned first.")
        if kept.max_grad_norm is not None:
            raise NotImplementedError(f"max_grad_norm is {kept.max_grad_norm}, but {WHY_NOT_CLIPPED}")
        if kept.offload is not None:
            raise ValueError(
                f"step_in_backward() steps parameters on their device, but offload is {kept.offload!r}: leave one out."
            )
        if clip_by_previous_norm is not None and not clip_by_previous_norm > 0:
            raise ValueError(f"clip_by_previous_norm is {clip_by_previous_norm}, expected a number above 0, or None")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
        owned = {param for group in optimizer.param_groups for param in group["params"]}
        lacks = "that requires a gradient: give the module that the optimizer was made for."
        self._names = _names_in(model, optimizer, owned, bucket_cap_mb, lacks)
        self._ddp = wrapper_in(model, "step_in_backward()")
        self._optimizer = optimizer
        self._task: int | None = None  # the id of autograd's graph task, whose end flushes the pending parameters
        self.divisor = 1.0
        self._max_norm = clip_by_previous_norm
        self._bucket_bytes = bucket_cap_mb * 2**20
        self._readers: dict[int, _C.StepReader] = {}  # by the id of a bucket's first parameter
        self._pending: dict[int, Tensor] = {}  # parameters whose gradients fill no bucket yet
        self._pending_bytes = 0
        self._is_off = False
        self._squares: Tensor | None = None  # sum of squares over the gradients of the running backward
        self._norm: Tensor | None = None  # norm of the last backward's gradients
        for param, name in self._names.items():
            if is_dtensor(param):
                raise NotImplementedError(
                    f"parameter {name!r} is a DTensor: step_in_backward() is for plain parameters; call step() after "
                    "backward (fully_shard() frees the gradients that it has reduced by itself)."
                )
            if piece_of(param) is not None:
                raise NotImplementedError(
                    f"parameter {name!r} belongs to a DistributedDataParallel with shard=, whose steps need whole "
                    "gradients or states after backward: leave one of the two out."
                )
            if is_stepped_in_backward(param):
                raise RuntimeError(f"parameter {name!r} is stepped in backward by another optimizer already")
            self._check_reducers(param)
        self._ends = _follow(self, self._ddp, self._names)
        for param in self._names:
            # This attribute keeps the object alive. autograd's hooks do not, because the garbage collector cannot see
            # through them.
            setattr(param, _STEPPED_BY, self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as None: saved and copied parameters are not stepped in backward."""
        return type(None), ()

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of the gradients of the last backward that stepped, before clipping.

        None before the first such backward, or without clip_by_previous_norm. Reading it on CUDA waits for the device.
        """
        return None if self._norm is None else float(self._norm)

    @contextmanager
    def no_step(self) -> Iterator[None]:
        """Makes backward accumulate into `.grad` without a step, for all micro-batches but the last.

        Under DistributedDataParallel it also enters no_sync(), so the forward pass must be inside as well. Otherwise
        backward raises RuntimeError.
        """
        before = self._is_off
        with ExitStack() as stack:
            if self._ddp is not None:
                stack.enter_context(self._ddp.no_sync())
            self._is_off = True
            try:
                yield
            finally:
                self._is_off = before

    def remove(self) -> None:
        """Ends stepping in backward. Under DistributedDataParallel every rank must call it. A second call has no
        effect."""
        kept = kept_of(self._optimizer)
        if kept.in_backward is not self:
            return
        kept.in_backward = None
        for end in self._ends:
            end()
        for param in self._names:
            delattr(param, _STEPPED_BY)

    # ---- Notifications that a gradient exists.

    def on_gradient(self, param: Tensor) -> None:
        """Handles the accumulated gradient of one parameter."""
        if self._is_off:
            return
        self._check_reducers(param)
        task = torch._C._current_graph_task_id()
        if task != self._task:
            if self._task is not None:  # The earlier backward has raised.
                self._squares = None
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if id(param) not in self._pending:
            assert param.grad is not None
            self._pending[id(param)] = param
            self._pending_bytes += param.grad.numel() * param.grad.element_size()
        if self._pending_bytes >= self._bucket_bytes:
            self._flush()

    def _on_reduced(self, params: Sequence[Tensor], is_last: bool) -> None:
        if self._is_off:  # Other buckets reuse the memory of these gradients, which thus cannot stay.
            raise RuntimeError(
                "backward ran inside of no_step(), but its forward pass did not: DistributedDataParallel decides in "
                "the forward pass whether backward reduces. Run both inside of no_step()."
            )
        mine = [param for param in params if param in self._names and param.grad is not None]
        for param in mine:
            self._check_reducers(param)
        self._step(mine)
        if is_last:
            self._end_norm()

    def _check_reducers(self, param: Tensor) -> None:
        """Raises for a gradient that another reducer reduces, before or after its step."""
        if _C.num_accumulator_hooks(param) > (self._ddp is not None):
            raise RuntimeError(
                f"parameter {self._names[param]!r} of an optimizer that steps in backward is another "
                "DistributedDataParallel's: wrap the model first, into one, and give step_in_backward() the wrapper. "
                "Without that the ranks' parameters would part."
            )

    def _flush(self) -> None:
        # A zero_grad() after a backward that raised may have removed gradients since.
        params = [param for param in self._pending.values() if param.grad is not None]
        self._pending.clear()
        self._pending_bytes = 0
        self._step(params)

    def _end(self) -> None:
        self._task = None
        self._flush()
        self._end_norm()

    # ---- The step of one bucket.

    def _step(self, params: Sequence[Tensor]) -> None:
        """Steps parameters that have gradients, and frees the gradients."""
        groups = []
        left = {id(param): param for param in params}
        for group in self._optimizer.param_groups:
            every = enumerate(group["params"]) if left else ()
            chosen = {place: left.pop(id(param)) for place, param in every if id(param) in left}
            part = part_of_group(group, [*chosen], [*chosen.values()])
            groups.append(part | {"param_names": [self._names[param] for param in chosen.values()]})
        params = [param for param in params if id(param) not in left]  # Other parameters have left the optimizer.
        if not params:
            return
        grads = [param.grad for param in params if param.grad is not None]
        grad_scale = self.divisor if self._max_norm is None else self._clipping_scale(grads, self._max_norm)
        reader = self._readers.setdefault(id(params[0]), _C.StepReader())
        states_before = len(self._optimizer.state)
        engine = Engine(self._optimizer)
        measured = engine.kept.statistics
        options = _C.StepOptions(grad_scale=grad_scale, statistics=measured is not None and measured.is_due)
        clip = grad_scale / self.divisor
        if isinstance(clip, Tensor) and options.statistics:
            clip = clip.to("cpu", non_blocking=True)  # before the figures, whose arrival is awaited
        result = step_groups(engine, groups, reader, options)
        if measured is not None and result.statistics:
            measured.take([self._names[param] for param in params], params, result.statistics, clip)
        for param in params:
            param.grad = None
        del grads
        if len(self._optimizer.state) > states_before and engine.is_on_cpu:
            _C.return_freed_memory()  # The new states lie between freed gradients.

    def _clipping_scale(self, grads: list[Tensor], max_norm: float) -> float | Tensor:
        """Returns the divisor of the gradients, from the norm of the backward before, and adds to this backward's
        norm."""
        if any(grad.layout != torch.strided for grad in grads):
            return self.divisor  # The step raises for them.
        squares = local_sum_of_squares(grads) / self.divisor**2
        self._squares = squares if self._squares is None else self._squares + squares
        if self._norm is None:
            return self.divisor
        scale = self.divisor * ((self._norm + 1e-6) / max_norm).clamp(min=1.0)
        return scale.float() if scale.is_cuda else float(scale)

    def _end_norm(self) -> None:
        if self._squares is None:
            return
        norm, self._squares = self._squares.sqrt(), None
        # A norm that is not finite clips no later gradient.
        self._norm = norm if self._norm is None else torch.where(norm.isfinite(), norm, self._norm)


# ---- The overlap of offload="cpu".


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
        owned = {p for group in optimizer.param_groups for p in group["params"] if p.device.type != "cpu"}
        lacks = "on a device: move it there first, and give the module that the optimizer is for."
        self._names = _names_in(model, optimizer, owned, bucket_cap_mb, lacks)
        ddp = wrapper_in(model, "overlap_offload()")
        self._optimizer = optimizer
        self._task: int | None = None  # of autograd, whose end awaits the last copy
        kept.twins = self._twins = kept.twins or Twins()
        self.bucket_of: dict[int, int] = {}
        num_bytes = 0.0
        for param in self._names:
            self.bucket_of[id(param)] = int(num_bytes // (bucket_cap_mb * 2**20))
            num_bytes += param.nbytes
        self.due = Gathers(self.bucket_of)
        self._last: Twin | None = None  # whose gradient was the last to leave in this backward
        self.is_final = True  # see final_gradients_leave()
        self._ends = [*watch(model, self.due), *_follow(self, ddp, self._names)]

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
        if not self.is_final:
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
