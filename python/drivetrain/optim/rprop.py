"""Rprop: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import FusedOptimizer
from .precision import StateBits
from .rule import Rule, follows, learning_rate


def _numbers(group: dict[str, Any]) -> dict[str, float | Tensor]:
    eta_minus, eta_plus = group["etas"]
    step_size_min, step_size_max = group["step_sizes"]
    return {
        "lr": learning_rate(group),
        "eta_minus": float(eta_minus),
        "eta_plus": float(eta_plus),
        "step_size_min": float(step_size_min),
        "step_size_max": float(step_size_max),
        "maximize": group["maximize"],
    }


def _initial(group: dict[str, Any], name: str) -> float:
    return float(group["lr"]) if name == "step_size" else 0.0


@follows(Rule("rprop", _numbers, initial=_initial))
class Rprop(FusedOptimizer, torch.optim.Rprop):
    """Rprop: torch.optim.Rprop with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. :class:`drivetrain.optim.Adam` lists the dtypes
    and devices. Feed it the gradients of whole epochs: the rule looks at signs only.

    Source: Riedmiller & Braun 1993, "A direct adaptive method for faster backpropagation learning: the RPROP
    algorithm", as torch implements it.

    Args:
        params: Parameters to step: an iterable of tensors, of (name, tensor) pairs, or of dicts with one group each.
        lr: Step size of every element before the first step; later values have no effect.
        etas: Factors of the step size where the sign of the gradient changes, and where it stays.
        step_sizes: Bounds of the step sizes.
        capturable: Accepted for compatibility, without effect: every step on CUDA can be captured.
        foreach: Accepted for compatibility, without effect.
        maximize: Maximize the objective instead of minimizing it.
        differentiable: Must be False.
        max_grad_norm: Clips the 2-norm of all gradients together before the step. `inf` only measures it; None does
            neither.
        zero_grads_in_step: Leaves zeros in every `.grad` after the step.
        state_bits: Stores states as float32 (32), bfloat16 (16), 8-bit codes (8) or float8 ("fp8"). None keeps the
            dtype that torch uses.
        master_bits: Keeps 32 or 24 bits of 16-bit parameters, the missing ones in the state. None keeps 16.
        min_8bit_size: Keeps states of parameters with fewer elements in float32 where states have 8 bits.
        rounding: Rounds 16-bit parameters without a master "nearest", "stochastic" or "kahan".

    Raises:
        NotImplementedError: `differentiable` is True.
        ValueError: A hyperparameter is out of range, as under torch.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50),
        *,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        max_grad_norm: float | None = None,
        zero_grads_in_step: bool = False,
        state_bits: StateBits | None = None,
        master_bits: int | None = None,
        min_8bit_size: int = 4096,
        rounding: str = "nearest",
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            etas=etas,
            step_sizes=step_sizes,
            capturable=capturable,
            foreach=foreach,
            maximize=maximize,
            differentiable=differentiable,
            max_grad_norm=max_grad_norm,
            zero_grads_in_step=zero_grads_in_step,
            state_bits=state_bits,
            master_bits=master_bits,
            min_8bit_size=min_8bit_size,
            rounding=rounding,
        )
