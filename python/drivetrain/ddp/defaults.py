"""Process-wide state of DistributedDataParallel: default arguments, and descriptions of the wrappers that were made."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Applied to arguments that the caller does not pass; install(**ddp_defaults) fills it.
defaults: dict[str, object] = {}

# A description of every wrapper made in this process, in order; `python -m drivetrain run` prints it.
constructed: list[str] = []


def with_defaults(init: Callable[P, R]) -> Callable[P, R]:
    """Decorates a constructor: fills in `defaults` for arguments that the caller does not pass."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if defaults:
            passed = signature.bind(*args, **kwargs).arguments
            kwargs.update({name: value for name, value in defaults.items() if name not in passed})
        return init(*args, **kwargs)

    return wrapper
