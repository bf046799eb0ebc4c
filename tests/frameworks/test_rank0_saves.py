"""Tests that stock scripts that save on rank 0 alone are killed and resumed under shard= with the same losses."""

import importlib.util
import signal
import subprocess
from pathlib import Path

import pytest

from effort import IS_WHOLE
from warm_python import installed_frameworks, warm_environ, warm_python

SCRIPT = Path(__file__).parent / "rank0_saves.py"
TIMEOUT_S = 150
STEPS, DEATH = 10, 7  # saved every third step
PACKAGES = {"nanogpt": [], "mingpt": [], "accelerate": ["accelerate"], "huggingface": ["transformers"]}
CASES = [("nanogpt", "optimizer"), ("mingpt", "gradients"), ("accelerate", "gradients"), ("huggingface", "optimizer")]
ALL = [(loop, shard) for loop in PACKAGES for shard in ("optimizer", "gradients")]


def run(loop: str, shard: str | None, folder: Path, *death: str) -> int:
    folder.mkdir(exist_ok=True)
    packages = installed_frameworks()
    options = [] if shard is None else ["--ddp", f"shard={shard}"]
    command = [
        *(warm_python(*packages), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "drivetrain", "run", "--optim", *options, str(SCRIPT), loop, str(folder), str(STEPS), *death),
    ]
    environ = {**warm_environ(*packages), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "output.txt").open("ab") as output:
        return subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=TIMEOUT_S, check=False
        ).returncode


def losses_of(folder: Path, rank: int) -> dict[int, float]:
    lines = (folder / f"losses-{rank}").read_text().splitlines() if (folder / f"losses-{rank}").exists() else []
    return {int(step): float(loss) for step, loss in (line.split() for line in lines)}


@pytest.mark.parametrize(("loop", "shard"), ALL if IS_WHOLE else CASES)
def test_the_losses_are_those_of_the_run_that_was_not_killed(loop: str, shard: str, tmp_path: Path) -> None:
    missing = [name for name in PACKAGES[loop] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install 'drivetrain[frameworks]'")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    output = f"{killed}/output.txt"
    assert run(loop, shard, whole) == 0, (whole / "output.txt").read_text()
    assert run(loop, shard, killed, str(DEATH)) != 0
    assert f"{-signal.SIGKILL}" in Path(output).read_text()
    assert run(loop, shard, killed) == 0, Path(output).read_text()
    for rank in (0, 1):
        expected = losses_of(whole, rank)
        assert len(expected) == STEPS or rank  # the Trainer logs on rank 0 alone
        found = losses_of(killed, rank)
        assert found == pytest.approx(expected, rel=0, abs=0)
