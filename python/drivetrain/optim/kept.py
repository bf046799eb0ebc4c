"""Keeps options and results of an optimizer between steps, in one object behind one private attribute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from .. import _C
    from .in_backward import OverlappedOffload, StepInBackward
    from .sharded.step import Shards
    from .statistics import Statistics
    from .twins import Twins

NAME = "_drivetrain"  # of the attribute
WHY_NOT_CLIPPED = (
    "the norm of all gradients is not known before step_in_backward() uses the first. Leave max_grad_norm None, or "
    "clip by the norm of the step before: step_in_backward(model, clip_by_previous_norm=...)."
)

# drivetrain.install(optim=True) puts the keys, classes of drivetrain, in the place of the values, torch's classes.
in_place_of: dict[type, type] = {}

_COPIED = ("max_grad_norm", "zero_grads_in_step", "formats", "fallback", "offload", "has_options", "steps_as_torch")


def check_max_grad_norm(value: float | None) -> None:
    """Raises ValueError unless the value is None or above 0."""
    if value is not None and not value > 0:
        raise ValueError(f"max_grad_norm is {value}, expected a number above 0 (inf: only measure), or None")


@dataclass
class Counts:
    """Counts the steps of one optimizer. Steps on a GPU count as made and not clipped, to avoid waiting for it."""

    steps: int = 0
    skipped: int = 0  # steps skipped because a gradient was not finite
    clipped: int = 0  # steps whose norm was above max_grad_norm
    seconds: float = 0.0  # duration of the last step that was made; 0 before the first

    def add(self, grad_norm: float | None, max_grad_norm: float | None, skipped: bool, seconds: float) -> None:
        """Counts one step."""
        if skipped:
            self.skipped += 1
            return
        self.steps += 1
        self.seconds = seconds
        if grad_norm is not None and max_grad_norm is not None:
            self.clipped += grad_norm > max_grad_norm


class Kept:
    """Options, the native reader and results of one optimizer; proxies that copy its attributes share them.

    A copied or pickled object keeps the options only.
    """

    def __init__(self) -> None:
        self.max_grad_norm: float | None = None
        self.zero_grads_in_step = False
        self.formats: dict[str, Any] = {}  # the constructor's options of precision.DEFAULTS
        self.fallback: dict[str, Any] | None = None  # Muon's options of AdamW
        self.offload: str | None = None  # the constructor's option
        self.twins: Twins | None = None  # None until a step needs them
        self.overlapped: OverlappedOffload | None = None  # the result of overlap_offload(), until it is removed
        # Muon's ranks; torch.distributed.group.WORLD is looked up again, as recovery may replace it.
        self.process_group: dist.ProcessGroup | None = None
        self.is_over_world = False
        self.has_options = False  # whether max_grad_norm and zero_grads_in_step are attributes of the optimizer
        self.steps_as_torch = ""  # why torch's class takes the steps, if it does
        self.is_in_constructor = False
        self.loading: dict[str, Any] | None = None  # the state dict that load_state_dict() is loading
        self.reader: _C.StepReader | None = None
        self.shards: Shards | None = None  # None until a parameter is a DTensor
        self.may_be_sparse = False  # whether an earlier step found a sparse gradient
        self.can_scale_in_step = True  # whether all gradients are on one device, as an unscaling step requires
        self.our_scaler_steps = False  # drivetrain.amp.GradScaler leaves the unscaling to the step
        self.overflow_flag: Tensor | None = None  # drivetrain.amp.GradScaler reads the next step's overflow from it
        self.in_backward: StepInBackward | None = None  # the result of step_in_backward(), until it is removed
        self.statistics: Statistics | None = None  # the result of statistics(), until it is removed
        self.counts = Counts()
        self.result: _C.StepResult | None = None  # of the last step

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of the last step's gradients, if the step needed it. Waits for the device."""
        return None if self.result is None else self.result.grad_norm

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)


def kept_of(optimizer: torch.optim.Optimizer) -> Kept:
    """Returns what is kept of an optimizer. A constructor that calls torch's directly has made nothing yet."""
    kept: Kept | None = getattr(optimizer, NAME, None)  # a proxy may ask the optimizer for it
    if kept is None:
        kept = optimizer.__dict__[NAME] = Kept()
        kept.has_options = not stands_for_torchs(type(optimizer))
    return kept


@contextmanager
def scaled_step(optimizer: Any, max_grad_norm: float | None, divisor: float) -> Iterator[None]:
    """Lets a step of the optimizer divide gradients, and clip them unless max_grad_norm is None."""
    kept = kept_of(optimizer)
    norm_before, scale_before = kept.max_grad_norm, getattr(optimizer, "grad_scale", None)
    if max_grad_norm is not None:
        kept.max_grad_norm = max_grad_norm
    if divisor != 1.0:
        optimizer.grad_scale = divisor if scale_before is None else scale_before * divisor
    try:
        yield
    finally:
        kept.max_grad_norm = norm_before
        if scale_before is not None:
            optimizer.grad_scale = scale_before
        elif hasattr(optimizer, "grad_scale"):
            del optimizer.grad_scale


def stands_for_torchs(cls: type) -> bool:
    """Returns whether drivetrain.install(optim=True) put the class, or one that it derives from, in torch's place."""
    return any(each in in_place_of for each in cls.__mro__)


class extra:  # a decorator
    """An attribute that torch's classes lack: a property that an attribute set by the script or a subclass hides."""

    def __init__(self, get: Any) -> None:
        self._get = get
        self.__doc__ = get.__doc__

    def __get__(self, optimizer: Any, cls: type) -> Any:
        return self if optimizer is None else self._get(optimizer)


class option(extra):  # a decorator
    """An attribute that is an option.

    In an object that stands for torch's class it is an option if the constructor got options. Otherwise a script that
    sets it sets an attribute of its own.
    """

    def __set_name__(self, cls: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, cls: type) -> Any:
        if optimizer is not None and self._name in optimizer.__dict__:
            return optimizer.__dict__[self._name]
        return super().__get__(optimizer, cls)

    def __set__(self, optimizer: Any, value: Any) -> None:
        own, kept = optimizer.__dict__, getattr(optimizer, NAME, None)
        if kept is None or not kept.has_options or self._name in own:
            own[self._name] = value
            return
        if self._name == "max_grad_norm":
            check_max_grad_norm(value)
            if value is not None and kept.in_backward is not None:
                raise NotImplementedError(f"max_grad_norm is {value}, but {WHY_NOT_CLIPPED}")
        setattr(kept, self._name, value)

    def __delete__(self, optimizer: Any) -> None:
        try:
            del optimizer.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
