"""Optimizers that torch lacks, with the interface of torch's classes."""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .. import _C
from . import precision
from .base import FusedOptimizer
from .declaration import StepOptions, follows
from .rule import Group, Numbers, Rule, hypers
from .sharded import dtensors, pieces
from .twins import on_host


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


def _schedule_free(group: Group) -> Numbers:
    numbers = hypers(group, "betas", "eps", "weight_decay", "warmup_steps", "r", "weight_lr_power", "maximize")
    if numbers["beta1"] == 0:
        raise ValueError("betas[0] is 0, expected a number above 0 and below 1: the average follows from it")
    if not group["train_mode"]:
        raise RuntimeError("the optimizer is in evaluation mode: call its train() before it steps")
    return numbers


@follows(
    Rule("adamw_schedule_free", _schedule_free, copies="z", scalar_dtype=torch.float64, constants={"train_mode": True})
)
class AdamWScheduleFree(FusedOptimizer):
    """Schedule-free AdamW: averages iterates in place of a learning rate schedule.

    During training, parameters are at the point y where the method takes gradients. Call `eval()` before evaluation or
    before saving the model: it moves them to the average x. Call `train()` before the next step. Parameters start in
    training mode.

    The state holds the third point, z, and the scalars of the average in float64. Moving 16-bit parameters to x and
    back rounds them, except with `master_bits`.

    Source: Defazio et al. 2024, "The Road Less Scheduled", algorithm 1. As in the authors' code, the largest learning
    rate so far weighs the average, and weight decay applies at y.

    Args:
        betas: The first interpolates between the average and z; the second is the decay rate of the mean of squares.
        weight_decay: Decoupled weight decay.
        warmup_steps: Number of steps of linear warmup.
        r: Power of the step's number in the weights of the average.
        weight_lr_power: Power of the largest learning rate so far in the weights of the average.

    Raises:
        RuntimeError: A step comes after `eval()` without `train()`.
        ValueError: A hyper-parameter is out of range, or `betas[0]` is 0.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        *,
        maximize: bool = False,
        **options: Unpack[StepOptions],
    ) -> None: ...

    def eval(self) -> None:
        """Moves the parameters to the average x. Does nothing in evaluation mode.

        With DistributedDataParallel(shard=...) every rank must call it, and train().
        """
        self._set_mode(train=False)

    def train(self) -> None:
        """Moves the parameters back to y, where gradients are taken. Does nothing in training mode."""
        self._set_mode(train=True)

    @torch.no_grad()
    def _set_mode(self, *, train: bool) -> None:
        with on_host(self) as host, pieces.in_place(self) as swapped:
            for group in self.param_groups:
                if group["train_mode"] == train:
                    continue
                beta1 = group["betas"][0]
                for param in group["params"]:
                    self._move_toward_z(param, group, 1 - beta1 if train else 1 - 1 / beta1)
                group["train_mode"] = train
            if host is not None:
                host.send()
        if swapped is not None:
            swapped.gather()

    def _move_toward_z(self, param: Tensor, group: Group, weight: float) -> None:
        state = dtensors.local_values(param, self.state.get(param, {}))
        if not precision.has_state(state, "z"):
            return  # It has not been stepped, so that all points are one.
        local = dtensors.local_part(param)
        z = precision.without_blocks(state, local)["z"]
        extra = _C.optim_param_extra(precision.of(group), local)
        value = _C.optim_load_param(local, state[extra[0]]) if extra is not None else local
        wide = torch.promote_types(value.dtype, torch.float32)
        moved = torch.lerp(value.to(wide), z.to(wide), weight)
        if extra is None:
            local.copy_(moved)
        else:
            state[extra[0]].copy_(_C.optim_store_param(local, moved, extra[1]))
