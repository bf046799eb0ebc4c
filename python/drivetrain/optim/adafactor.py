"""Adafactor: torch's class with the native step."""

from typing import Any

import torch
from torch import Tensor

from .base import FusedOptimizer, learning_rate


class Adafactor(FusedOptimizer, torch.optim.Adafactor):
    """torch.optim.Adafactor, constructor and state included: second moments of matrices kept as a row and a column.

    Takes real parameters of the dtypes of :class:`drivetrain.optim.Adam`, on the CPU and on CUDA devices; those of two
    and more dimensions are matrices in their last two, and others have a second moment per element. `foreach` is
    accepted and changes nothing. Options beside torch's as in every class here; the factors are small, and with
    `state_bits=8` they are float32, as vectors are.

    Three passes over a matrix, of which only the last writes: its gradient for the sums of rows and columns; both for
    its norm and that of the update; the step. Two over a vector, the norms and the step. Sums are in float64 in a fixed
    order: the same bits whatever the number of threads, the instruction set and the device. Matrices that do not lie
    row by row in memory are stepped in a copy.

    On CUDA six launches, however many parameters there are, and four where none is a matrix: the step's scalars; the
    sums of rows and columns; the factors; the norms; what they make of each parameter's step; the step. From the third
    on, each needs all that the one before it has written.

    Source: Shazeer & Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", algorithms 4 and 5,
    in torch's form: means instead of sums, eps1 in the update and not in the factors, no first moment. Where `eps[0]`
    is None it is the resolution of the dtype of the group's first parameter.

    Raises:
        ValueError: as torch, for hyper-parameters out of range.
        RuntimeError: at a step with complex parameters or sparse gradients.
    """

    def _why_whole(self, param: Tensor) -> str | None:
        return (
            "Adafactor averages over whole rows and columns: redistribute it to Replicate(), leave it out of "
            "fully_shard() (ignored_params), or use AdamW with state_bits=8"
        )

    def _rule(self, group: dict[str, Any]) -> str:
        return "adafactor"

    def _hypers(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
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
