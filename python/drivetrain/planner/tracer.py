"""Traces training steps without computing them: tensors have shapes and no values, and take no memory."""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..frames import users_line
from ..optim.state_dicts import states_of_params
from .period import steps_until_settled
from .recorder import Recorder, native_steps, without_copies
from .trace import STEP, Event, ParameterInfo, StepTrace

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_MAX_FLASH_HEAD = 256  # of csrc flash attention; a multiple of 8


class PlanError(RuntimeError):
    """A step cannot be planned: it depends on values that a plan does not compute, or it is incomplete."""


def trace_steps(
    model: nn.Module, step_fn: Callable[[], object], *, device_kind: str = "cpu", num_steps: int = 2
) -> StepTrace:
    """Traces steps of a model, `num_steps` or more.

    Nothing is computed. Afterwards, parameters, gradients and optimizer states are as before. The first step makes
    optimizer states; the last one is what the plan describes. The kind of device decides how attention and dropout run.

    Raises:
        PlanError: The step depends on values.
    """
    parameter = next(model.parameters(), None)
    label = parameter.device if parameter is not None else torch.device("cpu")
    tracer = Tracer(label, device_kind)
    tracer.add_model(model)
    random_state = torch.get_rng_state()
    try:
        with tracer:
            while tracer.trace.num_steps < max(num_steps, tracer.steps_until_settled()):
                tracer.begin_step()
                step_fn()
                if not tracer.trace.optimizers:  # the loop around step_fn steps and clears gradients
                    model.zero_grad()
    finally:
        torch.set_rng_state(random_state)
    return tracer.finish()


class Tracer:
    """Records what runs inside of its `with` block.

    All tensors without values claim to be on the device `label`. Models of a script become known when they are called.
    """

    def __init__(self, label: torch.device, device_kind: str, *, is_script: bool = False) -> None:
        self.trace = StepTrace()
        self._is_script = is_script
        self._what = "the script" if is_script else "step_fn"  # in errors
        self._modules: list[str] = []
        self.recorder = Recorder(self.trace, self._modules, label)
        self.recorder.begins_empty = is_script
        if is_script and device_kind == "cuda":
            self.recorder.on_device = set()
        self._is_cuda = device_kind == "cuda"
        self._kernels = KernelChoice(device_kind)
        self._stack = ExitStack()
        self._restore: list[Callable[[], None]] = []
        self._names: dict[int, str] = {}
        self._optimizers: dict[int, int] = {}  # by id: the steps until its memory is settled
        self._params: dict[int, int] = {}

    # ---- What exists before the step.

    def add_model(self, model: nn.Module) -> None:
        """Makes parameters, gradients and buffers of a model known."""
        self._names.update((id(module), name) for name, module in model.named_modules())
        for name, parameter in model.named_parameters():
            if id(parameter) in self._params:
                continue
            index = self._params[id(parameter)] = len(self.trace.parameters)
            size = parameter.numel() * parameter.element_size()
            self.trace.parameters.append(
                ParameterInfo(name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad, size)
            )
            self.recorder.know(parameter, "parameters", index, name)
            grad = parameter.grad
            if grad is not None:
                self.recorder.know(grad, "gradients", index, name)
            self._restore.append(functools.partial(setattr, parameter, "grad", grad))
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._mark_gradient)
                self._restore.append(hook.remove)
        for name, buffer in model.named_buffers():
            self.recorder.know(buffer, "buffers", -1, name)

    def _mark_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.recorder.mark(parameter.grad, "gradients", self._params[id(parameter)])

    # ---- The block.

    def __enter__(self) -> Tracer:
        hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        for hook in hooks:
            self._stack.callback(hook.remove)
        self._stack.enter_context(native_steps(self.trace, self._params))
        self._stack.enter_context(cast(Any, self._kernels))
        self._stack.enter_context(cast(Any, self.recorder))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._stack.close()
        for restore in reversed(self._restore):
            restore()
        if error is None or kind is None or not issubclass(kind, Exception):
            return
        if isinstance(error, DynamicOutputShapeException):
            raise PlanError(
                f"{self._what} calls {error.func} ({_line_of(error)}), whose result has a shape that depends on "
                f"values. A plan computes no values: leave the call out of {self._what}, or compute it before"
            ) from error
        if "SparseTensorImpl" in str(error):
            raise PlanError(
                f"{self._what} makes a sparse tensor ({_line_of(error)}), and a plan knows dense ones only: plan with "
                "sparse=False"
            ) from error
        if any(part in str(error) for part in ("data pointer", "numpy()", "tolist", "FakeTensor", "meta tensor")):
            raise PlanError(
                f"{self._what} reads the values of a tensor ({_line_of(error)}), and a plan computes no values. Leave "
                f"out what reads them, such as .numpy() or .tolist(). ({error})"
            ) from error

    def begin_step(self) -> None:
        """Begins another step."""
        self.trace.events.append(Event(STEP, self.trace.num_steps))
        self.trace.num_steps += 1

    def finish(self) -> StepTrace:
        """Ends the recording and returns the trace, in which autograd adds up gradients in place."""
        self.recorder.finish()
        self.trace.num_threads = torch.get_num_threads()
        self.trace.events = without_copies(self.trace, self.recorder.accumulations)
        if not any(op.phase == "backward" for op in self.trace.ops):
            raise PlanError(f"{self._what} ran no backward: a training step runs forward, loss and backward")
        if self._is_cuda and any(op.name.startswith("aten::mkldnn_rnn_layer") for op in self.trace.ops):
            self.trace.notes.append("recurrent layers: kept for backward is what oneDNN's keep, and cuDNN's may differ")
        return self.trace

    def steps_until_settled(self) -> int:
        """Returns the number of steps after which the optimizers that have stepped take the same memory."""
        return 1 + max(self._optimizers.values(), default=0)

    # ---- Hooks.

    def _enter_module(self, module: nn.Module, _: object) -> None:
        if self._is_script and not self._modules and id(module) not in self._names:
            self.add_model(module)
        self._modules.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, *_: object) -> None:
        if self._modules:
            self._modules.pop()

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.recorder.optimizer = optimizer
        self.recorder.optimizers_task = torch._C._current_graph_task_id()
        if id(optimizer) in self._optimizers:
            return
        self._optimizers[id(optimizer)] = steps_until_settled(optimizer)
        self.trace.optimizers.append(type(optimizer).__name__)
        before = {parameter: dict(state) for parameter, state in states_of_params(optimizer.state)}
        self._restore.append(lambda: _restore_state(optimizer, before))
        for parameter, state in before.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    self.recorder.know(value, "optimizer states", self._params.get(id(parameter), -1), name)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.recorder.optimizer = None
        for parameter, state in states_of_params(optimizer.state):
            for value in tree_leaves(dict(state)):
                if isinstance(value, Tensor):
                    self.recorder.mark(value, "optimizer states", self._params.get(id(parameter), -1))


def _line_of(error: BaseException) -> str:
    """Returns the user's line that raised the error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return users_line(frames[::-1])


def _restore_state(optimizer: torch.optim.Optimizer, before: dict[Any, dict[str, Any]]) -> None:
    for parameter, _ in list(states_of_params(optimizer.state)):
        del optimizer.state[parameter]
    optimizer.state.update(before)


class KernelChoice(TorchFunctionMode):
    """Replaces functions whose kernel depends on the device.

    torch asks the device of the tensors, and traced tensors are not on the planned one. Attention becomes the fused
    kernel that torch's own rules choose, or the products and the softmax that it falls back to. Dropout on a GPU
    becomes the fused kernel, which keeps a mask of bytes.
    """

    def __init__(self, device_kind: str) -> None:
        super().__init__()
        self._is_cuda = device_kind == "cuda"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if self._is_cuda and func is functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        kind = query.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            # torch casts the arguments, and runs the kernel without autocast.
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
            with torch.autocast(kind, enabled=False):
                return self._attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # torch turns a mask of truth values into one that is added.
            kept, hidden = (torch.scalar_tensor(number, dtype=query.dtype) for number in (0.0, -math.inf))
            attn_mask = torch.where(attn_mask, kept, hidden)
        found: Tensor
        is_fused = query.dim() == 4 and query.shape[-1] == value.shape[-1]
        is_fused = is_fused and all(t.stride(-1) == 1 for t in (query, key, value)) and 0 not in query.shape
        if is_fused and self._is_cuda:
            if query.dtype in _HALF and attn_mask is None and query.shape[-1] <= _MAX_FLASH_HEAD:
                flash = _aten._scaled_dot_product_flash_attention
                found = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
                return found
            if key.shape[-3] == query.shape[-3]:  # the memory-efficient kernel has no grouped heads
                needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
                mask = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
                efficient = _aten._scaled_dot_product_efficient_attention
                found = efficient(query, key, value, mask, needs_gradient, dropout_p, is_causal, scale=scale)[0]
                return found
        elif is_fused and dropout_p == 0:
            if attn_mask is None or (not attn_mask.requires_grad and attn_mask.dim() in (2, 4)):
                flash = _aten._scaled_dot_product_flash_attention_for_cpu
                found = flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
                return found
        plain = _aten._scaled_dot_product_attention_math
        found = plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
        return found


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, training)[0]
    return functional.dropout(input, p, training, inplace)
