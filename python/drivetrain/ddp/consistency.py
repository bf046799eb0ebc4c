"""Checks before a module is wrapped: its devices, and that all ranks wrap the same model with the same arguments."""

import hashlib
import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .gather import gather_objects, is_foreign, on_device
from .transport import rank_name

_BUCKET_SIZES = ("bucket_cap_mb", "bucket_cap_mb_list")


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters that will be reduced, with their names."""
    ignored: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return [(n, p) for n, p in module.named_parameters() if p.requires_grad and n not in ignored]


def names_by_id(module: nn.Module) -> dict[int, str]:
    """Returns the names of all parameters, by `id`. A module's own `named_parameters` may leave some out."""
    return {
        id(param): f"{prefix}.{name}" if prefix else name
        for prefix, part in reversed(list(module.named_modules()))
        for name, param in reversed(list(part.named_parameters(recurse=False)))
    }


def title_of(module: nn.Module) -> str:
    """Returns how messages call a wrapped module: its class, and the parameters and ranks of a part."""
    return str(module.__dict__.get("_drivetrain_title", type(module).__name__))


def check_default_group() -> None:
    """Raises ValueError with the call that makes the default process group, if there is none."""
    if dist.is_initialized():
        return
    call = "torch.distributed.init_process_group("
    if "RANK" in os.environ:  # a launcher has described the group
        cure = f"Call {call}) first, or pass process_group."
    else:
        cure = (
            f"In a single process, as in a notebook, call {call}store=torch.distributed.HashStore(), rank=0, "
            f"world_size=1) first. For several ranks start the script with torchrun and call {call}). Or pass "
            "process_group."
        )
    raise ValueError(f"DistributedDataParallel needs a process group and none is initialized. {cure}")


def check_devices(named_params: list[tuple[str, nn.Parameter]]) -> None:
    """Raises ValueError if the parameters are on devices of several types."""
    first_on: dict[torch.device, str] = {}
    for name, param in named_params:
        first_on.setdefault(param.device, name)
    where = ", ".join(f"{name!r} on {device}" for device, name in first_on.items())
    if len({device.type for device in first_on}) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but its parameters are "
            f"spread: {where}. Move the module to one device with module.to(device)."
        )


def check_same_on_all_ranks(
    named_params: list[tuple[str, nn.Parameter]],
    arguments: dict[str, object],
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Compares parameters and arguments over ranks. As under torch, ranks may give their parameters other names.

    A foreign group is left to torch's own comparison.

    Returns:
        The arguments for bucket sizes: rank 0's, if the ranks' differ.

    Raises:
        RuntimeError: Two ranks differ in something else, or have the same names in different orders. Every rank raises
            it and names the first difference.
    """
    sizes = {name: arguments[name] for name in _BUCKET_SIZES}
    if is_foreign(group):
        return sizes
    names = [name for name, _ in named_params]
    same = [f"{name} {value!r}" for name, value in arguments.items() if name not in sizes]
    facts = [_facts_of(param) for _, param in named_params]
    digest = hashlib.sha256(repr((same, names, facts, sizes)).encode()).digest()
    device = next((param.device for _, param in named_params), torch.device("cpu"))
    with on_device(device):
        if len(set(gather_objects(digest, group))) == 1:
            return sizes
        everyone = gather_objects((arguments, names, facts), group)
    named_alike = len({frozenset(of_rank) for _, of_rank, _ in everyone}) == 1
    if not named_alike and len({tuple(of_rank) for _, _, of_rank in everyone}) == 1:
        everyone = [(of_rank, names, facts) for of_rank, _, _ in everyone]
    by_rank = [
        {f"argument {name!r}": repr(value) for name, value in of_rank.items() if name not in sizes}
        | {f"parameter {name!r}": fact for name, fact in zip(its_names, its_facts, strict=True)}
        for of_rank, its_names, its_facts in everyone
    ]
    for what in dict.fromkeys(what for facts in by_rank for what in facts):
        found = [facts.get(what, "not there") for facts in by_rank]
        if len(set(found)) > 1:
            ranks = "; ".join(f"{rank_name(rank, group)}: {fact}" for rank, fact in enumerate(found))
            raise RuntimeError(
                "DistributedDataParallel needs the same model and arguments on every rank, but "
                f"{what} differs: {ranks}."
            )
    if len({tuple(its_names) for _, its_names, _ in everyone}) > 1:
        raise RuntimeError(
            "DistributedDataParallel needs the same model on every rank, but the ranks registered the same parameters "
            "in different orders. Build the model in the same order everywhere."
        )
    return {name: everyone[0][0][name] for name in sizes}


def _facts_of(param: nn.Parameter) -> str:
    facts = f"{tuple(param.shape)} {param.dtype}, strides {param.stride()}"
    return facts if param.grad_dtype in (param.dtype, None) else f"{facts}, gradient {param.grad_dtype}"


def checked_weight(weight: float) -> float:
    """Returns the weight as a float. Raises ValueError if it is negative or not finite."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight is {weight}, expected a finite number >= 0: how many tokens the loss is a mean of")
    return float(weight)
