"""NAdam: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import FusedOptimizer
from .precision import StateBits
from .rule import Rule, follows


def _initial(group: dict[str, Any], name: str) -> float:
    return 1.0 if name == "mu_product" else 0.0


@follows(
    Rule(
        "nadam",
        ("betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize"),
        initial=_initial,
    )
)
class NAdam(FusedOptimizer, torch.optim.NAdam):
    """NAdam: torch.optim.NAdam with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. :class:`drivetrain.optim.Adam` lists the dtypes
    and devices. The state keeps the product of all momenta, `mu_product`, as torch does.

    Source: Dozat 2016, "Incorporating Nesterov Momentum into Adam", algorithm 2, as torch implements it.

    Args:
        params: Parameters to step: an iterable of tensors, of (name, tensor) pairs, or of dicts with one group each.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay rates of the means of gradients and of their squares.
        eps: Added to the denominator.
        weight_decay: L2 penalty, or decoupled weight decay.
        momentum_decay: Decay of the momentum: its factor in step t is 1 - 0.96**(t * momentum_decay) / 2.
        decoupled_weight_decay: Decays weights apart from the gradients, as AdamW does.
        foreach: Accepted for compatibility, without effect.
        maximize: Maximize the objective instead of minimizing it.
        capturable: Accepted for compatibility, without effect: every step on CUDA can be captured.
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
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
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
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            momentum_decay=momentum_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            max_grad_norm=max_grad_norm,
            zero_grads_in_step=zero_grads_in_step,
            state_bits=state_bits,
            master_bits=master_bits,
            min_8bit_size=min_8bit_size,
            rounding=rounding,
        )
