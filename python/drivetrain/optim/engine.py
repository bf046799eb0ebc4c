"""Steps an optimizer: natively where it can, by torch's own step where only that can."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _C
from . import precision
from .kept import NAME
from .left_to_torch import LeftToTorch, constructed
from .sharded import pieces
from .sharded.step import Measured


class Engine(LeftToTorch):
    """Does the work of one call of an optimizer. It lives as long as the call; what stays is the optimizer's `Kept`."""

    def step(self, closure: Callable[[], float] | None) -> float | None:
        """Performs one step."""
        overflow_flag, self.kept.overflow_flag = self.kept.overflow_flag, None
        if self.kept.in_backward is not None and (overflow_flag is not None or hasattr(self.optimizer, "found_inf")):
            raise RuntimeError(
                f"drivetrain.optim.{self.class_name}: GradScaler cannot be used with step_in_backward(): it must "
                "check all gradients before any update. Train in bfloat16 without a scaler, or call step() after "
                "backward."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.kept.reader is None:  # Copied and unpickled optimizers have no reader.
            self.kept.reader = _C.StepReader()
            self.kept.reader.leave_out(self.kept.left)
        self.leave_what_is_overridden()
        if self.kept.steps_as_torch:
            self.step_as_torch(self.params(), overflow_flag)
            return loss
        begin, refusal = time.perf_counter(), None
        if not self.kept.left:
            try:
                result, swapped = self._step_natively(self.kept.reader, overflow_flag)
            except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:  # Nothing has changed.
                if self.torchs_class() is None:
                    raise
                refusal = error
        if self.kept.left or refusal is not None:
            num_states = len(self.optimizer.state)
            self.step_left(self.kept.reader, refusal, overflow_flag)
            if self.kept.steps_as_torch:
                return loss
            overflow_flag = None
            result, swapped = self._step_natively(self.kept.reader, overflow_flag)
            self.order_states(num_states)
        if swapped is not None:
            if self.kept.zero_grads_in_step:
                swapped.zero_gradients()
            swapped.gather()
        self.kept.result = result
        counts = self.kept.counts
        seconds = time.perf_counter() - begin
        if result.is_on_device:  # Reading the result would wait for the device.
            counts.add(None, None, False, seconds)
            return loss
        counts.add(result.grad_norm, self.kept.max_grad_norm, result.skipped, seconds)
        if overflow_flag is not None:
            overflow_flag.fill_(float(result.skipped))
        if result.skipped and getattr(self.optimizer, "found_inf", None) is None:
            warnings.warn(
                f"drivetrain.optim.{self.class_name}: the norm of the gradients is {result.grad_norm}; the step "
                "was left out, parameters and state are as before (later ones: see last_step_skipped).",
                stacklevel=4,
            )
        return loss

    def _step_natively(
        self, reader: _C.StepReader, overflow_flag: Tensor | None
    ) -> tuple[_C.StepResult | Measured, pieces.Swapped | None]:
        with pieces.in_place(self.optimizer, with_gradients=True) as swapped:
            return self.step_all(reader, self.step_options(overflow_flag)), swapped

    def add_group(self, torchs_add: Callable[[dict[str, Any]], None], param_group: dict[str, Any]) -> None:
        """Adds a group by torch's method. After an error the optimizer has the groups that it had before."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")  # torch's words
        self.refuse_unsupported(param_group)
        for option, value in self.kept.formats.items():
            param_group.setdefault(option, value)
        precision.check(self.formats_of(param_group))
        torchs_add(param_group)
        refused = self.refused_in(len(self.param_groups) - 1)
        if refused and self.torchs_class() is None:
            self.param_groups.pop()
            raise refused[0][1]
        self.note_refused(refused)
        self.find_devices()

    def constructed(self) -> bool:
        """Ends a constructor, and returns whether the object is still one of drivetrain's class."""
        self.leave_what_groups_refused()
        if NAME not in self.optimizer.__dict__:  # It has become one of torch's class.
            return False
        self.kept.is_in_constructor = False
        self.place_step_counters()
        self.find_devices()
        constructed.append(self.description())
        return True

    def description(self) -> str:
        """Returns the class with the numbers of its parameters and groups."""
        count, num_groups = sum(len(group["params"]) for group in self.param_groups), len(self.param_groups)
        groups = "1 group" if num_groups == 1 else f"{num_groups} groups"
        return f"{self.class_name} ({count} parameters in {groups})"
