"""Checks activation budgets where a step, or its profile, runs out of memory."""

import os
import subprocess
import sys

import pytest
import torch
from models import ABOVE, Gpt, Step, assert_same_bits, gradients
from torch import nn

import drivetrain


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

    before, notes = plan.planned_bytes, len(plan.notes)
    with pytest.raises(torch.OutOfMemoryError, match=r"with a budget of .* as well: set a smaller one.*no more"):
        plan.step(always_fails)
    assert plan.planned_bytes == before
    assert len(plan.notes) == notes


def test_a_step_off_the_plan_that_runs_out_of_memory_says_so() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))
            self.is_longer = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x.sin() if self.is_longer else x).tanh()
            return x.square().mean()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(64, 16)
    plan = drivetrain.activation_budget(model, lambda: model(x).backward(), "80%")
    model.is_longer = True

    def always_fails() -> None:
        model(x).backward()
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError, match=r"another path than the planned step .operation 1 is aten::sin"):
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
size = 1024 * int(open("/proc/self/status").read().split("VmData:")[1].split()[0])
resource.setrlimit(resource.RLIMIT_DATA, (size + 72 * 2**20,) * 2)
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
    assert " MiB without a budget" in done.stdout


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
        drivetrain.activation_budget(model, step, "400MiB")
        model.zero_grad()
        assert_same_bits(gradients(model, step), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
