"""Adamax: torch's class with the native step."""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import FusedOptimizer
from .precision import StateBits
from .rule import Rule, follows


@follows(Rule("adamax", ("betas", "eps", "weight_decay", "maximize")))
class Adamax(FusedOptimizer, torch.optim.Adamax):
    """Adamax: torch.optim.Adamax with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. :class:`drivetrain.optim.Adam` lists the dtypes
    and devices. With `state_bits=8` the norm has the codes of means of squares, which are never 0 where it is not.

    Source: Kingma & Ba 2015, algorithm 2, as torch implements it: `eps` is added to the magnitude of the gradient.

    Args:
        params: Parameters to step: an iterable of tensors, of (name, tensor) pairs, or of dicts with one group each.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay rates of the mean of gradients and of their infinity norm.
        eps: Added to the magnitude of each gradient.
        weight_decay: L2 penalty.
        foreach: Accepted for compatibility, without effect.
        maximize: Maximize the objective instead of minimizing it.
        differentiable: Must be False.
        capturable: Accepted for compatibility, without effect: every step on CUDA can be captured.
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
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
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
            foreach=foreach,
            maximize=maximize,
            differentiable=differentiable,
            capturable=capturable,
            max_grad_norm=max_grad_norm,
            zero_grads_in_step=zero_grads_in_step,
            state_bits=state_bits,
            master_bits=master_bits,
            min_8bit_size=min_8bit_size,
            rounding=rounding,
        )
