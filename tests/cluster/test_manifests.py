"""Tests the scripts of examples/cluster that need no cluster: their syntax, and the manifest against its models."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_shell_scripts_have_valid_syntax(script: str) -> None:
    shell = "bash" if script.endswith("sbatch") else "sh"
    done = subprocess.run([shell, "-n", str(FOLDER / script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_torchrun_script_passes_everything_on(tmp_path: Path) -> None:
    """A stand-in for torchrun on PATH shows the arguments that it gets."""
    program = tmp_path / "torchrun"
    program.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    program.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NUM_HOSTS": "4", "RANKS_PER_HOST": "8", "FIRST_HOST": "node0"}
    command = [str(FOLDER / "torchrun.sh"), "--steps", "7"]
    words = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.split()
    options = dict(zip(words[:-3:2], words[1:-3:2], strict=True))
    assert options["--nnodes"] == "4"
    assert options["--nproc-per-node"] == "8"
    assert options["--rdzv-endpoint"] == "node0:29500"
    assert words[-3:] == [str(FOLDER / "classifier.py"), "--steps", "7"]
    del variables["FIRST_HOST"]
    failed = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    assert "FIRST_HOST: names the host" in failed.stderr


def test_image_copies_files_that_exist() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text()
    for source in re.findall(r"^COPY (\S+)", dockerfile, re.MULTILINE):
        assert (FOLDER.parents[1] / source).is_file()


def test_trainjob_is_one_of_kubeflow_trainer() -> None:
    """The models drop what they do not know, so that what comes back must be all that was written."""
    if importlib.util.find_spec("kubeflow_trainer_api") is None:
        pytest.skip("kubeflow_trainer_api is not installed: pip install 'drivetrain[cluster]'")
    yaml: Any = pytest.importorskip("yaml")
    models: Any = importlib.import_module("kubeflow_trainer_api.models")
    manifest = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())
    job = models.TrainerV1alpha1TrainJob.from_dict(manifest)
    assert job.to_dict() == manifest
    wrong = {**manifest["spec"], "trainer": {**manifest["spec"]["trainer"], "numNodes": "two"}}
    with pytest.raises(ValueError, match="numNodes"):
        models.TrainerV1alpha1TrainJob.from_dict({**manifest, "spec": wrong})
    assert (manifest["apiVersion"], manifest["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    # The command that the image's own one repeats.
    assert (
        f"CMD {str(manifest['spec']['trainer']['command']).replace(chr(39), chr(34))}"
        in (FOLDER / "Dockerfile").read_text()
    )


def test_scripts_show_their_help() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "classifier.py"), "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "--checkpoints" in done.stdout
    assert shutil.which("sh")
