"""Traces training steps without computing them: tensors have shapes and no values, and take no memory."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ..frames import users_line
from ..optim.state_dicts import states_of_params
from .kernels import KernelChoice
from .period import steps_until_settled
from .recorder import Recorder, native_steps, without_copies
from .trace import STEP, Event, ParameterInfo, StepTrace


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
        self._recorder = Recorder(self, self.trace, label)
        self._recorder.begins_empty = is_script
        if is_script and device_kind == "cuda":
            self._recorder.on_device = set()
        self._is_cuda = device_kind == "cuda"
        self._kernels = KernelChoice(device_kind)
        self._stack = ExitStack()
        self._restore: list[Callable[[], None]] = []
        self._names: dict[int, str] = {}
        self._modules: list[str] = []
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
            self._recorder.know(parameter, "parameters", index, name)
            grad = parameter.grad
            if grad is not None:
                self._recorder.know(grad, "gradients", index, name)
            self._restore.append(functools.partial(setattr, parameter, "grad", grad))
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._mark_gradient)
                self._restore.append(hook.remove)
        for name, buffer in model.named_buffers():
            self._recorder.know(buffer, "buffers", -1, name)

    def _mark_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._recorder.mark(parameter.grad, "gradients", self._params[id(parameter)])

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
        self._stack.enter_context(native_steps(self._recorder))
        self._stack.enter_context(cast(Any, self._kernels))
        self._stack.enter_context(cast(Any, self._recorder))
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
        if _needs_values(error):
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
        self._recorder.finish()
        self.trace.num_threads = torch.get_num_threads()
        self.trace.events = without_copies(self.trace, self._recorder.accumulations)
        if not any(op.phase == "backward" for op in self.trace.ops):
            raise PlanError(f"{self._what} ran no backward: a training step runs forward, loss and backward")
        if self._is_cuda and any(op.name.startswith("aten::mkldnn_rnn_layer") for op in self.trace.ops):
            self.trace.notes.append("recurrent layers: kept for backward is what oneDNN's keep, and cuDNN's may differ")
        return self.trace

    def steps_until_settled(self) -> int:
        """Returns the number of steps after which the optimizers that have stepped take the same memory."""
        return 1 + max(self._optimizers.values(), default=0)

    # ---- Hooks.

    def index_of(self, parameter: Tensor) -> int:
        """Returns the index of a parameter; -1 if it is none of the model's."""
        return self._params.get(id(parameter), -1)

    def moving(self, moves: bool) -> bool:
        """Says that a call moves data to the planned device, or no longer does. Returns what was said before."""
        before, self._recorder.is_moving = self._recorder.is_moving, moves
        return before

    def module(self) -> str:
        """Returns the name of the innermost module whose forward runs."""
        return self._modules[-1] if self._modules else ""

    def _enter_module(self, module: nn.Module, _: object) -> None:
        if self._is_script and not self._modules and id(module) not in self._names:
            self.add_model(module)
        self._modules.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, *_: object) -> None:
        if self._modules:
            self._modules.pop()

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._recorder.optimizer = optimizer
        self._recorder.optimizers_task = torch._C._current_graph_task_id()
        if id(optimizer) in self._optimizers:
            return
        self._optimizers[id(optimizer)] = steps_until_settled(optimizer)
        self.trace.optimizers.append(type(optimizer).__name__)
        before = {parameter: dict(state) for parameter, state in states_of_params(optimizer.state)}
        self._restore.append(lambda: _restore_state(optimizer, before))
        for parameter, state in before.items():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    self._recorder.know(value, "optimizer states", self._params.get(id(parameter), -1), name)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._recorder.optimizer = None
        for parameter, state in states_of_params(optimizer.state):
            for value in tree_leaves(dict(state)):
                if isinstance(value, Tensor):
                    self._recorder.mark(value, "optimizer states", self._params.get(id(parameter), -1))


def _line_of(error: BaseException) -> str:
    """Returns the user's line that raised the error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return users_line(frames[::-1])


def _needs_values(error: BaseException) -> bool:
    text = str(error)
    return any(part in text for part in ("data pointer", "numpy()", "tolist", "FakeTensor", "meta tensor"))


def _restore_state(optimizer: torch.optim.Optimizer, before: dict[Any, dict[str, Any]]) -> None:
    for parameter, _ in list(states_of_params(optimizer.state)):
        del optimizer.state[parameter]
    optimizer.state.update(before)
