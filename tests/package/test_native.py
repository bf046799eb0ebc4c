"""Builds and runs the torch-free native tests under the address, undefined-behavior and thread sanitizers.

Under the thread sanitizer, only the tests that start threads or processes run. `make test-native` runs these tests, and
`make sanitize` runs all under each sanitizer.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from effort import IS_WHOLE

BUILD_TIMEOUT_S = 900


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_native_tests_are_clean(sanitizer: str, repository: Path, tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert cmake, "no cmake: the Makefile installs it into the environment"
    part = "threads" if sanitizer == "thread" and not IS_WHOLE else "all"
    options = [f"-DDRIVETRAIN_SANITIZE={sanitizer}", f"-DDRIVETRAIN_PART={part}"]
    commands = [
        [cmake, "-S", repository / "tests/native", "-B", tmp_path, *options],
        [cmake, "--build", tmp_path, "--parallel", "2"],
        [tmp_path / "native_tests"],
    ]
    for command in commands:
        run = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        assert run.returncode == 0, run.stdout + run.stderr
    assert "native tests passed" in run.stdout
