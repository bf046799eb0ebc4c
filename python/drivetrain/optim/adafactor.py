"""Adafactor: torch's class with the native step."""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import TorchsOptions, follows
from .rule import Group, Numbers, Rule, hypers


def _numbers(group: Group) -> Numbers:
    eps1, eps2 = group["eps"]
    if eps1 is None:
        dtypes = [param.dtype for param in group["params"] if param.is_floating_point() or param.is_complex()]
        eps1 = torch.finfo(dtypes[0] if dtypes else torch.float32).eps
    return hypers(group, "beta2_decay", "d", "weight_decay", "maximize") | {"eps1": eps1, "eps2": eps2}


@follows(Rule("adafactor", _numbers, gathers=lambda group: True))
class Adafactor(FusedOptimizer, torch.optim.Adafactor):
    """No parameter may be complex. The last two dimensions of a parameter are matrices, whose second moment is kept as
    a row and a column. Parameters of fewer dimensions keep it per element. These states are small and stay float32 with
    `state_bits=8`.

    Sums are in float64 in a fixed order, so the bits do not depend on threads, instruction set or device. Matrices that
    are not row-major in memory are stepped in a copy.

    Source: Shazeer & Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", algorithms 4 and 5,
    as torch implements it. torch has means instead of sums, eps1 in the update and not in the factors, and no first
    moment. If `eps[0]` is None it is the resolution of the dtype of the group's first parameter.

    Args:
        beta2_decay: Decay exponent of the second moment: beta2 is 1 - step**beta2_decay.
        eps: Lower bounds of the denominator and of the parameter's RMS. None takes the resolution of the dtype.
        d: Limits the RMS of an update.
        weight_decay: Decoupled weight decay.

    Raises:
        ValueError: A hyper-parameter is out of range, as under torch.
        RuntimeError: A step has complex parameters or sparse gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        **options: Unpack[TorchsOptions],
    ) -> None: ...
