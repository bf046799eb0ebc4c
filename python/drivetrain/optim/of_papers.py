"""Optimizers that torch lacks, with the interface of torch's classes."""

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .base import FusedOptimizer
from .declaration import StepOptions, follows
from .rule import Rule


@follows(Rule("lion", ("betas", "weight_decay", "maximize")))
class Lion(FusedOptimizer):
    """Lion: steps of constant size along the sign of a momentum, with decoupled weight decay and half of Adam's state.

    The authors use learning rates 3 to 10 times smaller than AdamW's, and weight decay larger by the same factor.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.

    Args:
        betas: The first weighs the momentum against the gradient in the sign; the second is the decay rate of the
            momentum.
        weight_decay: Decoupled: parameters shrink by lr * weight_decay in every step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...


@follows(Rule("adopt", ("betas", "eps", "weight_decay", "decoupled_weight_decay", ("clip", "clips"), "maximize")))
class ADOPT(FusedOptimizer):
    """ADOPT: Adam that divides by the second moment of earlier steps, so that it converges with any `betas[1]`.

    The first step only starts the mean of squares and moves no parameter.

    Source: Taniguchi et al. 2024, "ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate", algorithm
    2.

    Args:
        betas: Decay rates of the means of normalized gradients and of squared gradients.
        eps: Lower bound of the denominator.
        weight_decay: L2 penalty, or decoupled weight decay.
        clip: Limits normalized gradients to the fourth root of the number of steps done, as the paper advises.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        clip: bool = True,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...


@follows(Rule("adan", (("betas", "beta1", "beta2", "beta3"), "eps", "weight_decay", "no_prox", "maximize")))
class Adan(FusedOptimizer):
    """Adan: Adam with Nesterov's momentum, estimated from the differences of successive gradients.

    The state keeps the previous gradient, so that it takes twice as much memory as Adam's. The authors use learning
    rates 5 to 10 times larger than Adam's.

    Source: Xie et al. 2022, "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models", algorithm
    1. The betas, which are one minus the paper's, and the bias corrections follow the authors' code.

    Args:
        betas: Decay rates of the means of gradients, of their differences, and of squares.
        eps: Added to the root of the mean of squares.
        weight_decay: Decoupled weight decay.
        no_prox: Decays weights before the step, as AdamW does. By default they are divided by 1 + lr * weight_decay
            after it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        no_prox: bool = False,
        maximize: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...


_FLAGS = ("bias_correction", "grad_averaging", "always_adapt", "trust_clip", "maximize")


@follows(Rule("lamb", ("betas", "eps", "weight_decay", *_FLAGS), gathers=lambda group: True))
class LAMB(FusedOptimizer):
    """LAMB, for large batches: Adam's direction, with a step length relative to the parameter's norm.

    With m and v the bias-corrected means of gradients and of their squares, and x the parameter::

        u = m / (sqrt(v) + eps) + weight_decay * x
        x = x - lr * |x| / |u| * u          (without the ratio where one of the norms is zero)

    The norms are summed in float64 in a fixed order, so the bits do not depend on threads, instruction set or device.
    Other implementations clip by the norm of all gradients (at 1.0); here that is `max_grad_norm`, and off by default.

    Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", algorithm 2.

    Args:
        eps: Added to the root of the mean of squares.
        weight_decay: Added to the direction before the trust ratio is taken.
        bias_correction: Applies Adam's bias correction (1 - beta**step).
        grad_averaging: Weighs a gradient with 1 - beta1 in the mean; False weighs it with 1.
        always_adapt: Applies the trust ratio to groups without weight decay as well. By default they take plain Adam
            steps, as the authors do for biases and normalization.
        trust_clip: Limits the trust ratio to 1.
    """

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
