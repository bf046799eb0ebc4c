"""Lion, which torch lacks, with the interface of torch's classes."""

from torch import Tensor
from torch.optim.optimizer import ParamsT

from .arguments import check_arguments
from .base import FusedOptimizer
from .precision import StateBits
from .rule import Rule, follows


@follows(Rule("lion", ("betas", "weight_decay", "maximize")))
class Lion(FusedOptimizer):
    """Lion: steps of constant size along the sign of a momentum, with decoupled weight decay and half of Adam's state.

    :class:`drivetrain.optim.Adam` lists the dtypes and devices. The authors use learning rates 3 to 10 times smaller
    than AdamW's, and weight decay larger by the same factor.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.

    Args:
        params: Parameters to step: an iterable of tensors, of (name, tensor) pairs, or of dicts with one group each.
        lr: Learning rate, a number or a tensor of one element.
        betas: The first weighs the momentum against the gradient in the sign; the second is the decay rate of the
            momentum.
        weight_decay: Decoupled: parameters shrink by lr * weight_decay in every step.
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
        ValueError: A hyper-parameter is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        zero_grads_in_step: bool = False,
        state_bits: StateBits | None = None,
        master_bits: int | None = None,
        min_8bit_size: int = 4096,
        rounding: str = "nearest",
    ) -> None:
        check_arguments(lr, betas, weight_decay)
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
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
