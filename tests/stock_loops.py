"""Provides pairs of stock training loops that tests compare: one on torch's scaler and clipping, one on ours."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain import optim
from drivetrain.amp import GradScaler
from optim_cases import assert_same, make_params

TORCHS_CLIP = torch.nn.utils.clip_grad_norm_
SCALE = 2.0**12


class Loop:
    """A stock training loop's objects: on torch's scaler and clipping, or on ours. Both step with our optimizers, whose
    arithmetic differs from torch's in the last bits."""

    def __init__(self, is_ours: bool, params: list[Tensor], make: Callable[[list[Tensor]], Any], **scaler: Any) -> None:
        self.is_ours, self.params = is_ours, params
        self.optimizer = make(params)
        scaler_class = GradScaler if is_ours else torch.amp.GradScaler
        self.scaler = scaler_class("cpu", **{"init_scale": SCALE, "growth_interval": 2} | scaler)
        self.scale = self.scaler.scale(torch.ones(()))  # creates the scaler's tensors
        self.clip = optim.clip_grad_norm_ if is_ours else TORCHS_CLIP


def adamw(params: list[Tensor]) -> optim.AdamW:
    return optim.AdamW(params, lr=0.01, weight_decay=0.1)


def references(
    dtype: torch.dtype = torch.float32, make: Callable[[list[Tensor]], Any] = adamw, **scaler: Any
) -> tuple[Loop, Loop]:
    params = make_params(dtype)
    others = [param.detach().clone().requires_grad_() for param in params]
    return Loop(True, params, make, **scaler), Loop(False, others, make, **scaler)


def set_scaled_grads(*loops: Loop, bad: float | None = None) -> None:
    """Gives the loops' parameters equal gradients of their own, times the scale."""
    scale = loops[0].scaler.get_scale()
    for params in zip(*(loop.params for loop in loops), strict=True):
        grad = torch.randn(params[0].shape).mul_(scale).to(params[0].dtype)
        if bad is not None and grad.ndim == 2:
            grad[0, 1] = bad
        for param in params:
            param.grad = grad.clone()
    del params, param, grad


def assert_same_bits(ours: Loop, theirs: Loop) -> None:
    """Compares parameters, states, scales, and gradients with their versions."""
    exact: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
    assert_same(ours.params, theirs.params, **exact)
    torch.testing.assert_close(ours.optimizer.state_dict()["state"], theirs.optimizer.state_dict()["state"], **exact)
    assert ours.scaler.get_scale() == theirs.scaler.get_scale()
    assert ours.scaler._get_growth_tracker() == theirs.scaler._get_growth_tracker()
    for a, b in zip(ours.params, theirs.params, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, **exact)
            if a.numel() > 0:  # No code writes an empty gradient.
                assert a.grad._version == b.grad._version


def both(ours: Loop, theirs: Loop, act: Callable[[Loop], Any]) -> Any:
    """Does the same with both loops, checks that both return or raise the same, and returns ours."""
    results: list[Any] = []
    for loop in (ours, theirs):
        try:
            results.append(act(loop))
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            results.append(f"{type(error)}: {error}")
    if any(isinstance(result, str) or result is None for result in results):
        assert results[0] == results[1]
    else:
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, equal_nan=True)
    return results[0]
