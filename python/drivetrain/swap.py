"""Binds torch's names to drivetrain's classes, so that unedited code builds ours, and restores them."""

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from drivetrain import amp as _amp
from drivetrain import optim as _optim
from drivetrain import spawned as _spawned
from drivetrain.ddp import distributed as _ddp
from drivetrain.ddp.values import check_values as _check_values
from drivetrain.optim import kept as _kept


@dataclass(frozen=True)
class _Replacement:
    """One of torch's classes or functions, our replacement, and the torch modules whose public names we rebind."""

    original: object
    ours: object
    torch_modules: tuple[str, ...]


# A module global that is bound to a class or function: the module, its namespace, and the name there.
_Holder = tuple[str, dict[str, object], str]


def _optimizer_swaps() -> tuple[_Replacement, ...]:
    """Returns every class of drivetrain.optim that replaces the class of the same name in torch.optim."""
    swaps = []
    for name in _optim.__all__:
        ours, original = getattr(_optim, name), getattr(torch.optim, name, None)
        if ours is not original and isinstance(original, type) and issubclass(ours, original):
            swaps.append(_Replacement(original, ours, ("torch.optim", original.__module__)))
    return tuple(swaps)


# This import runs before any rebinding, so that torch's names mean torch's classes.
_DDP_SWAP = _Replacement(
    torch.nn.parallel.DistributedDataParallel,
    _ddp.DistributedDataParallel,
    (
        "torch.nn.parallel",
        "torch.nn.parallel.distributed",
        # torch.compile asks the class under this name for the model in forward. The module above stores the model on
        # the class under its own name, so that both names must mean the same class.
        "torch._dynamo.convert_frame",
    ),
)
# torch.amp.grad_scaler keeps torch's class, because FSDP's scaler derives from that name.
_SCALER_SWAP = _Replacement(torch.amp.GradScaler, _amp.GradScaler, ("torch", "torch.amp"))
_CLIP_SWAP = _Replacement(
    torch.nn.utils.clip_grad_norm_, _optim.clip_grad_norm_, ("torch.nn.utils", "torch.nn.utils.clip_grad")
)
_OPTIMIZER_SWAPS = (*_optimizer_swaps(), _SCALER_SWAP, _CLIP_SWAP)

_rebound: list[tuple[_Holder, _Replacement]] = []


def install(optim: bool = False, **ddp_defaults: object) -> list[str]:
    """Makes code written for torch's DistributedDataParallel build drivetrain's.

    Rebinds the class in `torch.nn.parallel` and `torch.nn.parallel.distributed`. In every module imported so far, it
    also rebinds each global that is torch's class, whatever its alias: Lightning's, Accelerate's, your script's `DDP`.
    Modules imported later find ours under torch's names. Ours is a subclass, so that `isinstance` tests against torch's
    class hold, in torch's own code too.

    It does not reach classes that no module global holds. They are in a function's default argument, in a class
    attribute, in a container, or in a subclass made earlier. Objects built earlier keep their class and are no
    instances of ours. Call this before you build models and optimizers.

    Processes that multiprocessing or torch.multiprocessing starts later install the same.

    A second call adds to the first. Its defaults replace defaults of the same name.

    Args:
        optim: Rebinds the optimizers that drivetrain.optim has, torch.amp.GradScaler and
            torch.nn.utils.clip_grad_norm_ as well. torch's own step takes over where ours cannot step a
            parameter, with a warning.
        **ddp_defaults: Arguments for every DistributedDataParallel whose caller does not pass them.

    Returns:
        The names that this call rebound, as "module.name".

    Raises:
        TypeError: DistributedDataParallel does not take one of the defaults. Nothing has been rebound then.
        ValueError: It does not take the value of one of the defaults. Nothing has been rebound then.
        NotImplementedError: Two of the defaults do not go together. Nothing has been rebound then.
    """
    parameters = inspect.signature(_ddp.DistributedDataParallel.__init__).parameters
    valid = [name for name in parameters if name not in ("self", "module")]
    for name in ddp_defaults:
        if name not in valid:
            raise TypeError(
                f"install() got '{name}', which DistributedDataParallel has no default for; "
                f"it takes: {', '.join(valid)}"
            )
    _check_values(ddp_defaults)
    _ddp.defaults.update(ddp_defaults)
    if optim:
        _kept.in_place_of.update(
            {
                swap.ours: swap.original
                for swap in _OPTIMIZER_SWAPS
                if isinstance(swap.ours, type) and isinstance(swap.original, type)
            }
        )
    names = []
    swaps = (_DDP_SWAP, *(_OPTIMIZER_SWAPS if optim else ()))
    for holder, swap in _holders([(swap.original, swap) for swap in swaps]):
        module_name, namespace, alias = holder
        # torch's internals keep torch's class.
        if module_name in swap.torch_modules or module_name.partition(".")[0] not in ("torch", "drivetrain"):
            namespace[alias] = swap.ours
            _rebound.append((holder, swap))
            names.append(f"{module_name}.{alias}")
    _spawned.follow("drivetrain.swap:install", optim=bool(_kept.in_place_of), **_ddp.defaults)
    return names


def uninstall() -> None:
    """Undoes `install`: restores each name that it rebound and that still is ours, and forgets the defaults.

    torch modules that were first imported in between also get torch's class back. Other modules keep what they imported
    under torch's names in between, because an import from drivetrain looks the same. Without an `install` it does
    nothing.
    """
    for (_, namespace, alias), swap in _rebound:
        if namespace.get(alias) is swap.ours:
            namespace[alias] = swap.original
    wanted = [(swap.ours, swap) for swap in {swap for _, swap in _rebound}]
    for (module_name, namespace, alias), swap in _holders(wanted):
        if module_name.partition(".")[0] == "torch":
            namespace[alias] = swap.original
    _spawned.unfollow("drivetrain.swap:install")
    _rebound.clear()
    _kept.in_place_of.clear()
    _ddp.defaults.clear()


def _holders(wanted: list[tuple[object, _Replacement]]) -> Iterator[tuple[_Holder, _Replacement]]:
    """Finds every global of every imported module that is one of the wanted objects, without loading a lazy module.

    One pass finds all of them, because it reads every global of the process. Lazy modules load in `__getattr__` or
    `__getattribute__`, so that this reads only the instance's own dict. A module with two names, as `__main__` is also
    `__mp_main__`, counts once, under the first.
    """
    swap_of = {id(target): swap for target, swap in wanted}
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
            if id(value) in swap_of:
                yield (module_name, namespace, alias), swap_of[id(value)]
