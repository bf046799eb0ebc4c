"""Leaves the multiplications of unscaling and clipping to the step, which does them while it reads the gradients."""

import math
from collections import UserDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .. import _C
from . import over_groups, pieces
from .clip_over_ranks import clip_over_groups

# Below, the squares of unscaled gradients may be subnormal, and a norm may differ in bits from the norm of scaled ones.
_SMALLEST_NORM = 2.0**-40

_torchs_clip_grad_norm_ = torch.nn.utils.clip_grad_norm_  # install(optim=True) puts the function below in its place


class FoundInf(UserDict[torch.device, Tensor]):
    """Overflow flags by device as torch.amp.GradScaler keeps them. The first look at them searches the gradients."""

    def __init__(self, flag: Tensor, deferral: _C.Deferral) -> None:
        self._flags = {flag.device: flag}
        self._deferral: _C.Deferral | None = deferral

    @property
    def data(self) -> dict[torch.device, Tensor]:  # type: ignore[override]
        """The flags after the search, which every method of UserDict reads."""
        deferral, self._deferral = self._deferral, None
        if deferral is not None and not deferral.were_finite():
            for flag in self._flags.values():
                flag.fill_(1.0)
        return self._flags

    def __len__(self) -> int:
        return len(self._flags)

    def copy(self) -> Any:
        """Returns a plain dict."""
        return dict(self.data)

    __copy__ = copy

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as a plain dict."""
        return dict, (self.copy(),)


@_disable_dynamo
def defer_unscaling(params: list[Tensor], inv_scale: Tensor, found_inf: Tensor) -> FoundInf | None:
    """Multiplies the gradients by the inverse scale once code reads them.

    Args:
        params: All parameters of one optimizer.
        inv_scale: float32 [].
        found_inf: float32 [], 0; becomes 1 if a gradient is not finite.

    Returns:
        The flags of the search for overflows, or None if a gradient cannot wait. Nothing has changed then.
    """
    if inv_scale.device.type != "cpu" or pieces.has_any(params):
        return None
    deferral = _C.defer_gradients(params, float(inv_scale))
    return None if deferral is None else FoundInf(found_inf, deferral)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips gradients with the bits of torch.nn.utils.clip_grad_norm_, and leaves the multiplication to the step.

    It reads the gradients once and writes none if they belong to optimizers of drivetrain.optim and nothing else refers
    to them. After drivetrain.amp.GradScaler.unscale_() the same read searches for overflows. The step multiplies while
    it reads. Whoever looks at a `.grad` before that gets the clipped gradient: the look multiplies all of them.

    `drivetrain.clip_grad_norm_` sums the norm in float64 instead. Its bits depend on no number of threads, but they are
    not torch's.

    Args:
        parameters: A tensor or tensors whose gradients are clipped.
        max_norm: The largest 2-norm of all gradients together.
        norm_type: The norm's order. Orders other than 2.0 use torch's function.
        error_if_nonfinite: Raises if the norm is inf or nan, before gradients are clipped.
        foreach: Passed to torch's function.

    Returns:
        The norm before clipping: a 0-dimensional tensor as from torch's function.

    Raises:
        NotImplementedError: A norm other than the 2-norm of parameters of DistributedDataParallel's `expert_groups`.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if over_groups.has_any(params):
        return clip_over_groups(params, max_norm, norm_type, error_if_nonfinite)
    if params and float(norm_type) == 2.0 and not torch.compiler.is_compiling():
        total = _clip_in_step(params, float(max_norm), foreach)
        if total is not None:
            return total
    # An empty generator gets torch's warning.
    return _torchs_clip_grad_norm_(params or parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def _clip_in_step(params: list[Tensor], max_norm: float, foreach: bool | None) -> Tensor | None:
    """Defers clipping and returns the norm, or returns None if torch's function must do it."""
    if not all(isinstance(param, Tensor) for param in params) or pieces.has_any(params):
        return None
    deferrals = _C.deferrals_of(params)
    if not deferrals:
        deferral = _C.defer_gradients(params, None)
        if deferral is None:
            return None
        deferrals = [deferral]
    norm = _C.deferred_norm(params, deferrals)
    if norm is None or not (norm == 0 or _SMALLEST_NORM <= norm < math.inf):
        return None
    for deferral in deferrals:
        deferral.set_finite()
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if not _C.multiply_deferred(deferrals, float(coefficient)):
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach)
    return norm
