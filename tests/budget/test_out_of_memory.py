"""Checks activation budgets where a step, or its profile, runs out of memory."""

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.utils.checkpoint
from models import ABOVE, MODELS, Gpt, Run, Step, assert_same_bits, fill_free_memory, gradients
from torch import Tensor, nn

import drivetrain
from drivetrain.budget.trace import _profile_frugally, _profile_whole


def test_a_step_that_runs_out_of_memory_is_run_again_with_less(gpt: tuple[nn.Module, Step]) -> None:
    model, step = gpt
    expected = gradients(model, step)
    plan = drivetrain.activation_budget(model, step, "80%")
    model.zero_grad()
    before = plan.planned_bytes
    tries = 0

    def fails_once() -> str:
        nonlocal tries
        tries += 1
        step()
        if tries == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return "done"

    assert plan.step(fails_once) == "done"
    assert tries == 2
    assert plan.planned_bytes <= 0.9 * before
    assert "ran out of memory" in plan.notes[-1]
    assert_same_bits({name: param.grad for name, param in model.named_parameters()}, expected)

    def always_fails() -> None:
        step()
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError, match=r"with a budget of .* as well: set a smaller one.*no more"):
        plan.step(always_fails)


def test_gradients_get_back_into_their_memory(gpt: tuple[nn.Module, Step]) -> None:
    model, step = gpt
    flat = torch.randn(sum(param.numel() for param in model.parameters()))
    parts = flat.split([param.numel() for param in model.parameters()])
    before = flat.clone()

    def fails_once() -> None:
        model(torch.randint(50, (2, 24))).backward()
        if tries.pop():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        flat.copy_(before)

    plan = drivetrain.activation_budget(model, step, "60%")
    for param, part in zip(model.parameters(), parts, strict=True):
        param.grad = part.view_as(param)
    tries = [False, True]
    plan.step(fails_once)
    assert torch.equal(flat, before)
    assert all(p.grad.data_ptr() == part.data_ptr() for p, part in zip(model.parameters(), parts, strict=True))


def test_gradients_before_the_first_saved_tensor_are_put_back_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model.bias = nn.Parameter(torch.ones(8))  # its gradient reads no saved tensor
    x, calls = torch.randn(4, 8), 0

    def step() -> None:
        nonlocal calls
        calls += 1
        loss = (model(x) + model.bias).mean()
        if calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        loss.backward()

    (model(x) + model.bias).mean().backward()
    once = {name: param.grad.clone() for name, param in model.named_parameters()}
    drivetrain.activation_budget(model, step, 10**9)
    assert calls == 3
    assert_same_bits({name: param.grad for name, param in model.named_parameters()}, once)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of torch.func.jvp
def test_a_transform_inside_a_pass_that_does_not_fit() -> None:
    torch.manual_seed(0)
    inner = nn.Linear(8, 8)

    class Tangents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), inner)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layers(x)
            _, tangent = torch.func.jvp(lambda v: inner(v).sin(), (y,), (torch.ones_like(y),))
            return (y + tangent).square().mean()

    model = Tangents()
    x, calls = torch.randn(4, 8), 0

    def step() -> None:
        nonlocal calls
        calls += 1
        loss = model(x)
        if calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        loss.backward()

    model(x).backward()
    expected = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    drivetrain.activation_budget(model, step, 10**9)
    assert_same_bits(gradients(model, step), expected)


def test_a_graph_that_is_left_of_a_step_that_did_not_fit_keeps_nothing(gpt: tuple[nn.Module, Step]) -> None:
    model, _ = gpt
    ids, losses = torch.randint(50, (2, 24)), []

    def step() -> None:
        losses.append(model(ids))
        if len(losses) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        losses[-1].backward()

    drivetrain.activation_budget(model, step, "60%")
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="did not fit into memory: run forward again"):
        losses[0].backward()


@pytest.mark.parametrize("name", MODELS)
def test_a_profile_with_nothing_kept_sees_what_one_with_everything_does(name: str) -> None:
    run = Run(name)
    fill_free_memory()
    whole, peak = _profile_whole(run.model, run.step, [], None, is_short=False)
    frugal, estimate = _profile_frugally(run.model, run.step, [], None)
    for mine, others in zip(frugal.passes, whole.passes, strict=True):
        assert [(*op[:2], *op[3:]) for op in mine.ops] == [(*op[:2], *op[3:]) for op in others.ops]
        assert [value[:4] for value in mine.values] == [value[:4] for value in others.values]
    assert sorted(use for use in frugal.uses if use[1]) == sorted(use for use in whole.uses if use[1])
    assert 0.7 * peak <= estimate <= peak  # the peak includes values that might have been needed


DOES_NOT_FIT = """
import resource, sys
import torch
import drivetrain

def step():
    try:
        loss = model(x).square().mean()
        loss.backward()
    except Exception as error:
        if "can't allocate memory" not in str(error):
            raise SystemExit(f"a handler for Exception saw {error!r}")
        raise

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(8192, 128)  # 4 MiB; so is what each of 24 layers saves
model = torch.nn.Sequential(*(m for _ in range(12) for m in (torch.nn.Linear(128, 128), torch.nn.GELU())))
step()
expected = [param.grad.clone() for param in model.parameters()]
model.zero_grad()
size = 1024 * int(open("/proc/self/status").read().split("VmSize:")[1].split()[0])
resource.setrlimit(resource.RLIMIT_AS, (size + 60 * 2**20,) * 2)
try:
    step()
except RuntimeError as error:
    print(error)
model.zero_grad()
plan = drivetrain.activation_budget(model, step, "30MiB")
step()
assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), expected, strict=True))
for _ in range(3):
    model.zero_grad()
    step()
print(plan)
"""


@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="the address sanitizer takes all of the address space"
)
def test_a_step_that_does_not_fit_into_memory_gets_its_budget() -> None:
    command = [sys.executable, "-c", DOES_NOT_FIT]
    environ = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": str(2**20),
    }  # tensors use memory of the system
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "can't allocate memory" in done.stdout.splitlines()[0]
    assert "a step with everything saved did not fit: its 9" in done.stdout  # MiB


def test_gradients_and_random_states_are_as_before_a_step_that_did_not_fit(gpt: tuple[nn.Module, Step]) -> None:
    model, _ = gpt
    ids = torch.randint(50, (2, 24))

    def accumulate() -> None:
        losses = [model(ids) for _ in range(2)]
        sum(losses).backward()

    torch.manual_seed(3)
    for _ in range(2):
        accumulate()
    expected = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(3)
    accumulate()
    calls = 0

    def fails_once() -> None:
        nonlocal calls
        calls += 1
        accumulate()
        if calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    plan = drivetrain.activation_budget(model, fails_once, "40%")
    assert calls == 3  # with everything saved, with nothing saved, and under the plan
    accumulate()
    assert_same_bits({name: param.grad for name, param in model.named_parameters()}, expected)
    assert plan.measured_bytes is not None
    assert 0.9 * plan.budget_bytes <= plan.measured_bytes <= plan.budget_bytes
    again = drivetrain.activation_budget(copy.deepcopy(model), plan=plan.to_dict())
    assert again.notes == plan.notes


def test_a_profile_that_does_not_fit_says_what_to_do(gpt: tuple[nn.Module, Step]) -> None:
    model, _ = gpt

    def does_not_fit() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    with pytest.raises(torch.OutOfMemoryError, match="Profile a part of the batch with the same part of the budget"):
        drivetrain.activation_budget(model, does_not_fit, "50%")
    assert not model._forward_pre_hooks


@ABOVE
def test_a_plan_of_half_a_batch_is_one_of_the_whole() -> None:
    torch.manual_seed(0)
    model = Gpt(width=64)
    ids = torch.randint(50, (8, 64))
    plan = drivetrain.activation_budget(model, lambda: model(ids[:4]).backward(), "50%")
    plan.reset_peak()
    model(ids).backward()
    assert 1.7 * plan.budget_bytes <= plan.peak_bytes <= 2.05 * plan.budget_bytes


@pytest.mark.gpu
def test_a_step_that_does_not_fit_into_a_gpu_gets_its_budget() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(2**16, 256, device="cuda")  # 64 MiB; so is what each of 24 layers saves

    def step() -> None:
        model(x).square().mean().backward()

    expected = gradients(model, step)
    model.zero_grad()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 800 * 2**20) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            step()
        model.zero_grad()
        plan = drivetrain.activation_budget(model, step, "400MiB")
        assert "did not fit" in plan.notes[0]
        model.zero_grad()
        assert_same_bits(gradients(model, step), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
