"""What a build and an import say when something they need is missing: one sentence, with the cure."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain._torch_version import check_torch

CONFIGURE_TIMEOUT_S = 120


def configure(
    repository: Path, folder: Path, environment: dict[str, str], *options: str
) -> subprocess.CompletedProcess[str]:
    """Runs CMake's configuration as pip would, in `folder`, and returns what it said."""
    cmake = Path(sys.executable).parent / "cmake"
    command = [cmake, "-S", repository, "-B", folder / "build", f"-DPython_EXECUTABLE={sys.executable}", *options]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=CONFIGURE_TIMEOUT_S, check=False
    )


def message(run: subprocess.CompletedProcess[str]) -> str:
    """CMake's error, unfolded into one line."""
    assert run.returncode != 0, run.stdout
    assert run.stderr.count("CMake Error") == 1, run.stderr
    return re.sub(r"\s+", " ", run.stderr)


def fake_torch(folder: Path, code: str) -> dict[str, str]:
    """An environment in which `import torch` runs `code`."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text(code)
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_no_torch(repository: Path, tmp_path: Path) -> None:
    environment = fake_torch(tmp_path, "raise ModuleNotFoundError('torch')")
    said = message(configure(repository, tmp_path, environment))
    assert 'this Python has none: run "pip install torch==2.13.0" and then "pip install --no-build-isolation ."' in said


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0+cu130", "3.0.0"])
def test_a_torch_that_is_not_supported(repository: Path, tmp_path: Path, version: str) -> None:
    code = f"class version: cuda = None\n__version__ = {version!r}"
    said = message(configure(repository, tmp_path, fake_torch(tmp_path, code)))
    assert f'supports torch 2.11 to 2.14 and found {version}: run "pip install torch==2.13.0" and build again.' in said


def test_no_compiler(repository: Path, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC")}
    environment["PATH"] = "/nonexistent"
    # CMake also looks in the system's own directories, unless told that the system lies elsewhere.
    elsewhere = ["-DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=ONLY", f"-DCMAKE_FIND_ROOT_PATH={tmp_path}"]
    said = message(configure(repository, tmp_path, environment, *elsewhere))
    assert "needs a C++20 compiler and found none: install one (g++ 11 or newer) or point CXX at yours." in said


def test_a_torch_of_another_minor_is_refused_at_import() -> None:
    check_torch("2.13.1+cpu", "2.13.0")
    with pytest.raises(ImportError) as caught:
        check_torch("2.14.0", "2.13.0")
    said = str(caught.value)
    assert "was built for torch 2.13 but torch 2.14.0 is installed" in said
    assert "pip install --no-build-isolation --force-reinstall --no-deps" in said
    assert '"pip install torch==2.13.0"' in said


def test_an_import_checks_torch_before_the_native_module(tmp_path: Path) -> None:
    code = "import torch; torch.__version__ = '2.12.0'\nimport drivetrain"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "drivetrain was built for torch" in run.stderr.splitlines()[-1]


def test_importing_starts_nothing() -> None:
    code = """
import threading, logging, torch
import torch.distributed
before = threading.active_count(), len(logging.root.handlers)
import os
threads = len(os.listdir("/proc/self/task"))
import drivetrain
assert (threading.active_count(), len(logging.root.handlers)) == before
assert len(os.listdir("/proc/self/task")) == threads
assert not torch.cuda.is_initialized()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
