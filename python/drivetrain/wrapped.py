"""Finds what wraps a model for features that build on its reducer, and removes the wrappers of frameworks."""

from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel


def unwrapped(given: Any, name: str, kind: type[Any]) -> Any:
    """Removes a framework's wrappers, which hold the original in an attribute and step on their own schedule.

    Args:
        given: The object, wrapped or not.
        name: Name of the attribute that holds the original.
        kind: Class of the original.
    """
    while isinstance(inner := getattr(given, name, None), kind):
        given = inner
    return given


class ReducingWrapper(Protocol):
    """Declares what optimizers use of `drivetrain.DistributedDataParallel`, whose package imports theirs.

    Attributes:
        reducer: The reducer, if there is one.
    """

    reducer: Any
    _use_python_reducer: bool

    def _has_reducer(self) -> bool: ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Leaves gradients on this rank while the block runs."""

    def refuse_parts(self, what: str) -> None:
        """Raises NotImplementedError if parameters belong to several groups, which `what` does not support."""


def wrapper_in(model: nn.Module, caller: str) -> ReducingWrapper | None:
    """Returns the DistributedDataParallel that the model is or contains; None if it has none.

    Args:
        model: The model.
        caller: Name of the calling feature, for messages.

    Raises:
        NotImplementedError: The model has torch's class, several wrappers, one without a reducer, or is sharded.
    """
    wrappers = [module for module in model.modules() if isinstance(module, TorchDistributedDataParallel)]
    for module in model.modules():
        if "FSDP" in type(module).__name__ or type(module).__name__ == "FullyShardedDataParallel":
            raise NotImplementedError(
                f"{caller} does not support sharded models (FSDP), where torch's own means remain: no_sync(), "
                "set_requires_gradient_sync()."
            )
    if not wrappers:
        return None
    if len(wrappers) > 1 or not hasattr(wrappers[0], "refuse_parts"):  # torch's class has no such method
        what = f"{len(wrappers)} DistributedDataParallel wrappers" if len(wrappers) > 1 else "torch's own class"
        raise NotImplementedError(
            f"{caller} needs a model in one drivetrain.DistributedDataParallel, or in none; this one has {what}: swap "
            "it (drivetrain.install() does it for a script that builds torch's)."
        )
    wrapper = cast(ReducingWrapper, wrappers[0])
    if not wrapper._has_reducer() or wrapper._use_python_reducer:
        raise NotImplementedError(
            f"{caller} needs the reducer, and this DistributedDataParallel has none: all its parameters' reductions "
            "are delayed, or compiled into backward."
        )
    wrapper.refuse_parts(caller)
    return wrapper
