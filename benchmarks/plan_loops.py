"""Compares planned with measured times of loops: several optimizers, accumulation, ratios, closures and evaluation.

Each loop runs under `drivetrain run --monitor` and under `drivetrain plan --calibrate --compare`, as users run it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

_GATE = 0.15  # of the measured step
_HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads({threads})
def net():
    return nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
data = TensorDataset(torch.randn(64 * 60, 512))
loader, evaluation = DataLoader(data, 64), DataLoader(TensorDataset(torch.randn(256, 512)), 64)
a, b = net(), net()
first, second = torch.optim.AdamW(a.parameters()), torch.optim.SGD(b.parameters(), 1e-3, momentum=0.9)
"""
_LOOPS = {
    "one optimizer": """
for (x,) in loader:
    a(x).square().mean().backward(); first.step(); first.zero_grad()
""",
    "two optimizers": """
for (x,) in loader:
    a(x).square().mean().backward(); first.step(); first.zero_grad()
    b(x).square().mean().backward(); second.step(); second.zero_grad()
""",
    "accumulation over 4": """
for index, (x,) in enumerate(loader):
    a(x).square().mean().backward()
    if index % 4 == 3:
        first.step(); first.zero_grad()
""",
    "GAN of 5 to 1": """
for index, (x,) in enumerate(loader):
    second.zero_grad(); b(a(x).detach()).mean().backward(); second.step()
    if index % 5 == 0:
        first.zero_grad(); b(a(x)).mean().backward(); first.step()
""",
    "closure": """
first = torch.optim.LBFGS(a.parameters(), lr=1e-6, max_iter=3, history_size=3, tolerance_grad=0, tolerance_change=0)
for index, (x,) in enumerate(loader):
    def closure():
        first.zero_grad()
        loss = a(x).square().mean()
        loss.backward()
        return loss
    first.step(closure)
    if index == 40:
        break
""",
    "evaluation every 20 steps": """
for index, (x,) in enumerate(loader):
    a(x).square().mean().backward(); first.step(); first.zero_grad()
    if index % 20 == 19:
        with torch.no_grad():
            print(sum(a(x).square().mean().item() for (x,) in evaluation))
""",
}


def error_of(loop: str, threads: int) -> tuple[str, float]:
    """Returns the planned and the measured time of a loop's step as a text, and the error."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(_HEAD.format(threads=threads) + loop)
        drivetrain = [sys.executable, "-m", "drivetrain"]
        watched = ["run", "--monitor", "--monitor-to", "jsonl:run.jsonl", "train.py"]
        planned = ["plan", "--gpu", "cpu", "--calibrate", "--compare", "run.jsonl", "train.py"]
        subprocess.run([*drivetrain, *watched], cwd=folder, check=True, capture_output=True)
        done = subprocess.run([*drivetrain, *planned], cwd=folder, check=True, capture_output=True, text=True)
    row = re.findall(r"^step +([\d.,]+ ms +[\d.,]+ ms) +([+-][\d.]+)%$", done.stdout, re.MULTILINE)[-1]
    return row[0], float(row[1]) / 100


def main() -> int:
    """Prints a line per loop. Returns 1 if one misses the gate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("loops", nargs="*", help="their names (default: all)")
    args = parser.parse_args()
    is_met = True
    print("loop: planned and measured step, error")
    for name in args.loops or _LOOPS:
        times, error = error_of(_LOOPS[name], args.threads)
        is_met &= abs(error) <= _GATE
        print(f"{name}: {times} {error:+.1%}{'' if abs(error) <= _GATE else ', missed'}", flush=True)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
