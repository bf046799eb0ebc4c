"""LAMB, which torch does not have, in the manner of torch's classes."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .arguments import check_arguments
from .base import FusedOptimizer, learning_rate


class _LAMBArguments(torch.optim.Optimizer):
    """The constructor, as torch would write it."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        always_adapt: bool = False,
        trust_clip: bool = False,
        maximize: bool = False,
    ) -> None:
        check_arguments(lr, betas, weight_decay, eps)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "always_adapt": always_adapt,
            "trust_clip": trust_clip,
            "maximize": maximize,
        }
        super().__init__(params, defaults)


class LAMB(FusedOptimizer, _LAMBArguments):
    """LAMB, for large batches: Adam's direction, in steps as long for every parameter, relative to its norm.

    With m and v the bias-corrected means of gradients and of their squares, and x the parameter::

        u = m / (sqrt(v) + eps) + weight_decay * x
        x = x - lr * |x| / |u| * u          (without the ratio where one of the norms is zero)

    Two passes over a parameter: one that reads it, its gradient and its state for both norms, and the step. Parameters
    are taken a few at a time, so that the second finds all but large ones in the cache. The norms are summed in
    float64 in a fixed order: the same bits whatever the number of threads and the instruction set.

    On CUDA four launches, however many parameters there are: the step's scalars, the norms, what they make of each
    parameter's step, and the step; the same bits. Dtypes, options beside these and what they change: as in
    :class:`drivetrain.optim.Adam`. The clipping by the norm of all gradients that other implementations have built in
    (at 1.0) is `max_grad_norm` here, and off by default.

    Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2.

    Args:
        params: parameters, or dicts with their groups.
        lr: learning rate, a float or a tensor of one element.
        betas: how much of the means of gradients and of their squares is kept.
        eps: added to the root of the mean of squares.
        weight_decay: part of the direction, and so of what is scaled.
        bias_correction: divides the means by what they have seen of their weight yet.
        grad_averaging: gradients enter their mean with 1 - beta1; False: with 1.
        always_adapt: scales groups without weight decay too. By default those take plain steps of Adam's direction, as
            the authors leave biases and the scales of normalisations out of both.
        trust_clip: the ratio |x| / |u| is at most 1.
        maximize: climbs instead of descending.

    Raises:
        ValueError: hyper-parameters out of range.
    """

    def _why_whole(self, param: Tensor) -> str | None:
        return (
            "LAMB needs the norm of whole parameters: redistribute it to Replicate(), leave it out of "
            "fully_shard() (ignored_params), or use AdamW"
        )

    def _rule(self, group: dict[str, Any]) -> str:
        return "lamb"

    def _hypers(self, group: dict[str, Any]) -> dict[str, float | Tensor]:
        beta1, beta2 = group["betas"]
        flags = ("bias_correction", "grad_averaging", "always_adapt", "trust_clip", "maximize")
        return {
            "lr": learning_rate(group),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            **{name: group[name] for name in flags},
        }
