"""Adagrad: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule


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
        lr_decay: Divides the learning rate by 1 + (step - 1) * lr_decay.
        initial_accumulator_value: Value of every sum of squares before the first step.
    """

    @passes_on
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
        **options: Unpack[StepOptions],
    ) -> None: ...
