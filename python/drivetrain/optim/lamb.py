"""LAMB, which torch lacks, with the interface of torch's classes."""

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows, passes_on
from .rule import Rule

_FLAGS = ("bias_correction", "grad_averaging", "always_adapt", "trust_clip", "maximize")


@follows(Rule("lamb", ("betas", "eps", "weight_decay", *_FLAGS)))
class LAMB(FusedOptimizer):
    """LAMB, for large batches: Adam's direction, with a step length relative to the parameter's norm.

    With m and v the bias-corrected means of gradients and of their squares, and x the parameter::

        u = m / (sqrt(v) + eps) + weight_decay * x
        x = x - lr * |x| / |u| * u          (without the ratio where one of the norms is zero)

    A step makes two passes over a parameter: one reads it, its gradient and its state for both norms, and one updates
    it. It takes a few parameters at a time, so that the second pass finds them in the cache. The norms are summed in
    float64 in a fixed order, so the bits do not depend on threads, instruction set or device.

    On CUDA a step takes four launches for any number of parameters: the step's scalars, the norms, the adapted step
    sizes, and the update. :class:`drivetrain.optim.Adam` lists the dtypes and devices. Other implementations clip by
    the norm of all gradients (at 1.0); here that is `max_grad_norm`, and off by default.

    Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2.

    Args:
        eps: Added to the root of the mean of squares.
        weight_decay: Added to the direction before the trust ratio is taken.
        bias_correction: Applies Adam's bias correction (1 - beta**step).
        grad_averaging: Weighs a gradient with 1 - beta1 in the mean; False weighs it with 1.
        always_adapt: Applies the trust ratio to groups without weight decay as well. By default they take plain Adam
            steps, as the authors do for biases and normalization.
        trust_clip: Limits the trust ratio to 1.

    Raises:
        ValueError: hyper-parameters out of range.
    """

    @passes_on
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
        **options: Unpack[StepOptions],
    ) -> None: ...
