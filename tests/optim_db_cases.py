"""Provides pairs of our optimizers and torch's over equal parameters, and the inputs of torch's optim_db."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_optimizers import optim_db

from drivetrain import optim

CLASSES = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adafactor")
CLASSES += ("Adadelta", "Adamax", "RAdam", "NAdam", "ASGD", "Rprop")
MUON = next(info for info in optim_db if info.name == "Muon")
INFOS = {info.name: info for info in optim_db if info.name in CLASSES}
WITH_MUON = {**INFOS, "Muon": MUON}
INPUTS = [
    pytest.param(name, index, id=f"{name}-{entry.desc}")
    for name, info in INFOS.items()
    for index, entry in enumerate(info.optim_inputs_func(device="cpu"))
]
ERROR_INPUTS = [
    pytest.param(name, index, id=f"{name}-{error.optimizer_error_input.desc}")
    for name, info in WITH_MUON.items()
    for index, error in enumerate(info.optim_error_inputs_func("cpu", torch.float32))
]
# torch's capturable inputs are for GPUs only.
CAPTURABLE = [
    pytest.param(name, entry.kwargs, id=f"{name}-{entry.desc}")
    for name, info in INFOS.items()
    for entry in info.optim_inputs_func(device="cuda")
    if entry.kwargs.get("capturable")
]
names = pytest.mark.parametrize("name", INFOS)
every_input = pytest.mark.parametrize(("name", "index"), INPUTS)

TOLERANCES = {
    torch.float32: {"rtol": 3e-6, "atol": 3e-6},
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.complex64: {"rtol": 3e-6, "atol": 3e-6},
    torch.complex128: {"rtol": 1e-12, "atol": 1e-13},
}


def classes(name: str) -> tuple[type, type]:
    return getattr(optim, name), WITH_MUON[name].optim_cls


def options_of(name: str, index: int) -> dict[str, Any]:
    """Returns a fresh copy, because optimizers must not share a tensor lr."""
    return copy.deepcopy(INFOS[name].optim_inputs_func(device="cpu")[index].kwargs)


SHAPES = [(7, 5), (40, 30), (3, 1)]


def make_params(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in SHAPES]


def references(params: list[Tensor]) -> list[Tensor]:
    return [p.detach().clone(memory_format=torch.preserve_format).requires_grad_() for p in params]


def set_grads(*lists: list[Tensor]) -> None:
    """Gives the parameters at one position of all lists the same new gradient."""
    for params in zip(*lists, strict=True):
        grad = torch.randn(params[0].shape, dtype=params[0].dtype)
        for param in params:
            param.grad = grad.clone()


def pair(name: str, *args: Any, **options: Any) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    """Returns our optimizer and torch's over equal parameters, followed by these parameters."""
    ours, theirs = classes(name)
    params = make_params()
    torch_params = references(params)
    return ours(params, *args, **copy.deepcopy(options)), theirs(torch_params, *args, **options), params, torch_params


def steps(count: int, *optimizers: torch.optim.Optimizer) -> None:
    lists = [[p for group in each.param_groups for p in group["params"]] for each in optimizers]
    for _ in range(count):
        set_grads(*lists)
        for each in optimizers:
            each.step()


def assert_same(ours: Any, theirs: Any, tolerance: dict[str, float] | None = None) -> None:
    torch.testing.assert_close(ours, theirs, **(tolerance or TOLERANCES[torch.float32]))


def assert_same_dicts(ours: dict[str, Any], theirs: dict[str, Any], tolerance: dict[str, float] | None = None) -> None:
    """Compares state dicts. A state that is None in torch (SGD's without momentum) may be absent in ours."""
    assert ours["param_groups"] == theirs["param_groups"]
    states = [
        {key: {n: v for n, v in state.items() if v is not None} for key, state in each["state"].items()}
        for each in (ours, theirs)
    ]
    states = [{key: state for key, state in each.items() if state} for each in states]
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        assert_same(state, states[1][key], tolerance)
