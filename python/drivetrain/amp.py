"""A loss scaler whose search for overflows costs no pass: drivetrain's optimizers check gradients in their step."""

from typing import Any

import torch
from torch import Tensor

from . import _C
from .optim import sparse
from .optim.base import FusedOptimizer
from .optim.kept import in_place_of, kept_of
from .optim.rule import rule_of
from .optim.sharded import over_groups


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler with one pass less.

    With torch's class a step reads and writes every gradient once to look for infs and NaNs, before the optimizer reads
    them. This class leaves the search to an optimizer of drivetrain.optim whose parameters share one device. That reads
    each gradient once for the search and for `max_grad_norm`, and writes none. Other optimizers step as under torch's
    class. On CUDA no method waits for the device.

    On the CPU, unscale_() takes one pass on all threads. Results are torch's, to the bit.

    It takes the arguments of that class.
    """

    _found_inf: torch.Tensor | None = None  # overflow flag of the last update()

    @property
    def last_step_skipped(self) -> bool:
        """True if the last update() followed an overflow, so that the step was skipped. Waits for the device."""
        return self._found_inf is not None and bool(self._found_inf > 0)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer unless a gradient overflowed. Optimizers of drivetrain unscale in their step."""
        if not isinstance(optimizer, FusedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if self._goes_torchs_way(optimizer):
            return super().step(optimizer, *args, **kwargs)
        if rule_of(type(optimizer)).step_sparse is not None and sparse.has_any(optimizer.param_groups):
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
        if not self._enabled or self._scale is None or kept_of(optimizer).in_backward is not None:
            return False
        return self._scale.device.type == "cpu" or type(self) in in_place_of

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
        if grads and inv_scale.device.type == "cpu" and all(map(_is_plain, grads)):
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
        """Updates the scale as torch does, and remembers whether a gradient overflowed."""
        states = self._per_optimizer_states.values() if self._enabled and new_scale is None else ()
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        super().update(new_scale)
        if flags:
            on_one_device = [flag.to(flags[0].device, non_blocking=True).reshape(()) for flag in flags]
            self._found_inf = torch.stack(on_one_device).sum()


def _is_plain(grad: Tensor) -> bool:
    """Returns whether the native pass may look at the gradient. torch's refuses float16."""
    return type(grad) is Tensor and grad.dtype is not torch.float16
