"""Gradient scaling: divides, clips and checks gradients inside the optimizer step."""

from typing import Any

import torch
from torch import Tensor

from .. import _C
from .kept import kept_of
from .rule import rule_of


class GradScaling:
    """Collects what a step does with gradients besides reading them: unscaling, clipping and zeroing.

    Args:
        optimizer: The optimizer of a script, or a proxy that shares its attributes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer: Any = optimizer
        self.kept = kept_of(optimizer)
        self.rule = rule_of(type(optimizer))
        self.class_name = type(optimizer).__name__

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def params(self) -> list[Tensor]:
        """Returns the parameters of all groups."""
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def is_on_cpu(self) -> bool:
        """True if all parameters are on the CPU."""
        return all(param.device.type == "cpu" for param in self.params())

    def find_devices(self) -> None:
        """Determines whether all parameters share one device, once per change of the groups, because it visits each
        one."""
        self.kept.can_scale_in_step = len({param.device for param in self.params()}) <= 1

    @property
    def announces_scaling(self) -> bool:
        """True if a GradScaler is to leave the unscaling to the step.

        torch's classes announce it with fused=True only. Frameworks refuse to clip the gradients of such an optimizer,
        and step pre-hooks then see scaled gradients. So plain optimizers must not announce it, although the step could
        unscale.
        """
        kept = self.kept
        is_asked = kept.our_scaler_steps or kept.max_grad_norm is not None or bool(self.optimizer.defaults.get("fused"))
        return is_asked and kept.can_scale_in_step

    def step_options(self, overflow_flag: Tensor | None) -> _C.StepOptions:
        """Returns what the step does with gradients, from the optimizer's attributes."""
        scale, found_inf = self._scalar("grad_scale", 1.0), self._scalar("found_inf", 0.0)
        # A scaler's scale may grow to infinity; the gradients are then found not to be finite.
        if isinstance(scale, float) and not scale > 0 and not (isinstance(found_inf, float) and found_inf):
            raise ValueError(f"grad_scale is {scale}, expected a number above 0: gradients are divided by it")
        return _C.StepOptions(
            grad_scale=scale,
            found_inf=found_inf,
            max_grad_norm=self.kept.max_grad_norm,
            check_finite=overflow_flag is not None,
            zero_grads=self.kept.zero_grads_in_step,
            overflow=overflow_flag if overflow_flag is not None and overflow_flag.is_cuda else None,
        )

    def _scalar(self, name: str, default: float) -> float | Tensor:
        """Returns the attribute of that name; on CUDA it stays on the device if the parameters are there."""
        value = getattr(self.optimizer, name, None)
        if isinstance(value, Tensor) and value.is_cuda and not self.is_on_cpu:
            return value.detach()
        return default if value is None else float(value)
