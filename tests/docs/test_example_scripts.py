"""Tests that each example is one short file that a reader can copy, and that it trains."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from warm_python import warm_environ, warm_python

EXAMPLES = Path(__file__).parents[2] / "examples"
# What each example prints besides its losses.
PRINTED = {
    "swap": r"held-out accuracy 0\.[89]",
    "accumulate": "step 30",
    "monitor": r"waiting for data",
    "shard": r"keeps 1\.80 MiB of states, of 3\.59 MiB",
    "activation_budget": r"activations: ",
    "checkpointer": "epoch 3",
}


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_example_trains(name: str, tmp_path: Path) -> None:
    """The first command of the docstring runs a copy of the file alone."""
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 120
    command = re.search(rf"^(torchrun|python)(.*?)examples/{name}\.py", ast.get_docstring(ast.parse(text)) or "", re.M)
    assert command
    launcher = ["-m", "torch.distributed.run", "--standalone", *command[2].split()] if command[1] == "torchrun" else []
    (tmp_path / "copy.py").write_text(text)
    done = subprocess.run(
        [warm_python(), *launcher, "copy.py"],
        **{"cwd": tmp_path, "env": warm_environ(), "capture_output": True, "text": True, "timeout": 240},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert losses[-1] < 0.8 * losses[0], done.stdout
    assert re.search(PRINTED[name], done.stdout + done.stderr), done.stdout + done.stderr
