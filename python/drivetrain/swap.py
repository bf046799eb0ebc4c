"""Puts drivetrain's classes under torch's names, so that unedited code builds ours, and takes them out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from drivetrain import optim as _optim
from drivetrain.ddp import distributed as _ddp
from drivetrain.optim import base as _base


@dataclass(frozen=True)
class _Swap:
    """One of torch's classes, ours for it, and the torch modules whose public name for it we take."""

    original: type
    ours: type
    torch_modules: tuple[str, ...]

    def may_change(self, module_name: str) -> bool:
        """Whether a name in that module is ours to rebind: torch's internals keep torch's class."""
        root = module_name.partition(".")[0]
        return module_name in self.torch_modules or root not in ("torch", "drivetrain")


@dataclass(frozen=True)
class _Holder:
    """A module global that is bound to a class: `namespace[alias]` in module `module_name`."""

    module_name: str
    namespace: dict[str, object]
    alias: str

    def __str__(self) -> str:
        return f"{self.module_name}.{self.alias}"


def _optimizer_swaps() -> tuple[_Swap, ...]:
    """Every class of drivetrain.optim that replaces the class of the same name in torch.optim."""
    swaps = []
    for name in _optim.__all__:
        ours, original = getattr(_optim, name), getattr(torch.optim, name, None)
        if isinstance(ours, type) and isinstance(original, type) and issubclass(ours, original):
            swaps.append(_Swap(original, ours, ("torch.optim", original.__module__)))
    return tuple(swaps)


# Looked up while torch's names mean torch's classes: nobody can rebind before this import.
_DDP_SWAP = _Swap(
    torch.nn.parallel.DistributedDataParallel,
    _ddp.DistributedDataParallel,
    (
        "torch.nn.parallel",
        "torch.nn.parallel.distributed",
        # torch.compile asks the class under this name for the model in forward. The module above notes that on
        # whatever class its own name means, so that both names must mean the same one.
        "torch._dynamo.convert_frame",
    ),
)
_OPTIMIZER_SWAPS = _optimizer_swaps()

_rebound: list[tuple[_Holder, _Swap]] = []


def install(optim: bool = False, **ddp_defaults: object) -> list[str]:
    """Makes code written for torch's DistributedDataParallel build drivetrain's.

    Rebinds `torch.nn.parallel.DistributedDataParallel`, the same in `torch.nn.parallel.distributed` and, in
    every module imported so far, each global that is torch's class, whatever its alias: Lightning's,
    Accelerate's, your script's `DDP`. Modules imported later find ours under torch's names. Ours is a
    subclass, so `isinstance` tests against torch's class hold, in torch's own code too.

    Out of reach, as no module global holds them: a class kept as a function's default argument, in a class
    attribute or in a container, and subclasses made earlier. Objects built earlier stay what they are and are
    no instances of the names' new meaning: call this before building models and optimizers.

    A second call adds to the first: its defaults win over those of the same name, none is taken back.

    Args:
        optim: Do the same for the optimizers that drivetrain.optim has. Of DTensor parameters that ours cannot step
            (Muon and Adafactor need whole matrices) the optimizer is torch's after all, with a warning.
        **ddp_defaults: Arguments for every DistributedDataParallel whose caller does not pass them.

    Returns:
        The names this call rebound, as "module.name".

    Raises:
        TypeError: A default that DistributedDataParallel does not take. Nothing has been rebound then.
    """
    _check_defaults(ddp_defaults)
    _ddp.defaults.update(ddp_defaults)
    if optim:
        _base.in_place_of.update({swap.ours: swap.original for swap in _OPTIMIZER_SWAPS})
    names = []
    for swap in (_DDP_SWAP, *(_OPTIMIZER_SWAPS if optim else ())):
        for holder in _holders(swap.original):
            if swap.may_change(holder.module_name):
                holder.namespace[holder.alias] = swap.ours
                _rebound.append((holder, swap))
                names.append(str(holder))
    return names


def uninstall() -> None:
    """Undoes `install`: restores each name it rebound that still is ours, and forgets the defaults.

    Torch modules that were first imported meanwhile get torch's class back too; other modules keep what they
    imported under torch's names meanwhile, because an import from drivetrain looks the same. Without an
    `install` it does nothing.
    """
    for holder, swap in _rebound:
        if holder.namespace.get(holder.alias) is swap.ours:
            holder.namespace[holder.alias] = swap.original
    for swap in {swap for _, swap in _rebound}:
        for holder in _holders(swap.ours):
            if holder.module_name.partition(".")[0] == "torch":
                holder.namespace[holder.alias] = swap.original
    _rebound.clear()
    _base.in_place_of.clear()
    _ddp.defaults.clear()


def names_bound_to_ours() -> list[str]:
    """The globals outside drivetrain that are one of our replacements now, as "module.name"."""
    return [
        str(holder)
        for swap in (_DDP_SWAP, *_OPTIMIZER_SWAPS)
        for holder in _holders(swap.ours)
        if holder.module_name.partition(".")[0] != "drivetrain"
    ]


def _check_defaults(ddp_defaults: dict[str, object]) -> None:
    parameters = inspect.signature(_ddp.DistributedDataParallel.__init__).parameters
    valid = [name for name in parameters if name not in ("self", "module")]
    for name in ddp_defaults:
        if name not in valid:
            raise TypeError(
                f"install() got '{name}', which DistributedDataParallel has no default for; "
                f"it takes: {', '.join(valid)}"
            )


def _holders(cls: type) -> Iterator[_Holder]:
    """Finds every global of every imported module that is `cls`, without waking a lazy module.

    Lazy modules work in `__getattr__` or `__getattribute__`, so only the instance's own dict is read.
    A module with two names (`__main__` is also `__mp_main__`) counts once, under the first.
    """
    seen: set[int] = set()
    for module_name, module in list(sys.modules.items()):
        try:
            namespace = object.__getattribute__(module, "__dict__")
        except AttributeError:  # None, or a stand-in with slots
            continue
        if not isinstance(namespace, dict) or id(namespace) in seen:  # a class may stand in for a module
            continue
        seen.add(id(namespace))
        for alias, value in list(namespace.items()):
            if value is cls:
                yield _Holder(module_name, namespace, alias)
