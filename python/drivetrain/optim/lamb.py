"""LAMB, which torch lacks, with the interface of torch's classes."""

from torch import Tensor
from torch.optim.optimizer import ParamsT

from .arguments import check_arguments
from .base import FusedOptimizer
from .precision import StateBits
from .rule import Rule, follows

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
        params: Parameters to step: an iterable of tensors, of (name, tensor) pairs, or of dicts with one group each.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay rates of the means of gradients and of their squares.
        eps: Added to the root of the mean of squares.
        weight_decay: Added to the direction before the trust ratio is taken.
        bias_correction: Applies Adam's bias correction (1 - beta**step).
        grad_averaging: Weighs a gradient with 1 - beta1 in the mean; False weighs it with 1.
        always_adapt: Applies the trust ratio to groups without weight decay as well. By default they take plain Adam
            steps, as the authors do for biases and normalization.
        trust_clip: Limits the trust ratio to 1.
        maximize: Maximize the objective instead of minimizing it.
        max_grad_norm: Clips the 2-norm of all gradients together before the step. `inf` only measures it; None does
            neither.
        zero_grads_in_step: Leaves zeros in every `.grad` after the step.
        state_bits: Stores states as float32 (32), bfloat16 (16), 8-bit codes (8) or float8 ("fp8"). None keeps the
            dtype that torch uses.
        master_bits: Keeps 32 or 24 bits of 16-bit parameters, the missing ones in the state. None keeps 16.
        min_8bit_size: Keeps states of parameters with fewer elements in float32 where states have 8 bits.
        rounding: Rounds 16-bit parameters without a master "nearest", "stochastic" or "kahan".

    Raises:
        ValueError: hyper-parameters out of range.
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
        max_grad_norm: float | None = None,
        zero_grads_in_step: bool = False,
        state_bits: StateBits | None = None,
        master_bits: int | None = None,
        min_8bit_size: int = 4096,
        rounding: str = "nearest",
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
        super().__init__(
            params,
            defaults,
            max_grad_norm=max_grad_norm,
            zero_grads_in_step=zero_grads_in_step,
            state_bits=state_bits,
            master_bits=master_bits,
            min_8bit_size=min_8bit_size,
            rounding=rounding,
        )
