"""SGD: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule


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
        dampening: Reduces the weight of a gradient in the momentum.
        nesterov: Uses Nesterov's momentum; needs a momentum and no dampening.
    """

    @passes_on
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
        **options: Unpack[StepOptions],
    ) -> None: ...
