"""Tests that `drivetrain run` says which workers it does not reach."""

import subprocess
from pathlib import Path

from warm_python import warm_python


def report_of(folder: Path, script: str) -> str:
    (folder / "script.py").write_text(script)
    command = [warm_python(), "-m", "drivetrain", "run", "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_report_names_rays_workers_where_a_script_uses_ray_train(tmp_path: Path) -> None:
    package = tmp_path / "ray" / "train"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    line = "drivetrain run: Ray's workers are processes that drivetrain run does not reach"
    assert line in report_of(tmp_path, "import ray.train\n")
    assert line not in report_of(tmp_path, "import ray\n")
