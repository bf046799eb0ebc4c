"""Builds and runs the torch-free native tests under the address, undefined-behavior and thread sanitizers.

It also runs wrong CUDA kernels, which the emulation of CUDA must reject. Under the thread sanitizer, only the tests
that start threads or processes run. `make test-native` runs these tests, and `make sanitize` runs all under each
sanitizer.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from effort import IS_WHOLE
from shared_builds import built_once, files_in

TIMEOUT_S = 900
BUILD_TIMEOUT_S = 2400  # CI compiles at the lowest priority, in time that other tests do not use


# The kernels of tests/native/wrong_kernels.cu, and what rejects them. Only the thread sanitizer finds the first two.
TWO_BLOCKS_OR_NO_BARRIER = {"blocks_write_one_address": "data race", "exchange_orders_memory": "data race"}
DRAWN = {"last_block": "wrong result", "last_thread": "wrong result"}
TOO_MANY = "cudaErrorLaunchOutOfResources"
WRONG_KERNELS = {
    "split_reduction": r"calls __reduce_max_sync at .*, where thread \d+ of the same warp calls __reduce_max_sync at",
    "split_function": "by another path, where thread",
    "returned_lanes": "is reached by 18 of the 32 threads of its warp",
    "split_barrier": "of the same block calls __syncthreads",
    "shared_memory_is_unset": "wrong result",
    "shared_memory_of_template": "wrong result",
    "shared_memory_of_last_block": "wrong result",
    "parameters": TOO_MANY,
    "launch_bounds": TOO_MANY,
    "registers": TOO_MANY,
    "registers_without_bounds": TOO_MANY,
    "grid": "cudaErrorInvalidConfiguration",
}


def built(sanitizer: str) -> Path:
    """Returns the folder with the native tests and the wrong kernels under a sanitizer."""
    repository = Path(__file__).parents[2]
    part = "threads" if sanitizer == "thread" and not IS_WHOLE else "all"
    options = [f"-DDRIVETRAIN_SANITIZE={sanitizer}", f"-DDRIVETRAIN_PART={part}"]
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert cmake, "no cmake: the Makefile installs it into the environment"

    def build(folder: Path) -> None:
        for command in (
            [cmake, "-S", repository / "tests/native", "-B", folder, *options],
            [cmake, "--build", folder, "--parallel", "2", "--target", "native_tests", "wrong_kernels"],
        ):
            run = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
            assert run.returncode == 0, run.stdout + run.stderr

    sources = files_in(repository / "csrc", repository / "tests/native")
    return built_once(f"native-{sanitizer.split(',')[0]}-{part}", [*sources, Path(__file__)], build)


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_native_tests_compile(sanitizer: str) -> None:
    built(sanitizer)


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_native_tests_are_clean(sanitizer: str) -> None:
    run = subprocess.run([built(sanitizer) / "native_tests"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "native tests passed" in run.stdout


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_wrong_kernels_are_rejected(sanitizer: str) -> None:
    program = built(sanitizer) / "wrong_kernels"
    kernels = WRONG_KERNELS | (TWO_BLOCKS_OR_NO_BARRIER if sanitizer == "thread" else DRAWN)
    for name, message in kernels.items():
        run = subprocess.run([program, name], capture_output=True, text=True, timeout=TIMEOUT_S)
        assert run.returncode != 0, f"{name} is accepted"
        assert re.search(message, run.stderr), f"{name}: {run.stderr}"
        run = subprocess.run([program, name, "right"], capture_output=True, text=True, timeout=TIMEOUT_S)
        assert run.returncode == 0, f"the twin of {name}: {run.stderr}"
        assert run.stdout == "accepted\n"
