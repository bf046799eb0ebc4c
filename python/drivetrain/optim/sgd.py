"""SGD: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from .base import FusedOptimizer
from .precision import StateBits
from .rule import Rule, follows


def _name(group: dict[str, Any]) -> str:
    return "sgd_momentum" if group["momentum"] else "sgd"


def _step_sparse(optimizer: Any, group: dict[str, Any], params: list[Tensor]) -> None:
    grads = [param.grad for param in params if param.grad is not None]
    buffers: list[Tensor | None] = [optimizer.state[param].get("momentum_buffer") for param in params]
    names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    sgd(params, grads, buffers, has_sparse_grad=True, foreach=False, **{name: group[name] for name in names})
    if group["momentum"]:
        for param, buffer in zip(params, buffers, strict=True):
            optimizer.state[param]["momentum_buffer"] = buffer


@follows(
    Rule(
        _name,
        ("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
        step_sparse=_step_sparse,
    )
)
class SGD(FusedOptimizer, torch.optim.SGD):
    """Stochastic gradient descent: torch.optim.SGD with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. :class:`drivetrain.optim.Adam` lists the dtypes
    and devices. Sparse gradients are stepped by torch's function.

    Args:
        params: Parameters to step: an iterable of tensors, of (name, tensor) pairs, or of dicts with one group each.
        lr: Learning rate, a number or a tensor of one element.
        momentum: Momentum factor.
        dampening: Reduces the weight of a gradient in the momentum.
        weight_decay: L2 penalty.
        nesterov: Uses Nesterov's momentum; needs a momentum and no dampening.
        maximize: Maximize the objective instead of minimizing it.
        foreach: Accepted for compatibility, without effect.
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
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
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
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
            max_grad_norm=max_grad_norm,
            zero_grads_in_step=zero_grads_in_step,
            state_bits=state_bits,
            master_bits=master_bits,
            min_8bit_size=min_8bit_size,
            rounding=rounding,
        )
