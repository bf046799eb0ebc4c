"""A loss scaler whose search for overflows costs no pass: drivetrain's optimizers check gradients in their step."""

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from . import _C
from .optim.base import FusedOptimizer
from .optim.kept import in_place_of, kept_of
from .optim.native_step import has_sparse
from .optim.rule import rule_of
from .optim.sharded import over_groups


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, with a floor for the scale, patience before it falls, and one pass less.

    With torch's class a step reads and writes every gradient once to look for infs and NaNs, before the optimizer reads
    them. This class leaves the search to an optimizer of drivetrain.optim whose parameters share one device. That reads
    each gradient once for the search and for `max_grad_norm`, and writes none. Other optimizers step as under torch's
    class. On CUDA no method waits for the device.

    On the CPU, unscale_() takes one pass on all threads. Results are torch's, to the bit.

    Args:
        device: Device type of the gradients, such as "cuda" or "cpu".
        init_scale: Initial scale.
        growth_factor: Multiplies the scale after `growth_interval` steps without an overflow.
        backoff_factor: Multiplies the scale when it falls.
        growth_interval: Number of steps without an overflow before the scale grows.
        enabled: False turns every method into the unscaled operation.
        min_scale: Lower bound of the scale.
        hysteresis: Number of overflows, not necessarily in a row, before the scale falls. It starts again when the
            scale grows, as in Megatron-LM's DynamicGradScaler.

    Raises:
        ValueError: min_scale is negative or not finite, or hysteresis below 1.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 0.0,
        hysteresis: int = 1,
    ) -> None:
        if not 0 <= min_scale < float("inf"):
            raise ValueError(f"min_scale is {min_scale}, expected a finite number, 0 or above")
        if hysteresis < 1:
            raise ValueError(f"hysteresis is {hysteresis}, expected a number of overflows, 1 or above")
        self._min_scale = min_scale
        self._hysteresis = hysteresis
        self._init_patience = hysteresis
        self._patience: torch.Tensor | None = None  # int32 on the scale's device; overflows left before the scale falls
        self._found_inf: torch.Tensor | None = None  # overflow flag of the last update()
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    @property
    def last_step_skipped(self) -> bool:
        """True if the last update() followed an overflow, so that the step was skipped. Waits for the device."""
        return self._found_inf is not None and bool(self._found_inf > 0)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer unless a gradient overflowed. Optimizers of drivetrain unscale in their step."""
        if not isinstance(optimizer, FusedOptimizer) or self._goes_torchs_way(optimizer):
            return super().step(optimizer, *args, **kwargs)
        kept = kept_of(optimizer)
        kept.our_scaler_steps = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            kept.our_scaler_steps = False

    def _goes_torchs_way(self, optimizer: FusedOptimizer) -> bool:
        """Returns whether step() goes torch's way, with unscale_() and a search before optimizer.step().

        That takes no pass more on the CPU, and hooks on steps see what they see under torch. On CUDA it waits for the
        device.
        """
        scale = self._scale if self._enabled and kept_of(optimizer).in_backward is None else None
        if scale is not None and (scale.device.type == "cpu" or type(self) in in_place_of):
            return True
        return rule_of(type(optimizer)).step_sparse is not None and has_sparse(optimizer.param_groups)

    @_disable_dynamo  # it cannot trace the native call, and says so
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscales plain CPU gradients on all threads; shares the finding where ranks hold different gradients."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if over_groups.has_any(params):  # ranks hold different gradients, and must skip the same steps
            by_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            found = torch.stack([found_inf, *(flag.to(found_inf.device) for flag in by_device.values())]).max()
            over_groups.share_overflow(params, [found])
            for flag in by_device.values():
                flag.copy_(found)
            return by_device
        grads = [param.grad for param in params if param.grad is not None]
        are_plain = all(type(grad) is Tensor and grad.dtype is not torch.float16 for grad in grads)  # torch refuses it
        if grads and inv_scale.device.type == "cpu" and are_plain:
            were_finite = _C.multiply_gradients(grads, float(inv_scale))
            if were_finite is not None:
                return {found_inf.device: found_inf if were_finite else found_inf.fill_(1.0)}
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Replaces the search of torch's step(), which runs unless unscale_() has run."""
        if not (isinstance(optimizer, FusedOptimizer) and optimizer._step_supports_amp_scaling):
            return super()._check_inf_per_device(optimizer)
        devices = (param.device for group in optimizer.param_groups for param in group["params"])
        found = kept_of(optimizer).overflow_flag = torch.zeros((), device=next(devices, torch.device("cpu")))
        per_device: dict[Any, Any] = {found.device: found}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = per_device
        return per_device

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Updates the scale as torch does, with min_scale and hysteresis."""
        if not self._enabled or new_scale is not None:
            super().update(new_scale)
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        flags = [
            flag for state in self._per_optimizer_states.values() for flag in state["found_inf_per_device"].values()
        ]
        before, clean_before = scale.clone(), growth_tracker.clone()
        super().update()
        if not flags:
            return
        found = self._found_inf = torch.stack(
            [flag.to(scale.device, non_blocking=True).reshape(()) for flag in flags]
        ).sum()
        overflowed = found > 0
        if self._patience is None:
            self._patience = torch.full_like(growth_tracker, self._init_patience)
        self._patience -= overflowed.to(self._patience.dtype)
        scale.copy_(torch.where(overflowed & (self._patience > 0), before, scale).clamp_(min=self._min_scale))
        is_grown = ~overflowed & (growth_tracker <= clean_before)  # The count of clean steps restarted.
        self._patience.copy_(torch.where(is_grown, self._hysteresis, self._patience))

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's entries, min_scale, hysteresis and the patience. torch's class loads it too."""
        state = super().state_dict()
        if not state:
            return state
        patience = self._init_patience if self._patience is None else int(self._patience)
        return state | {"min_scale": self._min_scale, "hysteresis": self._hysteresis, "_patience": patience}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of either class; entries that torch's class lacks keep their values."""
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        self._min_scale = state_dict.get("min_scale", self._min_scale)
        self._hysteresis = state_dict.get("hysteresis", self._hysteresis)
        self._init_patience = state_dict.get("_patience", self._hysteresis)
        self._patience = None

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            state["_init_patience"] = self._init_patience if self._patience is None else int(self._patience)
            state["_patience"] = None
            state["_found_inf"] = None
        return state
