"""Gradient scaling: divides, clips and checks gradients inside the optimizer step."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .. import _C
from .arguments import check_max_grad_norm
from .in_backward import WHY_NOT_CLIPPED

if TYPE_CHECKING:
    from . import sharded_step
    from .in_backward import StepInBackward


class GradScaling(torch.optim.Optimizer):
    """Collects what a step does with gradients besides reading them: unscaling, clipping and zeroing."""

    # A GradScaler sets these around a step and deletes them after it.
    grad_scale: float | Tensor
    found_inf: float | Tensor

    zero_grads_in_step: bool = False
    in_backward: "StepInBackward | None" = None  # the result of step_in_backward(), until it is removed
    _can_scale_in_step: bool  # whether all gradients are on one device, as an unscaling step requires
    _step_supports_amp_scaling: bool  # read by torch's GradScaler and by frameworks
    _max_grad_norm: float | None = None
    _result: "_C.StepResult | sharded_step.Measured | None" = None  # of the last step
    _overflow_flag: Tensor | None = None  # drivetrain.amp.GradScaler reads the next step's overflow from it

    @property
    def max_grad_norm(self) -> float | None:
        """The norm that gradients are clipped to, or None for no clipping."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        check_max_grad_norm(value)
        if value is not None and self.in_backward is not None:
            raise NotImplementedError(f"max_grad_norm is {value}, but {WHY_NOT_CLIPPED}")
        self._max_grad_norm = value
        if hasattr(self, "_can_scale_in_step"):  # The constructor announces it later.
            self._announce_scaling()

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of the last step's gradients, unscaled and before clipping. None if the step did not need it.

        Reading it on CUDA waits for the device; after the replay of a captured step it is the replay's norm.
        """
        return None if self._result is None else self._result.grad_norm

    @property
    def last_step_skipped(self) -> bool:
        """True if the last step() changed nothing because a gradient was not finite.

        Reading it on CUDA waits for the device; after the replay of a captured step it describes the replay.
        """
        return self._result is not None and self._result.skipped

    @property
    def is_on_cpu(self) -> bool:
        """True if all parameters are on the CPU."""
        return all(param.device.type == "cpu" for group in self.param_groups for param in group["params"])

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients as torch does. It drops factors that gradients still wait for (deferral.py).

        Args:
            set_to_none: Sets gradients to None instead of zeros.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        if not _C.drop_deferred(params, zeroes=not set_to_none) or set_to_none:
            super().zero_grad(set_to_none)

    def _find_devices(self) -> None:
        """Determines whether all parameters share one device, once per change of the groups, because it visits each
        one. Lets their gradients wait for factors from now on."""
        params = [param for group in self.param_groups for param in group["params"]]
        self._can_scale_in_step = len({param.device for param in params}) <= 1
        self._announce_scaling()
        _C.watch_gradients([param for param in params if isinstance(param, Tensor)])

    def _announce_scaling(self, *, by_our_scaler: bool = False) -> None:
        """Tells a GradScaler whether the step unscales gradients.

        torch's classes announce it with fused=True only. Frameworks refuse to clip the gradients of such an optimizer,
        and step pre-hooks then see scaled gradients. So plain optimizers must not announce it, although the step could
        unscale.
        """
        is_asked = by_our_scaler or self.max_grad_norm is not None or bool(self.defaults.get("fused"))
        self._step_supports_amp_scaling = is_asked and self._can_scale_in_step

    def _options(self, overflow_flag: Tensor | None) -> _C.StepOptions:
        scale, found_inf = self._scalar("grad_scale", 1.0), self._scalar("found_inf", 0.0)
        # A scaler's scale may grow to infinity; the gradients are then found not to be finite.
        if isinstance(scale, float) and not scale > 0 and not (isinstance(found_inf, float) and found_inf):
            raise ValueError(f"grad_scale is {scale}, expected a number above 0: gradients are divided by it")
        return _C.StepOptions(
            grad_scale=scale,
            found_inf=found_inf,
            max_grad_norm=self.max_grad_norm,
            check_finite=overflow_flag is not None,
            zero_grads=self.zero_grads_in_step,
            overflow=overflow_flag if overflow_flag is not None and overflow_flag.is_cuda else None,
        )

    def _scalar(self, name: str, default: float) -> float | Tensor:
        """Returns the attribute of that name; on CUDA it stays on the device if the parameters are there."""
        value = getattr(self, name, None)
        if isinstance(value, Tensor) and value.is_cuda and not self.is_on_cpu:
            return value.detach()
        return default if value is None else float(value)
