"""Leaves to torch's own step what no step here can do, for classes that drivetrain.install(optim=True) put in place."""

import sys
import warnings

import torch
from torch import Tensor

from .. import _C
from .engine import Engine
from .kept import NAME, in_place_of
from .rule import overridden, steps_itself, torchs_base, unhooked
from .sharded import dtensors, pieces

# Describes every optimizer that this process has constructed, in order. `python -m drivetrain run` prints it.
constructed: list[str] = []


def torchs_class(engine: Engine) -> type[torch.optim.Optimizer] | None:
    """Returns the torch class that may take over steps, or None.

    drivetrain.install(optim=True) must have replaced it, and the caller have asked for nothing that it lacks.
    """
    if _asks_for_more(engine) or (hasattr(engine.optimizer, "param_groups") and pieces.has_any(engine.optimizer)):
        return None
    return next((in_place_of[each] for each in type(engine.optimizer).__mro__ if each in in_place_of), None)


def _asks_for_more(engine: Engine) -> bool:
    """Returns whether the caller has asked for something that torch's class lacks."""
    kept, groups = engine.kept, getattr(engine.optimizer, "param_groups", [])
    is_own = kept.max_grad_norm is not None or kept.zero_grads_in_step or kept.in_backward is not None
    is_own = is_own or kept.fallback is not None or kept.offload is not None or bool(kept.formats)
    is_own = is_own or kept.is_over_world or kept.process_group is not None or kept.statistics is not None
    return is_own or any(engine.formats_of(group) or engine.rule.is_own(engine.read(group)) for group in groups)


def leave(engine: Engine, reason: str, stacklevel: int) -> None:
    """Leaves all steps to torch's class, and says so once and in the exit report.

    In a constructor end_constructor() says it, because the object then becomes one of torch's class.
    """
    if not engine.kept.steps_as_torch:
        engine.kept.steps_as_torch = reason
        if not engine.kept.is_in_constructor:
            _say(engine, stacklevel + 1)


def _say(engine: Engine, stacklevel: int) -> None:
    name = torchs_base(type(engine.optimizer)).__name__
    message = f"torch.optim.{name} stays torch's own class: {engine.kept.steps_as_torch}"
    warnings.warn(message, stacklevel=stacklevel + 1)
    constructed.append(message)


def end_constructor(engine: Engine) -> bool:
    """Returns whether the object is still one of drivetrain's class."""
    optimizer, kept = engine.optimizer, engine.kept
    kept.is_in_constructor = False
    if not kept.steps_as_torch:
        constructed.append(sys.intern(engine.description()))  # scripts may construct one per batch
        return True
    _say(engine, stacklevel=4)
    if type(optimizer) not in in_place_of or pieces.has_any(engine.optimizer):
        return True
    optimizer.__class__ = in_place_of[type(optimizer)]
    del optimizer.__dict__[NAME]
    optimizer._patch_step_function()
    return False


def leave_what_is_overridden(engine: Engine) -> None:
    """Leaves all steps to torch's class if a script has replaced methods that only torch's step calls.

    Raises:
        NotImplementedError: The optimizer has options that torch's step lacks.
    """
    if engine.kept.steps_as_torch or not (names := overridden(engine.optimizer)):
        return
    reason = f"{engine.class_name} replaces {', '.join(names)}, which torch's step calls"
    if _asks_for_more(engine):
        raise NotImplementedError(
            f"{reason}, and this optimizer has options that only drivetrain's step has: leave one of the two out."
        )
    leave(engine, f"{reason}.", stacklevel=5)


def check_group(engine: Engine, index: int) -> None:
    """Raises for a group that no step here can step, whatever its gradients are."""
    if steps_itself(type(engine.optimizer)):
        return  # It may need other numbers, or never call this class's step.
    group = engine.param_groups[index]
    for place, param in enumerate(group["params"]):
        if reason := dtensors.why_not(param, group, engine.rule):
            raise NotImplementedError(f"{dtensors.label_of(group, index, place)} {reason}.")
    _, formats, numbers = engine.asked_by(group, index)
    _C.optim_check_hypers(numbers, index)
    for place, param in enumerate(group["params"]):
        if param.requires_grad and (misfit := _C.optim_why_not(formats, param.dtype)):
            raise ValueError(f"{dtensors.label_of(group, index, place)}: {misfit}.")


def step_as_torch(engine: Engine, overflow_flag: Tensor | None) -> None:
    """Steps as torch's class does. The flag receives whether any gradient is not finite."""
    if pieces.has_any(engine.optimizer):
        raise NotImplementedError(
            f"{engine.class_name} takes torch's steps, and has parameters of a DistributedDataParallel with shard=: "
            "wrap before the first step, or leave shard= out."
        )
    if _asks_for_more(engine):
        raise NotImplementedError(
            f"{engine.class_name} takes torch's steps, which have no max_grad_norm, zero_grads_in_step, statistics() "
            "or storage formats: set these when you construct it, or leave them out."
        )
    if overflow_flag is not None:  # A GradScaler has left the search for overflows to this step.
        grads = [param.grad for param in engine.params() if param.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, overflow_flag, torch.ones_like(overflow_flag))
        engine.optimizer.found_inf = overflow_flag
    unhooked(torchs_base(type(engine.optimizer)).step)(engine.optimizer)  # Hooks run around this object's own step.
