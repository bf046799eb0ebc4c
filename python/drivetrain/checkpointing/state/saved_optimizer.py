"""Matches a saved optimizer state with the optimizer that continues it: by its class, and by its parameters' names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...optim import precision
from ...optim.base import FusedOptimizer

# torch's state dicts leave these parts of names out in most places.
_WRAPPER_PARTS = re.compile(r"(?:_orig_mod|_checkpoint_wrapped_module)\.")


class ParameterOrder:
    """Translates between the order of an optimizer's parameters and their order in a saved state.

    Parameters are matched by name. Those that the model does not have, whose name is None, keep their order among
    themselves. A ValueError says that a parameter is not in the saved state.
    """

    def __init__(self, what: str, ours: Sequence[str | None], saved: Sequence[str | None]) -> None:
        self._saved = list(range(len(ours)))
        if len(ours) != len(saved) or list(ours) == list(saved):
            return  # the check of the groups' sizes raises for other numbers
        places = {name: number for number, name in enumerate(saved) if name is not None}
        lacking = [name for name in ours if name is not None and name not in places]
        unnamed = [number for number, name in enumerate(saved) if name is None]
        if lacking or len(unnamed) != sum(name is None for name in ours):
            other = sorted(places.keys() - set(ours))
            raise ValueError(
                f"{what} has the parameter {lacking[0] if lacking else None!r}, expected "
                f"{other[0] if other else None!r} as in the checkpoint: give it the parameters that it had"
            )
        if unnamed:
            warnings.warn(
                f"{what} has {len(unnamed)} parameters that are not in the model. Their states have no names, and are "
                "matched by order.",
                stacklevel=2,
            )
        rest = iter(unnamed)
        self._saved = [next(rest) if name is None else places[name] for name in ours]

    def saved(self, number: int) -> int:
        """Returns the number of a parameter in the saved state."""
        return self._saved[number]

    def ours(self, number: int) -> int:
        """Returns the number of the parameter that has this number in the saved state."""
        return self._saved.index(number) if number < len(self._saved) else number

    def values(self, saved: list[Any]) -> list[Any]:
        """Returns a saved list with an element per parameter, in the order of the optimizer. It may be empty."""
        return [saved[number] for number in self._saved] if len(saved) == len(self._saved) else saved

    def state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns a saved state dict with the states of parameters by their numbers in the optimizer."""
        if self._saved == list(range(len(self._saved))):
            return saved
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        names = [name for group in saved["param_groups"] for name in group.get("param_names", [])]
        here = {keys[number]: keys[position] for position, number in enumerate(self._saved)}
        numbers = iter(self._saved)
        groups = [
            group | ({"param_names": [names[next(numbers)] for _ in group["params"]]} if names else {})
            for group in saved["param_groups"]
        ]
        return saved | {
            "state": {here.get(key, key): value for key, value in saved["state"].items()},
            "param_groups": groups,
        }


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Returns the name by which a checkpoint remembers an optimizer's class."""
    return f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__qualname__}"


def check_maker(
    index: int, optimizer: torch.optim.Optimizer, saved: dict[str, Any], classes: Sequence[str] | None
) -> None:
    """Raises ValueError for a state that another kind of optimizer made, and warns if it fits nevertheless."""
    maker = classes[index] if classes is not None and index < len(classes) else "another optimizer"
    entries = {name for state in saved["state"].values() if isinstance(state, dict) for name in state}
    coded = sorted(name for name in entries if precision.is_of_blocks(name) or name in precision.EXTRA_NAMES)
    if coded and not isinstance(optimizer, FusedOptimizer):
        raise ValueError(
            f"optimizer[{index}] is a {class_name(optimizer)}, and the state in the checkpoint was made by {maker} in "
            f"a storage format of drivetrain ({coded[0]}): continue with that class. Its torch_state_dict() returns a "
            "state for torch's class"
        )
    if maker.rpartition(".")[2] == type(optimizer).__qualname__:
        return
    groups = saved["param_groups"]
    # Options whose default is None, and those that torch's classes fill in by themselves, may be absent.
    lacking = [
        name for name, value in optimizer.defaults.items() if value and any(name not in group for group in groups)
    ]
    if lacking:
        raise ValueError(
            f"optimizer[{index}] is a {class_name(optimizer)}, and the state in the checkpoint was made by {maker}, "
            f"which has no {', '.join(lacking)}. Continue with that class, or begin without `optimizer`"
        )
    if classes is not None:
        warnings.warn(
            f"optimizer[{index}] is a {class_name(optimizer)}, and continues with the state that {maker} made",
            stacklevel=2,
        )


def parameter_names(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[list[str | None]]:
    """Returns the names of each optimizer's parameters in the order of its groups; None: it is not in the model."""
    names: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), plain_name(name))
    return [[names.get(id(param)) for group in one.param_groups for param in group["params"]] for one in optimizers]


def plain_name(name: str) -> str:
    return _WRAPPER_PARTS.sub("", name)


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Loads a state dict; every state keeps the dtype in which it was saved, where torch casts to the parameter's."""
    optimizer.load_state_dict(saved)
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            for name, value in saved["state"].get(key, {}).items():
                loaded = optimizer.state[param].get(name)
                if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                    optimizer.state[param][name] = value.to(loaded.device, copy=True)
