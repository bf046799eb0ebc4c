"""Schedule-free AdamW, which torch lacks, with the interface of torch's classes."""

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


def _numbers(group: Group) -> Numbers:
    if group["betas"][0] == 0:
        raise ValueError("betas[0] is 0, expected a number above 0 and below 1: the average follows from it")
    if not group["train_mode"]:
        raise RuntimeError("the optimizer is in evaluation mode: call its train() before it steps")
    return hypers(group, "betas", "eps", "weight_decay", "warmup_steps", "r", "weight_lr_power", "maximize")


@follows(Rule("adamw_schedule_free", _numbers, copies="z", scalar_dtype=torch.float64, constants={"train_mode": True}))
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
