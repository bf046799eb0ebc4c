"""Compares planned with measured times of loops and of the scripts in tests/planner/scripts, which run for longer here.

Each runs under `drivetrain run --with-monitor` and under `drivetrain plan --calibrate --compare`, as users run it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("planner", "")]
from test_strangers_scripts import CASES, filled  # type: ignore[import-not-found]  # noqa: E402  # found there

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


# By script: what makes its loop long enough to measure.
_LONGER = {
    "accelerate_nlp": {"range(2)": "range(80)"},
    "checkpointer": {"ckpt.epoch, 2": "ckpt.epoch, 250", "every=1": "every=200"},
    "ddp_rank": {"range(2)": "range(200)"},
    "dqn": {"_episode in range(2)": "_episode in range(100)"},
    "gpt_resume": {"= 4, 1, 6, 2, 2": "= 200, 1, 400, 2, 2"},
    "hf_trainer": {
        "max_steps=4": "max_steps=300",
        "save_steps=1": "save_steps=200",
        "eval_steps=4": "eval_steps=200",
        "logging_steps=1": "logging_steps=10",
    },
    "lbfgs": {"range(6)": "range(300)", "lr=0.8": "lr=0.005"},  # so that it does not converge within them
    "lit_autoencoder": {"max_epochs=2": "max_epochs=150"},
    "lora_safetensors": {"range(8)": "range(800)", "step % 2 == 1": "step % 400 == 399"},
    "prefetched": {"return 96": "return 16000"},
    "stateful_loader": {"Words(256)": "Words(16000)"},
    "tensorboard_resnet": {"return 96": "return 2880", "total_steps=13": "total_steps=361"},
    "translation_amp": {"return 32": "return 320"},
    "wandb_offline": {'"epochs": 2': '"epochs": 150'},
    "wgan": {"rand(264": "rand(5280"},
}


def errors_of(name: str, threads: int, rounds: int, cache: str) -> list[tuple[float, str]]:
    """Returns the error, and the planned and the measured time of an iteration as a text, of each round."""
    with tempfile.TemporaryDirectory() as place:
        folders = Path(place, "watched"), Path(place, "planned")
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "WANDB_SILENT": "true", "XDG_CACHE_HOME": cache}

        def run(folder: Path, *arguments: str) -> str:
            done = subprocess.run(
                [sys.executable, *arguments], cwd=folder, env=environment, check=True, capture_output=True, text=True
            )
            return done.stdout

        original = Path(place, "original")
        if name in CASES:
            script = f"{name}.py"
            filled(original, name)
            text = (original / script).read_text()
            for old, new in _LONGER[name].items():
                assert old in text, f"{script} lacks {old!r}"
                text = text.replace(old, new)
        else:
            script = "train.py"
            original.mkdir()
            text = _HEAD.format(threads=threads) + _LOOPS[name]
        (original / script).write_text(text)
        if name in CASES and CASES[name][2]:
            run(original, script)
        for folder in folders:
            folder.mkdir()
        found = []
        for _ in range(rounds):
            for folder in folders:  # each run begins with the same files
                shutil.rmtree(folder)
                shutil.copytree(original, folder)
            run(folders[0], "-m", "drivetrain", "run", "--with-monitor", "--monitor-to", "jsonl:../run.jsonl", script)
            planned = ["-m", "drivetrain", "plan", "--gpu", "cpu", "--calibrate", "--compare", "../run.jsonl", script]
            output = run(folders[1], *planned)
            (Path(place) / "run.jsonl").unlink()
            row = re.findall(r"^step +([\d.,]+ ms +[\d.,]+ ms) +([+-][\d.]+)%$", output, re.MULTILINE)[-1]
            found.append((float(row[1]) / 100, row[0]))
    return found


def main() -> int:
    """Prints a line per loop. Returns 1 if one misses the gate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, of which the median counts (default: 3)")
    parser.add_argument("loops", nargs="*", help="names of loops and scripts (default: all)")
    args = parser.parse_args()
    is_met = True
    print("loop: planned and measured iteration and error of the median round, least and largest error")
    with tempfile.TemporaryDirectory() as cache:  # without what busier hours have measured
        for name in args.loops or [*_LOOPS, *CASES]:
            found = sorted(errors_of(name, args.threads, args.rounds, cache))
            error, times = found[len(found) // 2]
            is_met &= abs(error) <= _GATE
            spread = f"{found[0][0]:+.1%} to {found[-1][0]:+.1%}"
            print(f"{name}: {times} {error:+.1%}, {spread}{'' if abs(error) <= _GATE else ', missed'}", flush=True)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
