"""Adafactor: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule, learning_rate
from .sharded import dtensors
from .sharded.mesh_sums import smallest_part


def _gathers(param: Any, group: dict[str, Any]) -> bool:
    # A rank without rows or columns of a matrix could not keep the other ranks' states.
    if param.ndim < 2:
        return False
    sizes = [[param.device_mesh.size(at) for at in dtensors.dims_that_split(param, dim)] for dim in (-2, -1)]
    return any(smallest_part(n, parts) == 0 for n, parts in zip(param.shape[-2:], sizes, strict=True))


def _numbers(group: dict[str, Any]) -> dict[str, float | Tensor]:
    eps1, eps2 = group["eps"]
    if eps1 is None:
        dtypes = [param.dtype for param in group["params"] if param.is_floating_point() or param.is_complex()]
        eps1 = torch.finfo(dtypes[0] if dtypes else torch.float32).eps
    return {
        "lr": learning_rate(group),
        "beta2_decay": group["beta2_decay"],
        "eps1": eps1,
        "eps2": eps2,
        "d": group["d"],
        "weight_decay": group["weight_decay"],
        "maximize": group["maximize"],
    }


@follows(Rule("adafactor", _numbers, gathers=_gathers))
class Adafactor(FusedOptimizer, torch.optim.Adafactor):
    """Adafactor: torch.optim.Adafactor with a native step over all parameters.

    The constructor's arguments, the state and the results are torch's. Takes real parameters;
    :class:`drivetrain.optim.Adam` lists the dtypes and devices. The last two dimensions of a parameter are matrices,
    whose second moment is kept as a row and a column. Parameters of fewer dimensions keep it per element. These states
    are small and stay float32 with `state_bits=8`.

    A step makes three passes over a matrix. The first reads its gradient for the sums of rows and columns, the second
    gradient and parameter for the norms, and the third updates. Vectors take two: the norms and the update. Sums are in
    float64 in a fixed order, so the bits do not depend on threads, instruction set or device. Matrices that are not
    row-major in memory are stepped in a copy.

    On CUDA a step takes six launches for any number of parameters, or four without matrices. They compute the step's
    scalars, the sums of rows and columns, the factors, the norms, the adapted step sizes, and the update.

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

    @passes_on
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...
