"""Tests plans and the monitor on scripts as strangers write them: peaks, losses and files."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from test_shadow import contents
from torch import nn

from warm_python import installed_frameworks, warm_python

SCRIPTS = Path(__file__).parent / "scripts"
# By script: the iteration that the plan takes, what it needs besides torch, and what it finds of an earlier run.
CASES: dict[str, tuple[str, str, bool]] = {
    "accelerate_nlp": ("2 batches, 1 step of AdamW", "accelerate", False),
    "checkpointer": ("1 batch, 1 step of AdamW", "", False),
    "ddp_rank": ("1 batch, 1 step of AdamW", "", False),
    "dqn": ("1 step of AdamW", "", False),
    "gpt_resume": ("1 step of AdamW", "", True),
    "hf_trainer": ("1 batch, 1 step of AdamW", "transformers", False),
    "lbfgs": ("1 step of LBFGS", "", False),
    "lit_autoencoder": ("1 batch, 1 step of Adam", "lightning", False),
    "lora_safetensors": ("1 step of AdamW", "", False),
    "prefetched": ("1 batch, 1 step of Adagrad", "", False),
    "stateful_loader": ("1 batch, 1 step of RAdam", "torchdata", True),
    "tensorboard_resnet": ("1 batch, 1 step of SGD", "", False),
    "translation_amp": ("1 batch, 1 step of Adam", "", False),
    "wandb_offline": ("1 batch, 1 step of NAdam", "wandb", False),
    "wgan": ("5 batches, 5 steps of RMSprop, 1 step of RMSprop", "", False),
}
WITHIN = 0.05  # of the measured peak


def ran(folder: Path, *arguments: str) -> str:
    """Runs Python in a folder, and returns what it has printed, without times."""
    done = subprocess.run(
        [warm_python(*installed_frameworks()), *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return "\n".join(line for line in done.stdout.splitlines() if "_runtime" not in line)


def filled(folder: Path, name: str) -> Path:
    """Makes a folder with a script and the data of all scripts."""
    folder.mkdir()
    shutil.copy(SCRIPTS / f"{name}.py", folder)
    for split in ("train", "val"):
        np.random.default_rng(0).integers(0, 128, 2000, dtype=np.uint16).tofile(folder / f"{split}.bin")
    (folder / "input.txt").write_text("the quick brown fox jumps over the lazy dog, and the other way round.\n" * 20)
    torch.manual_seed(1)
    layers = (nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16))
    from safetensors.torch import save_file

    save_file(nn.Sequential(*layers).state_dict(), folder / "base.safetensors")
    return folder


@pytest.mark.parametrize("name", list(CASES))
def test_a_strangers_script_is_planned_and_monitored(name: str, tmp_path: Path) -> None:
    period, needs, resumes = CASES[name]
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    script, plain = f"{name}.py", filled(tmp_path / "plain", name)
    if resumes:
        ran(plain, script)
    shutil.copytree(plain, tmp_path / "monitored")
    printed = ran(plain, str(Path(__file__).parent / "allocated.py"), str(tmp_path / "peak"), script)
    assert "loss" in printed.lower() or printed.count("\n") > 2

    assert ran(tmp_path / "monitored", "-m", "drivetrain", "run", "--with-monitor", script) == printed
    assert {path.name for path in (tmp_path / "monitored").iterdir()} == {path.name for path in plain.iterdir()}

    planned = plain  # with all that the script has written
    if resumes:
        planned = filled(tmp_path / "planned", name)
        ran(planned, script)
    before = contents(planned)
    ran(planned, "-m", "drivetrain", "plan", "--gpu", "cpu", "--json", str(tmp_path / "plan.json"), script)
    assert contents(planned) == before
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["period"] == period
    measured = int((tmp_path / "peak").read_text())
    print(f"{name}: planned {figures['peak_bytes'] / 2**20:.3f} MiB, measured {measured / 2**20:.3f} MiB")
    assert abs(figures["peak_bytes"] / measured - 1) <= WITHIN
