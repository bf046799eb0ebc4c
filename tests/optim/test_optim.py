"""Tests the optimizers against float64, torch, other instruction sets and bad input."""

import io
import os
import subprocess
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import drivetrain
from drivetrain import _C, optim
from optim_cases import (
    CASES,
    TOLERANCES,
    assert_same,
    assert_same_bits_everywhere,
    cases,
    copies,
    each_rule,
    make_params,
    round_stored,
    set_grads,
)
from warm_python import warm_python


@pytest.mark.parametrize(("case", "dtype"), each_rule(TOLERANCES))
def test_matches_float64_with_stored_values_rounded(case: str, dtype: torch.dtype, isa: str) -> None:
    ours, theirs, options = CASES[case]
    params = make_params(dtype)
    expected = [p.detach().double().requires_grad_() for p in params]
    optimizer, reference = ours(params, **options), theirs(expected, **options)
    for _ in range(3):
        set_grads(params, expected)
        optimizer.step()
        reference.step()
        round_stored(reference, dtype)
    assert_same([p.double() for p in params], expected, **TOLERANCES[dtype])


@pytest.mark.parametrize(("case", "dtype"), each_rule(TOLERANCES))
def test_neither_instruction_sets_nor_threads_change_the_bits(case: str, dtype: torch.dtype) -> None:
    ours, _, options = CASES[case]
    start = make_params(dtype, shapes=[(1000,), (33,), (40_001,)])
    assert_same_bits_everywhere(start, lambda params: ours(params, **options), steps=3)


def test_a_large_step_really_runs_on_torchs_threads() -> None:
    torch.set_num_threads(2)
    assert _C.num_step_threads() == 2


def test_every_float16_survives_a_load_and_a_store(isa: str) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        param = codes.view(dtype).clone().requires_grad_()
        param.grad = torch.zeros_like(param)
        optim.SGD([param], lr=0.0).step()
        numbers = ~codes.view(dtype).isnan()
        assert torch.equal(param.detach().view(torch.int16)[numbers], codes[numbers])
        assert torch.equal(param.detach().isnan(), ~numbers)


def test_stores_round_to_nearest_even_as_torch_does(isa: str) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int64).to(torch.int32)
    ties = bits & ~0xFFFF | 0x8000  # halfway between two bfloat16 values
    halves = bits & ~0x1FFF | 0x1000  # halfway between two float16 values
    for values in (bits.view(torch.float32), ties.view(torch.float32), halves.view(torch.float32)):
        for dtype in (torch.float16, torch.bfloat16):
            param = torch.zeros_like(values, dtype=dtype).requires_grad_()
            param.grad_dtype = torch.float32
            param.grad = values.clone()
            optim.SGD([param], lr=1.0, maximize=True).step()
            assert torch.equal(param.detach().nan_to_num(123.0), values.to(dtype).nan_to_num(123.0))


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(5, 7).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with_holes": lambda: torch.randn(6, 10)[:, ::2],
    "view": lambda: torch.randn(100)[30:60],
}


@cases
def test_state_dict_goes_to_torch_and_back(case: str) -> None:
    ours, theirs, options = CASES[case]
    params = make_params()
    optimizer = ours(params, **options)
    reference_params = copies(params)
    reference = theirs(reference_params, **options)

    def steps(count: int, *pairs: tuple[torch.optim.Optimizer, list[Tensor]]) -> None:
        for _ in range(count):
            set_grads(*[params for _, params in pairs])
            for each, _ in pairs:
                each.step()

    steps(2, (optimizer, params), (reference, reference_params))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    torch_params = copies(params)
    torch_optimizer = theirs(torch_params, **options)
    torch_optimizer.load_state_dict(torch.load(buffer))
    steps(2, (torch_optimizer, torch_params), (reference, reference_params))
    back_params = copies(torch_params)
    back = ours(back_params, **options)
    back.load_state_dict(torch_optimizer.state_dict())
    steps(2, (back, back_params), (reference, reference_params))
    assert_same(back_params, reference_params, **TOLERANCES[torch.float32])


def test_state_of_torchs_fused_class_loads() -> None:
    params = make_params(shapes=[(10,)])
    set_grads(params)
    theirs = torch.optim.AdamW(params, fused=True)
    theirs.step()
    ours = optim.AdamW(params)
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    assert ours.state[params[0]]["step"].item() == 2


def test_conjugate_and_negative_views() -> None:
    for view in (torch.Tensor.conj, lambda x: x.conj().imag):
        param = view(torch.randn(5, dtype=torch.complex64)).requires_grad_()
        torch_param = param.detach().clone().resolve_conj().resolve_neg().requires_grad_()
        param.grad = torch.randn_like(torch_param)
        torch_param.grad = param.grad.clone()
        optim.SGD([param], lr=0.1).step()
        torch.optim.SGD([torch_param], lr=0.1).step()
        torch.testing.assert_close(param.detach().resolve_conj().resolve_neg(), torch_param.detach())


def test_a_wrong_instruction_set_changes_nothing() -> None:
    code = """
import torch
from drivetrain import optim
param = torch.ones(3, requires_grad=True)
param.grad = torch.ones(3)
optimizer = optim.AdamW([param])
try:
    optimizer.step()
except ValueError as error:
    assert "DRIVETRAIN_ISA is 'bogus'" in str(error), error
    assert not optimizer.state and torch.equal(param.detach(), torch.ones(3))
else:
    raise SystemExit("no error")
"""
    environment = {**os.environ, "DRIVETRAIN_ISA": "bogus"}
    run = subprocess.run([warm_python(), "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


class TestBadInput:
    """Each error names the parameter, what came and what was expected, and leaves everything as it was."""

    def test_tensor_subclass_that_wraps_others(self) -> None:
        with FakeTensorMode():
            fake = torch.ones(3, requires_grad=True)
            fake.grad = torch.ones(3)
        with pytest.raises(NotImplementedError, match="'p' is a tensor subclass that wraps others"):
            optim.SGD([("p", fake)]).step()

    @pytest.mark.parametrize("freed", ["it", "its gradient", "its state"])
    def test_memory_freed_under_a_tensor(self, freed: str) -> None:
        param = torch.ones(3, requires_grad=True)
        param.grad = torch.ones(3)
        optimizer = optim.AdamW([("p", param)])
        optimizer.step()
        tensors = {"it": param, "its gradient": param.grad, "its state": optimizer.state[param]["exp_avg"]}
        tensors[freed].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"'p': the memory of {freed} has been freed"):
            optimizer.step()
        assert optimizer.state[param]["step"].item() == 1

    def test_option_of_a_group(self) -> None:
        with pytest.raises(NotImplementedError, match="differentiable=True"):
            optim.AdamW([{"params": make_params(), "differentiable": True}])

    def test_device_without_kernels(self) -> None:
        param = torch.ones(3, device="meta").requires_grad_()
        param.grad = torch.ones(3, device="meta")
        with pytest.raises(NotImplementedError, match="'p' is on meta"):
            optim.AdamW([("p", param)]).step()


def test_unknown_instruction_set_is_named() -> None:
    with pytest.raises(ValueError, match="DRIVETRAIN_ISA is 'sse9', but this processor offers: baseline"):
        _C.force_isa("sse9")


@pytest.mark.gpu
@cases
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_cuda_gives_the_cpus_bits(case: str, dtype: torch.dtype) -> None:
    ours, _, options = CASES[case]
    params = make_params(dtype)
    cuda_params = [p.detach().cuda().requires_grad_() for p in params]
    optimizer, cuda_optimizer = ours(params, **options), ours(cuda_params, **options)
    for _ in range(3):
        set_grads(params, cuda_params)
        optimizer.step()
        cuda_optimizer.step()
    assert_same([p.cpu() for p in cuda_params], params, rtol=0, atol=0)


def test_public_names() -> None:
    names = {"DistributedDataParallel", "__version__", "amp", "clip_grad_norm_", "install", "optim", "uninstall"}
    assert set(drivetrain.__all__) == names | {
        "Monitor",
        "accumulate",
        "activation_budget",
        "check_compute",
        "checkpoint",
        "checkpointing",
        "data",
        "float32_grad",
        "fuse_wgrad",
        "plan",
        "planner",
        "main_grads",
        "monitor",
    }
