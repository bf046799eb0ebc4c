"""Tests the tensors that optimizers make for CUDA parameters, with fake tensors, which have a device but no memory.

Fake tensors have torch's shapes, dtypes and devices for every operation. These tests therefore find a tensor on the
wrong device or a copy to the host on every machine. tests/native/convert_tests.cpp tests the bits that the kernels
write, and tests/optim/test_optim_cuda.py tests whole steps on a GPU.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain import _C, optim
from drivetrain.optim.engine import Engine
from drivetrain.optim.native_step import complete_states
from drivetrain.optim.rule import rule_of
from optim_cases import CASES, cases, each_rule
from precision_cases import PRECISIONS

SHAPES: list[Any] = [(64, 48), (48, 300), (0, 4), (300, 17)]
OPTIMIZERS = {name: (ours, options) for name, (ours, _, options) in CASES.items()}
OPTIMIZERS |= {"muon": (optim.Muon, {}), "adafactor": (optim.Adafactor, {})}


class NoWaiting(TorchDispatchMode):
    """Makes operations raise if the host would wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)]
        reads = func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        leaves = isinstance(result, Tensor) and any(tensor.is_cuda != result.is_cuda for tensor in tensors)
        if (reads and any(tensor.is_cuda for tensor in tensors)) or leaves:
            raise AssertionError(f"{func} waits for the device")
        return result


@pytest.fixture
def _fake_cuda() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def params_on_cuda(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    params = [torch.empty(shape, dtype=dtype, device="cuda").requires_grad_() for shape in SHAPES]
    return [*params, torch.empty(40, 30, dtype=dtype, device="cuda").t().requires_grad_()]


class NotRun(_C.Conversions):
    """Skips conversions, because fake tensors have no values."""

    def run(self) -> None:
        pass


@pytest.mark.usefixtures("_fake_cuda")
@pytest.mark.parametrize(
    ("name", "precision"),
    [*each_rule(["as_it_is", *PRECISIONS]), *itertools.product(("muon", "adafactor"), ["as_it_is", *PRECISIONS])],
)
def test_states_are_made_and_converted_without_a_wait(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_C, "Conversions", NotRun, raising=False)
    ours, options = OPTIMIZERS[name]
    params = params_on_cuda()
    optimizer = ours(params, **options, **PRECISIONS.get(precision, {}), min_8bit_size=0)
    (group,) = optimizer.param_groups

    def complete() -> None:
        with NoWaiting(), torch.no_grad():
            lacking = [(param, group, "parameter") for param in params]
            complete_states(Engine(optimizer), lacking, rule_of(type(optimizer)).name_of(group), optimizer.state)

    complete()
    for param in params:
        states = optimizer.state[param]
        assert all(value.device == param.device for value in states.values()), states.keys()
        shapes = {param.shape, ((param.numel() + 1) // 2,)}  # of states, and of 4-bit codes
        assert any(value.shape in shapes for value in states.values()) or name in ("adafactor", "sgd", "sgd_l2")
    others = {"state_bits": 16} if precision == "state_8" else {"state_bits": 8}
    group.update(others)
    complete()
    states = optimizer.state[params[0]]
    if name not in ("adafactor", "sgd", "sgd_l2"):
        codes = [key for key in states if key.endswith("_codes")]
        assert bool(codes) == (precision != "state_8"), states.keys()


@pytest.mark.usefixtures("_fake_cuda")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_counter_made_at_construction_is_beside_its_parameter(dtype: torch.dtype) -> None:
    """torch's Adagrad makes its states at construction, with counters on the CPU unless it is fused."""
    params = params_on_cuda(dtype)
    optimizer = optim.Adagrad(params, initial_accumulator_value=0.1)
    for param in params:
        assert optimizer.state[param]["step"].device == param.device
        assert optimizer.state[param]["step"].dtype == torch.float32
        assert optimizer.state[param]["sum"].device == param.device


@pytest.mark.usefixtures("_fake_cuda")
@pytest.mark.parametrize("fused", [False, True])
def test_a_loaded_counter_is_beside_its_parameter(fused: bool) -> None:
    params = params_on_cuda(torch.float32)
    theirs = torch.optim.Adagrad(params)
    saved = theirs.state_dict()
    saved["param_groups"][0]["fused"] = fused or None
    assert saved["state"][0]["step"].device.type == "cpu"
    optimizer = optim.Adagrad(params)
    optimizer.load_state_dict(saved)
    for param in params:
        assert optimizer.state[param]["step"].device == param.device


@pytest.mark.usefixtures("_fake_cuda")
def test_a_number_on_the_device_is_looked_at() -> None:
    """A step reads every number but the learning rate, as torch's do, and raises as a fake tensor has no number."""
    params = params_on_cuda()
    optimizer = optim.AdamW(params)
    optimizer.param_groups[0]["weight_decay"] = torch.empty((), device="cuda")
    for param in params:
        param.grad = torch.empty_like(param)
    with pytest.raises(TypeError, match=r"param_groups\[0\]: weight_decay is FakeTensor.*, expected a number"):
        optimizer.step()


@cases
def test_a_first_step_on_the_cpu_starts_from_torchs_states(case: str) -> None:
    """States of every case and dtype have the initial values and layouts of torch's before the first step."""
    ours, _, options = CASES[case]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        params = [torch.zeros(5, 7, dtype=dtype).t().requires_grad_(), torch.zeros((), dtype=dtype).requires_grad_()]
        optimizer = ours(params, **{**options, "lr": 0.25})
        optimizer.state.clear()
        group = optimizer.param_groups[0]
        with torch.no_grad():
            lacking = [(p, group, "p") for p in params]
            complete_states(Engine(optimizer), lacking, rule_of(type(optimizer)).name_of(group), optimizer.state)
        initials = {"sum": options.get("initial_accumulator_value", 0.0), "step_size": 0.25}
        scalars = {"step": 0, "mu_product": 1, "eta": 0.25, "mu": 1, "weight_sum": 0, "lr_max": 0}
        for param in params:
            for name, value in optimizer.state[param].items():
                if name in scalars:
                    assert value == scalars[name]
                    is_wide = name in ("weight_sum", "lr_max")
                    assert (value.dtype, value.shape) == (torch.float64 if is_wide else torch.float32, ())
                    continue
                initial = initials.get(name, 0.0)
                expected = complex(initial, initial) if dtype.is_complex else initial
                wanted = torch.full_like(param, expected, memory_format=torch.preserve_format)
                assert torch.equal(value, wanted), name
                assert value.stride() == wanted.stride()
                assert value.dtype == dtype
