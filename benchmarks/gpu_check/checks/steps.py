"""Compares one step of every optimizer in every storage format on the device with the CPU's bits."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import gpu_kernels  # type: ignore[import-not-found]  # lies in tests/

from .findings import Finding

BY_PRODUCTS = 0.02  # relative to a matrix's norm: Muon's matrix products sum in another order on a GPU


def run(device: torch.device, is_dry: bool) -> Iterator[Finding]:
    """Steps the optimizers of tests/gpu_kernels.py, whose list the tests compare with the sources."""
    counts: dict[str, int] = {}
    worst: list[str] = []
    for here, there in zip(gpu_kernels.optimizers("cpu"), gpu_kernels.optimizers(device.type), strict=True):
        _copy(here, there)
        here.step()
        there.step()
        name = type(here).__name__
        counts[name] = counts.get(name, 0) + 1
        if wrong := _first_difference(here, there):
            worst.append(f"{name} {_storage(here)}: {wrong}")
    for name, count in counts.items():
        wrong_ones = [each for each in worst if each.startswith(f"{name} ")]
        seen = "; ".join(wrong_ones[:3]) if wrong_ones else f"{count} storages and options"
        yield Finding(f"{name}: one step gives the CPU's bits", not wrong_ones, seen)


def _copy(here: Any, there: Any) -> None:
    """Copies the values and gradients of the first optimizer's parameters to the second's."""
    for group, other in zip(here.param_groups, there.param_groups, strict=True):
        for a, b in zip(group["params"], other["params"], strict=True):
            b.data.copy_(a.data)
            b.grad.copy_(a.grad)


def _storage(optimizer: Any) -> str:
    group = optimizer.param_groups[0]
    settings = {key: group.get(key) for key in ("state_bits", "master_bits", "rounding")}
    dtype = str(group["params"][0].dtype).removeprefix("torch.")
    return ", ".join([dtype, *(f"{key}={value}" for key, value in settings.items() if value is not None)])


def _first_difference(here: Any, there: Any) -> str:
    for group, other in zip(here.param_groups, there.param_groups, strict=True):
        for index, (a, b) in enumerate(zip(group["params"], other["params"], strict=True)):
            values = {"the parameter": (a.detach(), b.detach())}
            if type(here).__name__ != "Muon":
                values |= {key: (value, there.state[b].get(key)) for key, value in here.state[a].items()}
            for name, (mine, theirs) in values.items():
                if not isinstance(mine, Tensor):
                    continue
                if theirs is None:
                    return f"{name} of parameter {index} is missing"
                theirs = theirs.cpu()
                if type(here).__name__ == "Muon":
                    gap = (mine.double() - theirs.double()).norm() / mine.double().norm().clamp(min=1e-12)
                    if gap > BY_PRODUCTS:
                        return f"{name} of parameter {index} differs by {gap:.1e} of its norm"
                elif not _has_same_bits(mine, theirs):
                    return f"{name} of parameter {index} of shape {tuple(mine.shape)} has other bits"
    return ""


def _has_same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
