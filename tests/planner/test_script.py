"""Tests plans of unedited scripts on the command line."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from drivetrain.cli import main
from warm_python import warm_python

SCRIPT = """
import argparse, os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--steps", type=int, default=1000)
arguments = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
model = nn.Sequential(nn.Linear(256, arguments.width), nn.GELU(), nn.Linear(arguments.width, 16)).to(device)
model = DistributedDataParallel(model)
data = TensorDataset(torch.randn(2000, 256), torch.randint(16, (2000,)))
loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2)
optimizer = torch.optim.AdamW(model.parameters())
for step, (x, y) in enumerate(loader):
    if step == arguments.steps:
        break
    x, y = x.to(device, non_blocking=True), y.to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(loss.item())
"""
STEP_OF_TWO = "    if step % 2 == 1:\n        optimizer.step()\n        optimizer.zero_grad()\n"
NUM_PARAMETERS = 256 * 512 + 512 + 512 * 16 + 16


@pytest.fixture(scope="module")
def measured_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder for caches, whose calibration has figures of this machine; to measure them takes seconds."""
    folder = tmp_path_factory.mktemp("cache")
    code = "from drivetrain.planner import calibrate as c; c._write(c.cache_path(), {'figures': {}})"
    done = ran(folder, "-c", code, XDG_CACHE_HOME=str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def planned(folder: Path, *arguments: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    return ran(folder, "-m", "drivetrain", "plan", "--json", "plan.json", *arguments)


def ran(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command, environment = [warm_python(), *arguments], os.environ | {"OMP_NUM_THREADS": "1"} | environ
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_plans_an_unedited_script_for_gpus(tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text("[devices.h100]\non_demand = 2.0\n")
    options = ["--gpu", "h100", "--gpus", "2x8", "--questions", "--steps", "1000", "--price", "prices.toml"]
    options += ["--batch", "100"]  # next to the largest, so that few sizes are planned
    done = planned(tmp_path, *options, "train.py", script=SCRIPT.replace("2000", "400"))
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["parameters"] == NUM_PARAMETERS
    assert figures["world_size"] == 16
    assert figures["at_peak"]["parameters"] == 4 * NUM_PARAMETERS
    assert figures["at_peak"]["optimizer states"] >= 8 * NUM_PARAMETERS
    assert figures["at_peak"].get("activations", 0) < 400 * 256 * 4  # the data set stays on the host
    assert figures["communication_s"] > 0
    largest = "largest micro-batch: 200 or more: half of the data set"
    for text in ("16 ranks of NVIDIA H100", 'shard="optimizer"', "rtx4090", "on_demand", largest):
        assert text in done.stdout
    assert done.stdout.count("\n1.0\n") <= 2  # two steps ran, and their loss has no value


def test_batch_and_arguments_reach_the_script(tmp_path: Path) -> None:
    done = planned(tmp_path, "--gpu", "cpu", "--batch", "8", "train.py", "--width", "16")
    assert done.returncode == 0, done.stderr
    small = json.loads((tmp_path / "plan.json").read_text())
    assert small["parameters"] == 256 * 16 + 16 + 16 * 16 + 16
    done = planned(tmp_path, "--gpu", "cpu", "--batch", "200", "train.py", "--width", "16")
    assert done.returncode == 0, done.stderr
    large = json.loads((tmp_path / "plan.json").read_text())
    assert large["peak_bytes"] > small["peak_bytes"] + 192 * 16 * 4
    assert small["samples_per_s"] == pytest.approx(8 / small["step_s"])
    assert large["epoch_s"] == pytest.approx(2000 / 200 * large["step_s"])  # of the data set's samples
    assert "epoch of 2,000 samples" in done.stdout


def test_micro_batches_of_the_script_count(tmp_path: Path) -> None:
    script = SCRIPT.replace("    optimizer.zero_grad()\n", "").replace("    optimizer.step()\n", STEP_OF_TWO)
    done = planned(tmp_path, "--gpu", "cpu", "train.py", script=script)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["samples_per_s"] == pytest.approx(2 * 64 / figures["step_s"])


TOY = """
import argparse
import torch
from torch import nn

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    width = parser.parse_args().width
    model = nn.Linear(4, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        loss = model(torch.randn(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {}

if __name__ == "__main__":
    main()
"""


def test_a_batch_without_a_loader_is_noted(tmp_path: Path) -> None:
    done = planned(tmp_path, "--gpu", "cpu", "--batch", "64", "train.py", script=TOY.format("pass"))
    assert done.returncode == 0, done.stderr
    assert "--batch 64 changes nothing: the script has made no DataLoader" in done.stdout
    assert "samples per second" not in done.stdout
    assert done.stdout.startswith("40 parameters on 1 rank of CPU: fits")


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("open('missing.txt')", "FileNotFoundError", "train.py raised FileNotFoundError after 1 optimizer steps"),
        ("raise SystemExit(3)", "", "train.py exited with 3 after 1 optimizer steps"),
        ("model.weight[model.weight > 0]", "", "train.py:17 in main), whose result has a shape that depends on values"),
        ("def", "SyntaxError", "train.py cannot be compiled"),
    ],
)
def test_a_script_that_fails_is_no_plan(tmp_path: Path, body: str, line: str, message: str) -> None:
    done = planned(tmp_path, "--gpu", "cpu", "train.py", script=TOY.format(body))
    assert done.returncode == 2  # 1 would mean that the step does not fit
    assert line in done.stderr
    assert message in done.stderr.splitlines()[-1]
    assert "drivetrain/plan" not in done.stderr  # tracebacks begin in the script


def test_options_may_follow_the_script(tmp_path: Path) -> None:
    script = SCRIPT.replace("parser.parse_args()", "parser.parse_args()\nassert arguments.steps == 7")
    own = ["--gpu", "a100", "--gpus", "2x8", "--steps", "1000"]
    done = planned(tmp_path, "train.py", "--width", "16", *own, "--", "--steps", "7", script=script)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert (figures["device"], figures["world_size"]) == ("a100", 16)
    assert figures["parameters"] == 256 * 16 + 16 + 16 * 16 + 16
    assert "1,000 steps take" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "abacus", "train.py"], "device is 'abacus', expected one of a100, h100"),
        (["train.py", "--gpus", "0"], "argument --gpus: '0' is not HOSTSxGPUS"),
        (["--price", "prices.toml", "train.py"], "--price needs --steps"),
        (["--budget", "many", "train.py"], "--budget is 'many'"),
        (["--plot", "plan.gif", "train.py"], "expected a name that ends in .svg or .png"),
        (["--plot", "nowhere/plan.svg", "train.py"], "--plot is nowhere/plan.svg, and there is no folder"),
        (["--price", "prices.toml", "--steps", "9", "train.py"], "--price is prices.toml, which is no file"),
        (["--calibrate", "train.py"], "--calibrate measures this machine's CPU, and --gpu is h100"),
        (["--price", "train.py", "--steps", "9", "train.py"], "train.py is not TOML"),
        (["--compare", "run.jsonl", "train.py"], "--compare is run.jsonl, which is no file"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    try:
        code: object = main(["plan", *arguments])
    except SystemExit as error:  # of argparse
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "missing.py"),
        (["train.py", "--", "--steps", "1"], "ended after 1 optimizer steps, and a plan needs 2, of each optimizer"),
    ],
)
def test_a_script_that_is_missing_or_short_is_named(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = planned(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_exit_code_says_that_it_does_not_fit(tmp_path: Path) -> None:
    script = SCRIPT.replace("default=512", "default=60000000")
    done = planned(tmp_path, "--gpu", "l4", "--plot", "plan.svg", "train.py", script=script)
    assert done.returncode == 1, done.stderr
    assert "does not fit" in done.stdout
    assert (tmp_path / "plan.svg").read_text().count("<svg") == 1


def test_values_that_a_script_reads_are_ones(tmp_path: Path) -> None:
    body = "array = torch.empty(300, 300).add(loss.detach()).numpy(); assert array[2, 3] == 1.0 == loss.tolist()"

    done = planned(tmp_path, "--gpu", "cpu", "train.py", script=TOY.format(body))
    assert done.returncode == 0, done.stderr


def test_memory_of_numpy_is_not_torchs(tmp_path: Path) -> None:
    script = TOY.replace("import argparse", "import argparse, numpy as np").format("(data[:3] + loss.detach()).sum()")
    peaks = []
    for size in (4_000, 400_000):
        made = f"data = torch.from_numpy(np.zeros(({size}, 4), np.float32)); torch.as_tensor(data.numpy())"
        lines = script.replace("    model =", f"    {made}\n    model =")
        done = planned(tmp_path, "--gpu", "cpu", "train.py", script=lines)
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads((tmp_path / "plan.json").read_text())["peak_bytes"])
    assert peaks[0] == peaks[1]


SLOW_DATA = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.randn(200)

model = nn.Linear(200, 200)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for index, x in enumerate(DataLoader(Slow(), num_workers=1)):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    open(f"{index}.txt", "w").write(f"{loss.item()}")
"""


def test_calibration_runs_the_script_with_its_own_loaders(
    measured_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(measured_machine))
    done = planned(tmp_path, "--gpu", "cpu", "--calibrate", "train.py", script=SLOW_DATA)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["step_s"] > 0.04  # it waits for the worker
    assert "rest, as measured" in done.stdout
    assert not list(tmp_path.glob("*.txt"))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("assert loss.item() == 1, 'no ones'", "train.py raised AssertionError on real values: no ones"),
        ("import os; loss.item() == 1 or os._exit(7)", "train.py has ended its process with exit code 7"),
    ],
)
def test_calibration_says_why_a_script_is_not_measured(
    measured_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, why: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(measured_machine))
    script = SLOW_DATA.replace("    loss.b", f"    {line}\n    loss.b")
    done = planned(tmp_path, "--gpu", "cpu", "--calibrate", "train.py", script=script)
    assert done.returncode == 0, done.stderr
    assert "leaves out loaders and Python, because no iteration was measured" in done.stdout
    assert why in done.stdout


def test_a_measured_script_is_ended_in_time(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW_DATA.replace("    loss.b", "    time.sleep(900)\n    loss.b"))
    code = "from drivetrain.planner.script import measure_script; measure_script('train.py', period=1, seconds=2.0)"
    done = ran(tmp_path, "-c", code)
    assert "PlanError: train.py has made 0 optimizer steps in 2 s, too few to measure an iteration" in done.stderr


def test_a_measured_script_gets_the_planned_batch_on_the_cpu(tmp_path: Path) -> None:
    """A GPU of this machine must not make the iterations of a plan for the CPU faster."""
    pytest.importorskip("torchdata")
    (tmp_path / "train.py").write_text("""
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

assert not torch.cuda.is_available() and os.environ["CUDA_VISIBLE_DEVICES"] == ""
model = nn.Linear(20, 20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for kind in (DataLoader, StatefulDataLoader):
    for (x,) in kind(TensorDataset(torch.randn(20, 20)), batch_size=2):
        assert x.shape == (5, 20), x.shape
        model(x).square().mean().backward()
        optimizer.step()
""")
    code = "from drivetrain.planner.script import measure_script; print(measure_script('train.py', period=1, batch=5))"
    done = ran(tmp_path, "-c", code, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0
