"""Steps an optimizer: natively where it can, by torch's own step where only that can. Adds its groups."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _C
from . import left_to_torch, native_step, precision, twins
from .engine import Engine
from .sharded import pieces
from .sharded.step import sums_of_whole_squares
from .statistics import check_devices

# The native step, and the checks of groups before it, raise these for what they cannot do.
_REFUSALS = (NotImplementedError, RuntimeError, TypeError, ValueError)


def step(engine: Engine, closure: Callable[[], float] | None) -> float | None:
    """Performs one step."""
    kept = engine.kept
    overflow_flag, kept.overflow_flag = kept.overflow_flag, None
    if kept.in_backward is not None and (overflow_flag is not None or hasattr(engine.optimizer, "found_inf")):
        raise RuntimeError(
            f"drivetrain.optim.{engine.class_name}: GradScaler cannot be used with step_in_backward(): it must check "
            "all gradients before any update. Train in bfloat16 without a scaler, or call step() after backward."
        )
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    left_to_torch.leave_what_is_overridden(engine)
    if kept.steps_as_torch:
        left_to_torch.step_as_torch(engine, overflow_flag)
        return loss
    try:
        _step_natively(engine, overflow_flag)
        return loss
    except _REFUSALS as refusal:  # Nothing has changed.
        if left_to_torch.torchs_class(engine) is None:
            raise
        reason = str(refusal)
    left_to_torch.step_as_torch(engine, overflow_flag)  # torch's own error leaves the next step to us
    left_to_torch.leave(engine, reason, stacklevel=5)
    return loss


def _step_natively(engine: Engine, overflow_flag: Tensor | None) -> None:
    begin, kept = time.perf_counter(), engine.kept
    if kept.reader is None:  # Copied and unpickled optimizers have no reader.
        kept.reader = _C.StepReader()
    options = engine.step_options(overflow_flag)
    if options.statistics:
        check_devices(engine)
    if (of_devices := twins.begin(engine)) is not None:
        result = of_devices.step(engine, options)
        _zero_gradients(engine)
    else:
        result = _step_on_its_device(engine, kept.reader, options)
    kept.result = result
    if kept.statistics is not None and (result.is_on_device or not result.skipped):
        kept.statistics.end_step()
    seconds = time.perf_counter() - begin
    if result.is_on_device:  # Reading the result would wait for the device.
        kept.counts.add(None, None, False, seconds)
        return
    kept.counts.add(kept.grad_norm, kept.max_grad_norm, result.skipped, seconds)
    if overflow_flag is not None:
        overflow_flag.fill_(float(result.skipped))
    if result.skipped and getattr(engine.optimizer, "found_inf", None) is None:
        warnings.warn(
            f"drivetrain.optim.{engine.class_name}: the norm of the gradients is {kept.grad_norm}; the step was "
            "left out, parameters and state are as before (later ones: see last_step_skipped).",
            stacklevel=6,
        )


def _step_on_its_device(engine: Engine, reader: _C.StepReader, options: _C.StepOptions) -> _C.StepResult:
    kept = engine.kept
    names: list[str] = []
    if kept.statistics is not None and options.statistics:
        names = kept.statistics.begin_step(engine.param_groups)
    if options.measures and pieces.have_whole_norms(engine.params()):
        options.sum_of_squares = sums_of_whole_squares(engine.rule, engine.param_groups)
    with pieces.in_place(engine.optimizer, with_gradients=True) as swapped:
        result = native_step.step_all(engine, reader, options)
        if kept.statistics is not None and result.statistics:
            kept.statistics.take(names, engine.params(), result.statistics)
    if swapped is not None:
        _zero_gradients(engine)
        swapped.gather()
    return result


def _zero_gradients(engine: Engine) -> None:
    """Fills whole gradients with zeros where asked, as the native step has zeroed others or a part."""
    for param in engine.params() if engine.kept.zero_grads_in_step else ():
        if param.grad is not None:
            param.grad.zero_()


def add_group(engine: Engine, torchs_add: Callable[[dict[str, Any]], None], param_group: dict[str, Any]) -> None:
    """Adds a group by torch's method. After an error the optimizer has the groups that it had before."""
    if not isinstance(param_group, dict):
        raise TypeError(f"param_group must be a dict, but got {type(param_group)}")  # torch's words
    refuse_options(engine, param_group)
    for option, value in engine.kept.formats.items():
        param_group.setdefault(option, value)
    precision.check(engine.formats_of(param_group))
    torchs_add(param_group)
    try:
        twins.check(engine.kept.offload, engine.class_name, engine.param_groups[-1]["params"])
        _refuse_parts_of_fsdp1(engine, engine.param_groups[-1])
    except (NotImplementedError, ValueError):
        engine.param_groups.pop()
        raise
    try:
        left_to_torch.check_group(engine, len(engine.param_groups) - 1)
    except _REFUSALS as refusal:
        if left_to_torch.torchs_class(engine) is None:
            engine.param_groups.pop()
            raise
        left_to_torch.leave(engine, str(refusal), stacklevel=3)
    engine.find_devices()


def _refuse_parts_of_fsdp1(engine: Engine, group: dict[str, Any]) -> None:
    """Raises where the step needs a norm of whole parameters, which parts that are plain tensors do not give."""
    if (
        not any(getattr(param, "_fsdp_flattened", False) for param in group["params"])
        or torch.distributed.get_world_size() == 1
    ):
        return
    where = "the parameters are parts of FullyShardedDataParallel, as plain tensors"
    if engine.kept.max_grad_norm is not None:
        raise NotImplementedError(
            f"max_grad_norm is {engine.kept.max_grad_norm}, but {where}, so each rank would clip by the norm of its "
            "own part. Leave it None and call the model's clip_grad_norm_(), or use fully_shard()"
        )
    if engine.rule.gathers(group) and left_to_torch.torchs_class(engine) is None:
        raise NotImplementedError(f"{engine.class_name} needs whole parameters, but {where}: use fully_shard()")


def refuse_options(engine: Engine, options: dict[str, Any]) -> None:
    """Raises for options of torch's that no step here has, or leaves all steps to torch's class.

    `foreach`, `fused` and `capturable` have no effect: every step is fused, and every step on CUDA can be captured.
    """
    if options.get("differentiable"):
        name = engine.class_name
        reason = f"drivetrain.optim.{name} does not support differentiable=True: use torch.optim.{name} for that"
        if left_to_torch.torchs_class(engine) is None:
            raise NotImplementedError(reason)
        left_to_torch.leave(engine, reason, stacklevel=4)
