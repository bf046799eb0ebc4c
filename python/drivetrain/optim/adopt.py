"""ADOPT, which torch lacks, with the interface of torch's classes."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from .arguments import check_arguments
from .base import FusedOptimizer
from .precision import StateBits
from .rule import Rule, follows, hypers


def _numbers(group: dict[str, Any]) -> dict[str, float | Tensor]:
    numbers = hypers(group, "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize")
    return {**numbers, "clips": group["clip"]}


@follows(Rule("adopt", _numbers))
class ADOPT(FusedOptimizer):
    """ADOPT: Adam that divides by the second moment of earlier steps, so that it converges with any `betas[1]`.

    :class:`drivetrain.optim.Adam` lists the dtypes and devices. The first step only starts the mean of squares and
    moves no parameter.

    Source: Taniguchi et al. 2024, "ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate", algorithm
    2.

    Args:
        params: Parameters to step: an iterable of tensors, of (name, tensor) pairs, or of dicts with one group each.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay rates of the means of normalized gradients and of squared gradients.
        eps: Lower bound of the denominator.
        weight_decay: L2 penalty, or decoupled weight decay.
        clip: Limits normalized gradients to the fourth root of the number of steps done, as the paper advises.
        decoupled_weight_decay: Decays weights apart from the gradients, as AdamW does.
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
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        clip: bool = True,
        decoupled_weight_decay: bool = False,
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
            "clip": clip,
            "decoupled_weight_decay": decoupled_weight_decay,
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
