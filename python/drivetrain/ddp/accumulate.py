"""Gradient accumulation: one optimizer step with the exact weighted mean over several micro-batches."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..grad.collected import divide, holds_anything
from ..optim.base import FusedOptimizer
from ..optim.clip_grad import clip_grad_norm_
from ..optim.in_backward import StepInBackward, final_gradients_leave
from ..optim.kept import check_max_grad_norm, kept_of, scaled_step
from ..wrapped import unwrapped, wrapper_in
from . import hang_reports
from .distributed import DistributedDataParallel, checked_weight
from .logical_ranks.parts import Parts
from .sharding import rows_of

_NOTHING = torch.zeros(())  # a loss of weight 0


def accumulate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    steps: int,
    *,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Any = None,
    max_grad_norm: float | None = None,
) -> "Window":
    """Steps the optimizer once per `steps` micro-batches, with the weighted mean of their gradients.

    ::

        with drivetrain.accumulate(model, optimizer, steps=8) as window:
            for inputs, targets in loader:
                loss = F.cross_entropy(model(inputs), targets)  # a mean
                window.backward(loss, weight=targets.numel())  # the number of elements of that mean

    Every `steps`-th backward communicates (under drivetrain's DistributedDataParallel), steps and zeroes the gradients.
    The loop needs no no_sync(), optimizer.step(), zero_grad() or division of the loss. `window.backward` returns
    whether it stepped. The end of the block reduces and steps a last, shorter window.

    The gradient of a step is the weighted mean over all of the window's micro-batches on all ranks; without weights,
    the mean over micro-batches. After a backward that communicates, `.grad` holds that mean, as under torch.

    Ranks may have different numbers of micro-batches. A rank at the end of its block takes part in the others' windows
    with weight 0. It steps with them until all ranks are at the end. So every rank must leave the block, and the
    learning-rate scheduler must be passed here so that every rank steps it equally often.

    An exception that leaves the block, or a backward that raises, drops the collected gradients without a step.

    Args:
        model: The module, wrapped into drivetrain's DistributedDataParallel or not wrapped.
        optimizer: The optimizer to step, or several. Wrappers of Accelerate and Lightning Fabric are taken off.
        steps: Micro-batches per step, 1 or more. Ranks may pass different numbers. With the wrapper's `logical_ranks`:
            micro-batches per logical rank, equal on all ranks.
        scaler: A GradScaler. The window scales the loss, steps and updates it.
        scheduler: Learning-rate scheduler to step after every step of the optimizer.
        max_grad_norm: Clips the 2-norm of all the optimizers' unscaled gradients together before a step. A single
            optimizer of drivetrain.optim clips inside its step.

    Raises:
        ValueError: `steps` is below 1, an optimizer has no parameter of the model, or an optimizer of Accelerate has
            a scaler that is not passed.
        TypeError: An optimizer is not a torch.optim.Optimizer.
        NotImplementedError: The model is wrapped into another parallel class than drivetrain's. Or an optimizer steps
            in backward and there is a wrapper, a scaler or max_grad_norm.
    """
    return Window(model, optimizer, steps, scaler=scaler, scheduler=scheduler, max_grad_norm=max_grad_norm)


class Window:
    """One `with` block of windows of micro-batches; `accumulate` returns it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        steps: int,
        *,
        scaler: torch.amp.GradScaler | None,
        scheduler: Any,
        max_grad_norm: float | None,
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps is {steps}, expected a number of micro-batches per step, 1 or more")
        check_max_grad_norm(max_grad_norm)
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        for index, one in enumerate(given):
            if not isinstance(one, torch.optim.Optimizer):
                raise TypeError(f"optimizer[{index}] is a {type(one).__name__}, expected a torch.optim.Optimizer")
            if scaler is None and getattr(one, "scaler", None) is not None:
                raise ValueError(
                    f"scaler is None, but optimizer[{index}] is a {type(one).__name__} with a GradScaler: pass "
                    "scaler=accelerator.scaler, which accumulate() then uses."
                )
        self._optimizers = [unwrapped(one, "optimizer", torch.optim.Optimizer) for one in given]
        self._ddp = cast(DistributedDataParallel | None, wrapper_in(model, "drivetrain.accumulate()"))
        of_model = set(map(id, model.parameters()))
        for index, one in enumerate(self._optimizers):
            params = [param for group in one.param_groups for param in group["params"]]
            if of_model.isdisjoint(map(id, params)):
                raise ValueError(
                    f"optimizer[{index}], a {type(one).__name__}, has no parameter of the model: pass its own."
                )
        self._parts = Parts(self._ddp, steps)
        self._steps = self._parts.micro_batches
        self._scaler = scaler
        # A framework's scheduler steps only after the framework's own optimizer step.
        self._scheduler = unwrapped(scheduler, "scheduler", torch.optim.lr_scheduler.LRScheduler)
        self._scheduler_steps: int | None = None  # the scheduler's step count at the last check
        self._max_grad_norm = max_grad_norm
        self._entered = self._is_open = False
        self._handles: list[Any] = []  # hooks on the model and the optimizers during the block
        self._is_stepping = False
        self._in_backward: list[StepInBackward] = []
        self._check_in_backward()
        self._micro_steps = 0
        self._has_forwarded = False  # since the last backward
        self._weight = 0.0  # weight of this rank's micro-batches in the current window
        # The all-reduce that announced the window to the other ranks, and its tensor, which must stay alive.
        self._begun: tuple[Any, Tensor] | None = None
        self._seen: tuple[Tensor, Tensor | None, int] | None = None  # parameter, gradient, its version
        self._restored: dict[str, Any] | None = None  # the state with which the block begins

    @property
    def micro_steps(self) -> int:
        """The number of backward passes in the current window."""
        return self._micro_steps

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the current window as plain numbers. The gradients collected so far are in `.grad`."""
        self._parts.refuse_save(self._micro_steps)
        return {
            "micro_steps": self._micro_steps,
            "weight": self._weight,
            "is_announced": self._begun is not None,
            "forward_sync": self._ddp is None or bool(self._ddp.require_forward_param_sync),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lets the block begin inside of a window. Restore the gradients collected so far into `.grad` as well.

        Raises:
            RuntimeError: The block has begun.
        """
        if self._entered:
            raise RuntimeError("load_state_dict() was called inside of the window's block: call it before.")
        self._restored = dict(state_dict)

    # ---- The block.

    def __enter__(self) -> "Window":
        if self._entered:
            raise RuntimeError("this window was used before: call drivetrain.accumulate() for every with block.")
        self._check_in_backward()
        if self._restored is None and holds_anything(
            [param.grad for param in self._params() if param.grad is not None]
        ):
            raise RuntimeError(
                "drivetrain.accumulate() found gradients that are not its own: call optimizer.zero_grad() before "
                "the with block."
            )
        self._parts.open(self._unreduced_params())
        self._scheduler_steps = self._count_scheduler_steps()
        self._entered = self._is_open = True
        self._handles = [optimizer.register_step_pre_hook(self._refuse_step) for optimizer in self._optimizers]
        if self._ddp is not None:
            self._sync_before = self._ddp.require_backward_grad_sync
            self._handles.append(self._ddp.register_forward_pre_hook(self._begin_at_forward))
        self._begin()
        if self._restored is not None:
            self._continue(self._restored)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._complete()
            else:
                self._drop()
        except BaseException:
            self._drop()
            raise
        finally:
            self._is_open = False
            self._parts.close()
            for handle in self._handles:
                handle.remove()
            if self._ddp is not None:
                self._ddp.require_backward_grad_sync = self._sync_before

    def backward(self, loss: Tensor, weight: float | Tensor = 1.0, **kwargs: Any) -> bool:
        """Calls `loss.backward()`, and steps after the window's last micro-batch.

        Args:
            loss: The mean over this micro-batch, not divided by anything else. Use float32: a 16-bit loss rounds its
                weight to 16 bits.
            weight: The number of tokens or samples in the mean, finite and at least 0. A loss of weight 0 is ignored
                and may be nan. A CUDA tensor makes the call wait for the device.
            **kwargs: Arguments of `torch.Tensor.backward`.

        Returns:
            True if the optimizer was stepped.

        Raises:
            RuntimeError: The call is outside of the with block, or gradients were zeroed or written since the window
                began.
            ValueError: The weight is negative or not finite, or all weights of a window on all ranks sum to 0. The
                collected gradients are dropped.
        """
        if not self._is_open:
            raise RuntimeError(
                "window.backward() was called outside of its block: call it inside of 'with drivetrain.accumulate(...) "
                "as window:'."
            )
        weight = checked_weight(float(weight))
        self._check_untouched()
        self._check_in_backward()
        is_last = self._micro_steps + 1 >= self._steps
        try:
            self._announce()
            if self._scaler is not None:
                loss = self._scaler.scale(loss)
            if self._ddp is not None:
                self._ddp.require_backward_grad_sync = is_last
                self._ddp.backward(loss, weight, **kwargs)
            elif weight > 0:
                with self._stepping_in_backward(weight, is_last):
                    (loss * weight).backward(**kwargs)
            self._micro_steps += 1
            self._weight += weight
            self._parts.end_backward(self._micro_steps)
            if is_last:
                self._step()
        except BaseException:
            self._drop()
            raise
        if is_last:
            self._begin()
        else:
            self._expect_next()
        return is_last

    @contextmanager
    def _stepping_in_backward(self, weight: float, is_last: bool) -> Iterator[None]:
        """Lets optimizers that step in backward step only in the window's last backward, with the mean over the
        window. Likewise only its gradients leave for the CPU."""
        with ExitStack() as stack:
            stack.enter_context(final_gradients_leave(self._optimizers, is_last))
            for steps in self._in_backward:
                if is_last:
                    steps.divisor = self._weight + weight
                else:
                    stack.enter_context(steps.no_step())
            try:
                yield
            finally:
                for steps in self._in_backward:
                    steps.divisor = 1.0

    def _begin(self) -> None:
        if self._ddp is not None:
            # Makes the next forward broadcast rank 0's buffers, also on ranks whose window ended without a last
            # forward.
            self._ddp.require_forward_param_sync = True
        self._begin_window()

    def _continue(self, state: dict[str, Any]) -> None:
        """Continues inside of a window."""
        self._restored = None
        self._micro_steps, self._weight = state["micro_steps"], state["weight"]
        if self._ddp is not None:
            self._ddp.require_forward_param_sync = state["forward_sync"]
            self._ddp.require_backward_grad_sync = False
            self._count_restored(self._ddp)
            if state["is_announced"]:
                self._announce()
        self._expect_next()

    def _count_restored(self, ddp: DistributedDataParallel) -> None:
        """Gives the restored gradients their weight. The reducer takes weights for gradients that are yet to come."""
        params = self._reduced_params()
        grads = [param.grad for param in params]
        for param in params:
            param.grad = None
        if (rows := rows_of(ddp)) is None:
            ddp.reducer.begin_weighted(self._weight)
            ddp.reducer.end_weighted(failed=False)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        if rows is not None:
            rows.restore(self._weight)

    def _drop(self) -> None:
        """Drops the collected gradients. The window goes on for the other ranks."""
        for param in [*self._params(), *self._reduced_params()]:
            param.grad = None
        self._begin_window()

    def _begin_window(self) -> None:
        self._micro_steps = 0
        self._weight = 0.0
        self._parts.begin_window()
        self._expect_next()

    def _expect_next(self) -> None:
        """Prepares for the next forward and backward."""
        self._has_forwarded = False
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = self._micro_steps + 1 >= self._steps
        self._remember()

    def _complete(self) -> None:
        """Completes a shorter last window, and then the windows that other ranks still have."""
        if self._ddp is None:
            if self._micro_steps > 0:
                self._step()
            return
        if self._micro_steps > 0 or self._begun is not None:
            self._reduce_and_step()
        while self._is_any_rank_beginning():
            self._reduce_and_step()

    def _reduce_and_step(self) -> None:
        """Takes part in the rest of a window without micro-batches.

        Under shard="gradients" each of them reduces, so that all ranks count to the window's end.
        """
        assert self._ddp is not None
        self._parts.refuse_short_window(self._micro_steps)
        if self._scaler is not None:
            self._scaler.scale(torch.zeros((), device=self._ddp.device))  # Its scale exists from the first loss on.
        each_reduces = rows_of(self._ddp) is not None
        left = self._steps - self._micro_steps if each_reduces else 1
        lacks_forward = not self._has_forwarded if each_reduces else self._micro_steps == 0 and self._begun is None
        while left:
            if lacks_forward and self._ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
                self._ddp._sync_buffers()  # matches the forward of ranks with a micro-batch
            left -= 1
            self._ddp.require_backward_grad_sync = left == 0
            self._ddp.backward(_NOTHING, weight=0.0)
            lacks_forward = True
        self._step()
        self._begin()

    # ---- The step.

    def _step(self) -> None:
        """Steps with the gradients of a window whose last backward has finished."""
        if self._begun is not None:  # The announcement preceded the finished reduction.
            self._begun[0].wait()
            self._begun = None
        if self._ddp is not None and self._ddp._has_reducer():
            self._ddp.reducer._check_reducer_finalized()  # A parameter without a gradient leaves it incomplete.
        if self._ddp is None and not self._weight > 0:
            raise ValueError(f"the weights given to window.backward() sum to {self._weight}, expected a sum above 0.")
        alone = self._fused_and_alone()
        divisor = self._weight
        if alone is None or self._ddp is not None:
            divide(self._unreduced_params(), self._weight)
            divisor = 1.0
        self._is_stepping = True
        try:
            if alone is not None:
                with scaled_step(alone, self._max_grad_norm, divisor):
                    self._step_one(alone)
            else:
                self._clip()
                for optimizer in self._optimizers:
                    self._step_one(optimizer)
        finally:
            self._is_stepping = False
        if self._scaler is not None:
            self._scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
            self._scheduler_steps = self._count_scheduler_steps()
        for optimizer in self._optimizers:
            if not (isinstance(optimizer, FusedOptimizer) and kept_of(optimizer).zero_grads_in_step):
                optimizer.zero_grad()
        stepped = {id(param) for param in self._params()}
        for param in self._reduced_params():
            if id(param) not in stepped:
                param.grad = None
        self._parts.end_window()

    def _fused_and_alone(self) -> FusedOptimizer | None:
        """Returns the only optimizer if its step can divide and clip gradients."""
        first = self._optimizers[0]
        if len(self._optimizers) > 1 or not isinstance(first, FusedOptimizer):
            return None
        return first if kept_of(first).can_scale_in_step else None

    def _clip(self) -> None:
        if self._max_grad_norm is None:
            return
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
        clip_grad_norm_(self._params(), self._max_grad_norm)

    def _step_one(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scaler is not None:
            self._scaler.step(optimizer)
        else:
            optimizer.step()

    def _params(self) -> list[Tensor]:
        """Returns the parameters of all optimizers, each once."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return list({id(param): param for group in groups for param in group["params"]}.values())

    def _reduced_params(self) -> list[Tensor]:
        """Returns the parameters whose gradients the wrapper reduces, with or without an optimizer."""
        return [] if self._ddp is None else list(self._ddp._module_parameters)

    def _unreduced_params(self) -> list[Tensor]:
        """Returns the optimizers' parameters whose gradients are not divided yet."""
        reduced = {id(param) for param in self._reduced_params()}
        return [param for param in self._params() if id(param) not in reduced]

    # ---- Checks for misuse.

    def _check_in_backward(self) -> None:
        """Finds the optimizers that step in backward."""
        found = [kept_of(one).in_backward for one in self._optimizers if isinstance(one, FusedOptimizer)]
        self._in_backward = [steps for steps in found if steps is not None]
        if self._in_backward and not (self._ddp is None and self._scaler is None and self._max_grad_norm is None):
            raise NotImplementedError(
                "drivetrain.accumulate() cannot be combined with a scaler, max_grad_norm or DistributedDataParallel "
                "after optimizer.step_in_backward(), which consumes gradients during backward. "
                "Under DistributedDataParallel use no_sync() without weights."
            )

    def _refuse_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_stepping:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called inside of drivetrain.accumulate(), which steps when its "
                "window is full: take the call out of the loop."
            )

    def _remember(self) -> None:
        """Stores one gradient and its version, which change when a caller zeroes or adds to gradients."""
        params = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        with_grad = (param for group in params for param in group if param.grad is not None)
        chosen = next(with_grad, next((param for group in params for param in group), None))
        grad = None if chosen is None else chosen.grad
        self._seen = None if chosen is None else (chosen, grad, 0 if grad is None else grad._version)

    def _count_scheduler_steps(self) -> int | None:
        return getattr(self._scheduler, "_step_count", None)

    def _check_untouched(self) -> None:
        if self._count_scheduler_steps() != self._scheduler_steps:
            raise RuntimeError(
                "scheduler.step() was called inside of drivetrain.accumulate(), which steps the scheduler after every "
                "step of the optimizer: take scheduler.step() out of the loop."
            )
        if self._seen is None:
            return
        param, grad, version = self._seen
        if param.grad is not grad or (grad is not None and grad._version != version):
            raise RuntimeError(
                "gradients were zeroed or written inside of drivetrain.accumulate(), which collects them and zeroes "
                "them after its step. Take optimizer.zero_grad() out of the loop, and call window.backward() instead "
                "of loss.backward()."
            )

    # ---- Agreement between ranks. In every window each rank announces, before its first forward, that it has one. At
    # the end of its block a rank announces that it has none and waits for the others.

    def _begin_at_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._has_forwarded = True
            self._announce()
            self._parts.begin_forward(self._micro_steps)

    def _announce(self) -> None:
        if self._ddp is None or self._begun is not None or dist.get_world_size(self._ddp.process_group) == 1:
            return
        flag = torch.ones(1, dtype=torch.int32, device=self._ddp.device)
        self._begun = dist.all_reduce(flag, group=self._ddp.process_group, async_op=True), flag

    def _is_any_rank_beginning(self) -> bool:
        assert self._ddp is not None
        if dist.get_world_size(self._ddp.process_group) == 1:
            return False
        flag = torch.zeros(1, dtype=torch.int32, device=self._ddp.device)
        with hang_reports.waiting(self._ddp.reducer.progress(), "the beginning of another window of accumulate()"):
            dist.all_reduce(flag, group=self._ddp.process_group)
        return bool(flag.item() > 0)
