"""Describes a class of optimizers to the engine: its native rule, the rule's numbers and first states."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]
Numbers = dict[str, float | Tensor]
_PLACES = "_drivetrain_places"


@dataclass(frozen=True)
class Rule:
    """Describes a class of optimizers.

    Attributes:
        name: The native rule by its name in csrc/optim/rules.h, or a function of the group that returns it.
        numbers: Names of the group's entries that the rule reads in addition to `lr`; see `hypers()`. Or a function of
            the group that returns all numbers by their names in the rule. A learning rate on CUDA stays there.
        initials: The values that fill states before the first step, by the state's name, where they are not 0. A string
            names the group's entry.
        copies: The state that starts as a copy of the parameter.
        constants: Entries of the groups that are no arguments of the constructor.
        gathers: Returns whether the rule needs whole parameters of a group, which every rank then gathers and steps.
        step_sparse: Steps parameters with sparse gradients, given the optimizer, their group and them. None where
            torch's class takes no such gradients.
        scalar_dtype: The dtype of the rule's scalars; None takes the step counter's.
        also: Returns names of options that a group has besides the defaults.
        own_entries: Names of entries of groups that torch's class lacks. There the script's own entries may have them.
        is_own: Returns whether a group asks for something that torch's class lacks, besides storage formats.
    """

    name: str | Callable[[Group], str]
    numbers: tuple[str | tuple[str, ...], ...] | Callable[[Group], Numbers]
    initials: Mapping[str, float | str] = field(default_factory=dict)
    copies: str | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    gathers: Callable[[Group], bool] = lambda group: False
    step_sparse: Callable[[Any, Group, list[Tensor]], None] | None = None
    scalar_dtype: torch.dtype | None = None
    also: Callable[[Group], set[str]] = lambda group: set()
    own_entries: tuple[str, ...] = ()
    is_own: Callable[[Group], bool] = lambda group: False

    def name_of(self, group: Group) -> str:
        """Returns the group's native rule."""
        return self.name if isinstance(self.name, str) else self.name(group)

    def hypers(self, group: Group) -> Numbers:
        """Returns the group's numbers by the names that the native rule reads."""
        return hypers(group, *self.numbers) if isinstance(self.numbers, tuple) else self.numbers(group)

    def initial(self, group: Group, name: str) -> float:
        """Returns the value that fills a state before the first step."""
        value = self.initials.get(name, 0.0)
        return float(group[value] if isinstance(value, str) else value)


def part_of_group(group: Group, places: Sequence[int], params: list[Tensor] | None = None) -> Group:
    """Returns a copy of a group with the parameters at some places, or with tensors that stand for them.

    The copy keeps the places in the optimizer's group, from which stochastic rounding draws.
    """
    lists = {"params": group["params"], _PLACES: range(len(group["params"]))}
    lists |= {name: group[name] for name in ("param_names", _PLACES) if name in group}
    chosen = {name: [values[place] for place in places] for name, values in lists.items()}
    return {**group, **chosen} if params is None else {**group, **chosen, "params": params}


rules: dict[type, Rule] = {}  # of drivetrain's classes


def has_rule(cls: type) -> bool:
    """Returns whether the class is one of drivetrain's, or derives from one."""
    return any(each in rules for each in cls.__mro__)


def rule_of(cls: type) -> Rule:
    """Returns the rule of a class of optimizers or of the class that it derives from."""
    return next(rules[each] for each in cls.__mro__ if each in rules)


@functools.lru_cache
def options_of(cls: Any) -> frozenset[str]:
    """Returns the names of the options of the class with a rule, without those that a subclass or a script adds."""
    ours: Any = next(each for each in cls.__mro__ if each in rules)
    return frozenset(inspect.signature(ours).parameters)


def torchs_base(cls: type) -> type[torch.optim.Optimizer]:
    """Returns the torch class that this class derives from and takes its states' names from."""
    return next(each for each in cls.__mro__ if each.__module__.partition(".")[0] == "torch")


def unhooked(step: Any) -> Any:
    """Returns a torch class's step without the hooks that run around it."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def steps_itself(cls: type) -> bool:
    """Returns whether a subclass of a script has a step of its own, which may call ours."""
    step = inspect.unwrap(cls.step)  # type: ignore[attr-defined]
    return getattr(step, "__module__", None) != f"{__package__}.base"


@functools.lru_cache
def _internals(cls: Any) -> tuple[Any, tuple[str, ...]]:
    """Returns the torch class below, and the names of methods that its step calls and that ours does not."""
    base: Any = torchs_base(cls)
    if base is torch.optim.Optimizer:
        return base, ()
    called = {"_patch_step_function", "_optimizer_step_code", "_process_value_according_to_param_policy"}
    names = {name for each in base.__mro__ if each is not object for name in vars(each)}
    return base, tuple(
        name
        for name in sorted(names - called)
        if name.startswith("_") and not name.startswith("__") and callable(getattr(base, name))
    )


def overridden(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the methods of torch's class that only torch's step calls and that a script has replaced."""
    cls: Any = type(optimizer)
    own = optimizer.__dict__
    base, names = _internals(cls)
    return [
        name
        for name in names
        if name in own or _unwrapped(getattr(cls, name, None)) is not _unwrapped(getattr(base, name))
    ]


def _unwrapped(method: Any) -> Any:
    """Returns what torch.compile() has wrapped, in the classes that it found under torch's names."""
    return getattr(method, "_torchdynamo_orig_callable", method)


def learning_rate(group: Group) -> float | Tensor:
    """Returns the group's `lr`: a number, or the tensor itself on CUDA, where the step reads it."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a tensor of {lr.numel()} elements, expected one")
    return lr.detach() if isinstance(lr, Tensor) and lr.is_cuda else _float("lr", lr)


def hypers(group: Group, *entries: str | tuple[str, ...]) -> Numbers:
    """Returns the group's learning rate and other entries for the native rule.

    "betas" gives beta1 and beta2. A tuple names an entry and what the rule calls it, or the elements of it.
    """
    numbers: Numbers = {"lr": learning_rate(group)}
    for entry in entries:
        if entry == "betas":
            numbers["beta1"], numbers["beta2"] = _floats(group, "betas", 2)
        elif isinstance(entry, str):
            numbers[entry] = group[entry]
        else:
            name, *names = entry
            numbers |= zip(names, _floats(group, name, len(names)) if len(names) > 1 else [group[name]], strict=True)
    return numbers


def _float(name: str, value: Any) -> float:
    if not hasattr(value, "__float__"):  # float() itself would read a number from text, which torch refuses
        raise TypeError(f"{name} is {value!r}, expected a number")
    return float(value)


def _floats(group: Group, name: str, count: int) -> tuple[float, ...]:
    given = group[name]
    try:
        values = tuple(_float(name, value) for value in given)
    except (TypeError, ValueError):
        values = ()
    if len(values) != count:
        raise ValueError(f"{name} is {given!r}, expected {count} numbers")
    return values
