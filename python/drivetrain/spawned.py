"""Calls functions in processes that multiprocessing starts with a new interpreter. It imports no torch.

A forked process inherits what its parent has changed. A process of the start methods spawn and forkserver imports the
script again. The calls must come before, so that they are part of the data that it unpickles first.
"""

import importlib
import pickle
from multiprocessing import spawn
from types import ModuleType
from typing import Any

from .after_import import call_after_imports

_calls: dict[str, dict[str, object]] = {}
_plain_preparation_data = spawn.get_preparation_data


class _Calls:
    """Makes its calls where it is unpickled, once torch is imported there."""

    def __reduce__(self) -> tuple[Any, ...]:
        picklable = {
            target: {name: value for name, value in arguments.items() if _is_picklable(value)}
            for target, arguments in _calls.items()
        }
        return _after_torch, (picklable,)


def follow(target: str, **arguments: object) -> None:
    """Calls a function in every new process, which must itself call `follow` for the processes that it starts.

    Args:
        target: The function, such as "drivetrain.swap:install".
        arguments: Its arguments. Those that cannot be pickled, such as process groups, stay behind.
    """
    _calls[target] = arguments
    spawn.get_preparation_data = _preparation_data


def unfollow(target: str) -> None:
    """Undoes `follow`."""
    _calls.pop(target, None)
    if not _calls and spawn.get_preparation_data is _preparation_data:
        spawn.get_preparation_data = _plain_preparation_data


def _preparation_data(name: str) -> dict[str, Any]:
    return {"drivetrain": _Calls(), **_plain_preparation_data(name)}


def _is_picklable(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # a value's own __reduce__ may raise anything
        return False
    return True


def _after_torch(calls: dict[str, dict[str, object]]) -> None:
    def call(torch: ModuleType) -> None:
        for target, arguments in calls.items():
            name, function = target.split(":")
            getattr(importlib.import_module(name), function)(**arguments)

    call_after_imports({"torch": [call]})
