"""Adam and AdamW: torch's classes with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import FusedOptimizer
from .precision import StateBits
from .rule import Rule, follows

NUMBERS = ("betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")


def adam_name(group: dict[str, Any]) -> str:
    """Returns the native rule of a group of Adam's."""
    return "adam_amsgrad" if group["amsgrad"] else "adam"


@follows(Rule(adam_name, NUMBERS))
class Adam(FusedOptimizer, torch.optim.Adam):
    """Adam: torch.optim.Adam with a native step over all parameters.

    Takes float32, float64, bfloat16, float16 and complex parameters on the CPU and on CUDA devices. The arithmetic is
    float32, or float64 for float64 parameters. 16-bit parameters may have float32 gradients (`grad_dtype`).

    Source: Kingma & Ba 2015, algorithm 1; AMSGrad after Reddi et al. 2018, as torch implements it.

    Args:
        params: Parameters to step: an iterable of tensors, of (name, tensor) pairs, or of dicts with one group each.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay rates of the means of gradients and of their squares.
        eps: Added to the denominator.
        weight_decay: L2 penalty.
        amsgrad: Divides by the largest mean of squares so far.
        foreach: Accepted for compatibility, without effect.
        capturable: Accepted for compatibility, without effect: every step on CUDA can be captured.
        fused: Accepted for compatibility, without effect: the step is always fused.
        maximize: Maximize the objective instead of minimizing it.
        differentiable: Must be False.
        decoupled_weight_decay: Decays weights apart from the gradients, as AdamW does.
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
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
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
            amsgrad=amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            max_grad_norm=max_grad_norm,
            zero_grads_in_step=zero_grads_in_step,
            state_bits=state_bits,
            master_bits=master_bits,
            min_8bit_size=min_8bit_size,
            rounding=rounding,
        )


@follows(Rule(adam_name, NUMBERS))
class AdamW(Adam, torch.optim.AdamW):
    """AdamW: torch.optim.AdamW with a native step over all parameters.

    :class:`Adam` with decoupled weight decay; it takes the same dtypes and devices.

    Source: Loshchilov & Hutter 2019, algorithm 2.

    Args:
        params: Parameters to step: an iterable of tensors, of (name, tensor) pairs, or of dicts with one group each.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay rates of the means of gradients and of their squares.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        amsgrad: Divides by the largest mean of squares so far.
        maximize: Maximize the objective instead of minimizing it.
        foreach: Accepted for compatibility, without effect.
        capturable: Accepted for compatibility, without effect: every step on CUDA can be captured.
        fused: Accepted for compatibility, without effect: the step is always fused.
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
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        zero_grads_in_step: bool = False,
        state_bits: StateBits | None = None,
        master_bits: int | None = None,
        min_8bit_size: int = 4096,
        rounding: str = "nearest",
    ) -> None:
        # Past Adam, whose arguments are others.
        FusedOptimizer.__init__(
            self,
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            max_grad_norm=max_grad_norm,
            zero_grads_in_step=zero_grads_in_step,
            state_bits=state_bits,
            master_bits=master_bits,
            min_8bit_size=min_8bit_size,
            rounding=rounding,
        )
