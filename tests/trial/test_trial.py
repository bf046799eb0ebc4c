"""Tests `drivetrain try`: it finds planted faults, says nothing of healthy scripts, and leaves no trace of them."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from drivetrain.cli import main
from drivetrain.trial import script
from drivetrain.trial.record import RunRecord, Step
from drivetrain.trial.report import parting
from effort import rounds
from warm_python import warm_environ, warm_python

# One rank, so that a run takes a moment. Every fault acts in drivetrain's runs alone.
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4)
))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
params = list(model.parameters())
ours = type(model).__module__.startswith("drivetrain")
clip, last = torch.nn.utils.clip_grad_norm_, []
for step in range(100):
    inputs = torch.randn(8, 16)
    loss = (model(inputs) - inputs[:, :4]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    {fault}
    clip(params, 0.5)
    optimizer.step()
    {after}
    torch.save(model.state_dict(), "model.pt")
"""
STALE_CLIP = """
norms = []
def clip_from(given, most):
    norms.append(torch.stack([param.grad.norm() for param in given]).norm())
    [param.grad.mul_((most / norms[-2:][0]).clamp(max=1.0)) for param in given]
"""


class Tried(NamedTuple):
    """How `drivetrain try` ended, and what it said."""

    status: int
    said: str


FAULTS = {
    "wrong divisor": ("if ours: [param.grad.mul_(0.5) for param in params]", "clip = lambda *_: None"),
    "skipped bucket": ("if ours: params[0].grad.zero_()", "pass"),
    "stale gradient": ("if ours: last.append(params[-1].grad.clone()); params[-1].grad.copy_(last[-2:][0])", "pass"),
    "one wrong element": ("if ours: params[-1].grad.view(-1)[0].neg_()", "pass"),
    "gradients of two parameters exchanged": (
        "if ours: params[2].grad, params[3].grad = params[3].grad, params[2].grad",
        "pass",
    ),
    "stale norm": ("if ours: clip = lambda given, most: clip_from(given, most)", "pass"),
    "a rate that is wrong": ("if ours: optimizer.param_groups[0]['lr'] = 0.0101", "pass"),
    "no weight decay": ("if ours: optimizer.param_groups[0]['weight_decay'] = 0.0", "pass"),
    "a parameter that stays": ("pass", "if ours: params[1].data.fill_(1.0)"),
    "states lost once": ("if ours and step == 6: optimizer.state.clear()", "pass"),
}


@pytest.fixture
def tried(in_warm_processes: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Tried]:
    """Runs `drivetrain try` on a script in an empty folder."""

    def run(script: str, *options: str) -> Tried:
        Path("train.py").write_text(script)
        status = main(["try", *options, "train.py"])
        return Tried(status, "".join(capsys.readouterr()))

    return run


def script_with(fault: str, after: str = "pass") -> str:
    head, loop = SCRIPT.split("for step in", 1)
    return head + STALE_CLIP + "for step in" + loop.replace("{fault}", fault).replace("{after}", after)


SCRIPT_WITHOUT_FAULT = script_with("pass")
# A model whose result depends on a list and a tensor that it keeps.
KEEPING_SEQUENTIAL = """
class Keeping(torch.nn.Sequential):
    means, calls = torch.zeros(()), None
    def forward(self, x):
        self.calls = [*(self.calls or []), 1]
        self.means = 0.9 * self.means + 0.1 * x.detach().mean()
        return super().forward(x) * (1.0 + self.means + 0.01 * len(self.calls))
model = DDP(Keeping("""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tried: Callable[..., Tried]) -> None:
    status, said = tried(script_with(*FAULTS[fault]), "--steps", "12")
    assert status == 1, said
    assert "TRAINS SOMETHING ELSE from step " in said


@pytest.mark.parametrize("seed", range(rounds(1, 3)))
def test_a_healthy_script_raises_no_alarm(seed: int, tried: Callable[..., Tried]) -> None:
    status, said = tried(SCRIPT_WITHOUT_FAULT.replace("manual_seed(0)", f"manual_seed({seed})"), "--rounds", "1")
    assert status == 0, said
    assert "with --optim trains the same, within rounding, for 30 steps. Its steps are " in said


def on_two_ranks(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "drivetrain", "try")
    command = [warm_python(), *launch, "--rounds", "1", *options, "train.py"]
    env = {**warm_environ(), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_two_ranks(tmp_path: Path) -> None:
    done = on_two_ranks(tmp_path, SCRIPT_WITHOUT_FAULT, "--steps", "10", "--json", "out.json", "--optim")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "drivetrain trains the same, within rounding, for 10 steps. Its steps are " in done.stdout
    assert "with --optim trains the same" in done.stdout
    assert f"kept from the machine: write {tmp_path}/model.pt" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "out.json"}
    report = json.loads((tmp_path / "out.json").read_text())
    assert [len(one["timed"][0]["steps"]) for one in (report["torchs"], *report["others"])] == [10, 10, 10]
    assert "Sequential (" in report["others"][0]["checked"]["built"][0]


def test_a_fault_of_another_rank_is_reported(tmp_path: Path) -> None:
    fault = "if ours and step == 3 and os.environ['RANK'] == '1': params[0].grad.neg_()"
    done = on_two_ranks(tmp_path, script_with(fault), "--steps", "4")
    assert done.returncode == 1
    assert "rank 1: drivetrain TRAINS SOMETHING ELSE from step 4, " in done.stdout, done.stdout + done.stderr
    assert "loss at step 4" in done.stdout


def test_a_budget_is_a_column(tried: Callable[..., Tried]) -> None:
    layer_drop = SCRIPT_WITHOUT_FAULT.replace("model(inputs)", "model(inputs) * random.random()")
    layer_drop = layer_drop.replace("model = DDP(torch.nn.Sequential(", KEEPING_SEQUENTIAL)
    options = ("--steps", "8", "--rounds", "1", "--budget", "60%", "--json", "out.json")
    status, said = tried("import random\n" + layer_drop, *options)
    assert status == 0, said
    assert "with --budget 60% trains the same, within rounding, for 8 steps." in said
    assert "\nkept for backward " in said
    run = json.loads(Path("out.json").read_text())["others"][-1]["timed"][0]
    assert 0 < run["kept_bytes"] <= 0.6 * run["plain_bytes"]


def test_a_budget_that_cannot_be_kept_is_a_warning(tried: Callable[..., Tried]) -> None:
    status, said = tried(SCRIPT_WITHOUT_FAULT, "--steps", "6", "--rounds", "1", "--budget", "1")
    assert status == 0, said
    assert (
        "with --budget 1 warns: DistributedDataParallel has no budget: ValueError: budget is 1 B: the smallest" in said
    )
    assert "with --budget 1 has changed nothing: no model got a budget" in said
    status, said = tried(SCRIPT_WITHOUT_FAULT, "--budget", "much")
    assert (status, said.startswith("drivetrain try: --budget is 'much', expected a number of bytes")) == (2, True)


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        ("raise KeyError('lost')", 2, "makes no optimizer step under torch: "),
        ("import os; os._exit(3)", 2, "train.py under torch ended with status 3. Its last lines:"),
        (script_with("if ours and step == 3: raise KeyError('lost')"), 1, "with --optim fails where torch does not:"),
        (
            script_with("if not step: params[0].data += torch.seed() % 97"),
            0,
            "does not repeat to the bit, because of op",
        ),
        (script_with("if step == 4: raise OSError(time.time())"), 0, "torch's run stops early: OSError: 1"),
    ],
)
def test_scripts_that_cannot_be_compared(script: str, status: int, said: str, tried: Callable[..., Tried]) -> None:
    done = tried(script, "--steps", "6", "--rounds", "1")
    assert (done.status, said in done.said) == (status, True), done.said


def test_each_rank_begins_at_a_seed_of_its_own() -> None:
    drawn = []
    with torch.random.fork_rng():
        for rank in (0, 0, 1):
            torch.seed(), random.seed(), np.random.seed()
            script._seed(rank)
            drawn.append({torch.rand(()).item(), random.random(), np.random.rand()})
    assert drawn[0] == drawn[1]
    assert not drawn[1] & drawn[2]


def record(*losses: float, norm: float = 1.0) -> RunRecord:
    return RunRecord([Step([loss], 0.1, {"w": (norm, 0.5)}, {"w": (norm, 0.5)}) for loss in losses])


def test_distances_count_against_those_that_rounding_makes() -> None:
    one, rounded = record(1.0, 0.5, 0.25), record(1.0, 0.5001, 0.25)
    assert parting(one, record(1.0, 0.5005, 0.25), [rounded]) is None
    found = parting(one, record(1.0, 0.5, 0.26), [one])
    assert found is not None
    assert (found.step, found.what) == (3, "loss")
    assert parting(record(float("nan")), record(float("nan")), [one]) is None
    assert parting(record(1.0), record(float("nan")), [one]) is not None
    assert parting(one, record(1.0, 0.5, 0.25, norm=1.1), [one], with_gradients=False) is not None


def test_a_run_without_an_end_is_ended(tried: Callable[..., Tried]) -> None:
    status, said = tried("import time\ntime.sleep(600)", "--limit", "3")
    assert status == 2
    assert "did not make 30 optimizer steps in 3 s (--limit)" in said


# ---- Other numbers of ranks.

RESIZED = """
import collections, os
import torch
import torch.distributed as dist
import drivetrain
from drivetrain.data import ResumableSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(96, 16))
class Scale(torch.nn.Module):
    def forward(self, x):
        return x * {scale}
layers = torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.1), Scale(), torch.nn.Linear(32, 4)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), logical_ranks=4)
optimizer = drivetrain.optim.AdamW(model.parameters(), lr=0.01)
sampler = ResumableSampler(data, logical_ranks=4, part=6)
loader = torch.utils.data.DataLoader(data, 3, sampler=sampler, generator=torch.Generator())
with drivetrain.accumulate(model, optimizer, 2, max_grad_norm=0.5) as window:
    for epoch in range(9):
        for inputs, in loader:
            window.backward((model(inputs) - inputs[:, :4]).square().mean() * {factor})
"""


def test_other_numbers_of_ranks(tried: Callable[..., Tried], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    options = ("--ranks", "1,2,4", "--steps", "6")
    resized = RESIZED.replace(
        "Sequential(*layers)", "Sequential(collections.OrderedDict(module_list=torch.nn.Sequential(*layers)))"
    )
    for scale, factor, place in (
        ("1", "1", ""),
        ("(1 + dist.get_rank())", "1", "output of Scale 'module_list.3' in forward pass 3"),
        ("1", "(1 + dist.get_rank())", "gradient of 'module_list.4.bias' (6 of 6 differ)"),
    ):
        status, said = tried(resized.replace("{factor}", factor).replace("{scale}", scale), *options)
        assert status == bool(place), said
        if place:
            assert f"On 4 ranks the run parts from the one on 1 at step 1, {place}." in said
        else:
            assert "Gradients and parameters are the same on 1, 2, 4 ranks." in said
    monkeypatch.setenv("RANK", "0")
    assert "leave torchrun out" in tried(RESIZED, *options).said
