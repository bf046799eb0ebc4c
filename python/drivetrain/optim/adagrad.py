"""Adagrad: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.optimizer import ParamsT

from .base import FusedOptimizer
from .precision import StateBits
from .rule import Rule, follows


def _initial(group: dict[str, Any], name: str) -> float:
    return float(group["initial_accumulator_value"])  # as in torch, both parts of complex parameters


def _step_sparse(optimizer: Any, group: dict[str, Any], params: list[Tensor]) -> None:
    grads = [param.grad for param in params if param.grad is not None]
    sums, steps = ([optimizer.state[param][name] for param in params] for name in ("sum", "step"))
    names = ("lr", "weight_decay", "lr_decay", "eps", "maximize")
    options = {name: group[name] for name in names}
    adagrad(params, grads, sums, steps, has_sparse_grad=True, foreach=False, **options)


@follows(
    Rule(
        "adagrad",
        ("lr_decay", "weight_decay", "eps", "maximize"),
        initial=_initial,
        step_sparse=_step_sparse,
    )
)
class Adagrad(FusedOptimizer, torch.optim.Adagrad):
    """Adagrad: torch.optim.Adagrad with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. :class:`drivetrain.optim.Adam` lists the dtypes
    and devices. Sparse gradients are stepped by torch's function.

    Source: Duchi et al. 2011, section 1.1, as torch implements it.

    Args:
        params: Parameters to step: an iterable of tensors, of (name, tensor) pairs, or of dicts with one group each.
        lr: Learning rate, a number or a tensor of one element.
        lr_decay: Divides the learning rate by 1 + (step - 1) * lr_decay.
        weight_decay: L2 penalty.
        initial_accumulator_value: Value of every sum of squares before the first step.
        eps: Added to the denominator.
        foreach: Accepted for compatibility, without effect.
        fused: Accepted for compatibility, without effect: the step is always fused.
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
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
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
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            foreach=foreach,
            maximize=maximize,
            differentiable=differentiable,
            fused=fused,
            max_grad_norm=max_grad_norm,
            zero_grads_in_step=zero_grads_in_step,
            state_bits=state_bits,
            master_bits=master_bits,
            min_8bit_size=min_8bit_size,
            rounding=rounding,
        )
