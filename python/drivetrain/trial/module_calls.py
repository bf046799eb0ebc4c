"""Records what modules take and return in forward passes, to name the first that computes something else."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from .record import ModuleCall, Print


def names_in_largest() -> Iterator[tuple[str, nn.Module]]:
    """Yields every module of this process by its name in the script's largest one, without names of wrappers."""
    seen: set[int] = set()
    modules = [one for one in gc.get_objects() if isinstance(one, nn.Module)]
    for largest in sorted(modules, key=lambda one: -sum(1 for _ in one.modules())):
        for name, module in largest.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield "" if name == "module" else name.removeprefix("module."), module


class ModuleCalls:
    """Records the calls of modules in training. print_of: returns the print of a tensor."""

    def __init__(self, print_of: Callable[[Tensor], Print]) -> None:
        self._print_of = print_of
        self._names: dict[int, str] = {}
        self._calls: list[ModuleCall] = []

    def begin(self) -> None:
        """Follows all modules from now on."""
        register_module_forward_pre_hook(lambda module, given: self._note("input", module, given))
        register_module_forward_hook(lambda module, _, result: self._note("output", module, result))

    def take(self) -> list[ModuleCall]:
        """Returns the calls since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def _note(self, what: str, module: nn.Module, values: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        if id(module) not in self._names:
            self._names = {id(one): name for name, one in names_in_largest()}
        name, tensors = self._names.get(id(module), ""), [one for one in tree_leaves(values) if isinstance(one, Tensor)]
        prints = [self._print_of(one.detach()) for one in tensors if one.layout is torch.strided]
        self._calls.append((f"{what} of {type(module).__name__} {name!r}".removesuffix(" ''"), prints))


def first_difference(ones: Sequence[ModuleCall], others: Sequence[ModuleCall]) -> str:
    """Names the first difference between the calls of a step; "" if there is none."""
    for number, (one, other) in enumerate(zip(ones, others, strict=False)):
        if repr(one) != repr(other):  # Text, in which nan is the same as nan.
            number_of_pass = sum(call[0] == ones[0][0] for call in ones[: number + 1])
            return f"{one[0]} in forward pass {number_of_pass}"
    return "" if len(ones) == len(others) else "the number of calls of modules"
