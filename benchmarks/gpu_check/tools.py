"""Reports missing programs and installs missing Python packages from wheels, for a machine without a network.

`make gpu-wheels` downloads the wheels on a machine with a network; copy their folder with the checkout.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# The machine provides torch and its NCCL.
BUILD_TOOLS = ("scikit-build-core>=0.10", "pybind11>=3.0", "cmake>=3.25", "ninja>=1.10", "rich>=13")
TEST_TOOLS = ("numpy>=1.26", "pytest>=8", "hypothesis>=6", "pytest-xdist>=3.6", "expecttest>=0.2")
RIVALS = ("flashoptim>=0.1.4",)  # packages for comparison; the machine provides their torch and Triton
TOOLS = (*BUILD_TOOLS, *TEST_TOOLS, *RIVALS)
PYTHON = "3.12"  # the Python version of downloaded wheels
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_BYTES = 64 << 20


def missing_tools() -> list[str]:
    """Returns the requirements that this Python does not meet."""
    return [tool for tool in TOOLS if not _is_met(tool)]


def _is_met(requirement: str) -> bool:
    name, least = requirement.split(">=")
    return _numbers(_version(name)) >= _numbers(least)


def _version(package: str) -> str:
    """Returns the installed version of a package, or an empty string."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def missing_machinery() -> dict[str, str]:
    """Returns the missing prerequisites of a GPU build other than Python packages, each with its cure."""
    missing = {}
    if importlib.util.find_spec("torch") is None:
        missing["torch"] = "GPU_PYTHON=... chooses a Python that has it; it must be 2.11 to 2.14, built for CUDA"
    if not shutil.which("nvcc"):
        missing["nvcc"] = "install CUDA's compiler, 12.8 or newer, or put it on PATH"
    if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))):
        missing["a C++20 compiler"] = "install g++ 11 or newer, or point CXX at yours"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists() and "Python_INCLUDE_DIR" not in os.environ.get("CMAKE_ARGS", ""):
        cure = (
            "install Python's headers (Debian: python3-dev), or CMAKE_ARGS=-DPython_INCLUDE_DIR=... where you have them"
        )
        missing[str(header)] = cure
    return missing


def install(wheels: Path, site: Path) -> None:
    """Installs missing packages into `site`, from the wheels if there are any, otherwise from pip's index.

    Exits if a build tool cannot be installed. Tests run without a missing test tool as far as possible (run_tests.py).
    """
    missing = missing_tools()
    if not missing:
        return
    print(f"installing: {', '.join(missing)}", flush=True)
    source = ["--no-index", "--find-links", str(wheels)] if any(wheels.glob("*.whl")) else []
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), *source]
    rivals = [tool for tool in missing if tool in RIVALS]
    others = [tool for tool in missing if tool not in RIVALS]
    failed = [tool for tool in rivals if subprocess.run([*pip, "--no-deps", tool], check=False).returncode]
    if others and subprocess.run([*pip, *others], check=False).returncode:
        # A package that cannot be installed must not prevent the others.
        failed += [tool for tool in others if subprocess.run([*pip, tool], check=False).returncode]
    if not failed:
        return
    where = f"from {wheels}" if source else "without a network"
    for tool in failed:
        print(f"missing here: {tool}; it cannot be installed {where}: run `make gpu-wheels` and copy {wheels} here")
    if needed := [tool for tool in failed if tool in BUILD_TOOLS]:
        sys.exit(f"nothing can be built without {', '.join(needed)}")


def download(wheels: Path) -> None:
    """Downloads all tools and their dependencies, for Python 3.12 on Linux, into `wheels`."""
    wheels.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(wheels)]
    command += ["--implementation", "cp", "--python-version", PYTHON]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *BUILD_TOOLS, *TEST_TOOLS], check=True)
    subprocess.run([*command, "--no-deps", *RIVALS], check=True)
    size = sum(file.stat().st_size for file in wheels.glob("*.whl"))
    print(f"{len(list(wheels.glob('*.whl')))} wheels for Python {PYTHON} in {wheels}, {size / 2**20:.0f} MiB")
    if size > MOST_BYTES:
        sys.exit(f"{wheels} takes {size / 2**20:.0f} MiB, which exceeds the limit of {MOST_BYTES >> 20} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpu_check.tools", description=__doc__)
    parser.add_argument("--wheels", type=Path, required=True, help="folder of the wheels")
    parser.add_argument("--site", type=Path, help="folder for missing packages; without it, download the wheels")
    parser.add_argument("--dry-run", action="store_true", help="report missing programs and continue")
    args = parser.parse_args()
    if args.site is None:
        return download(args.wheels)
    missing = missing_machinery()
    for what, cure in missing.items():
        print(f"missing here: {what}; {cure}")
    if not _version("nvidia-nccl-cu13"):
        print('nvidia-nccl-cu13 is not installed: transport="nccl" is built only if CUDA\'s folder has nccl.h')
    if missing and not args.dry_run:
        sys.exit(1)
    install(args.wheels, args.site)
    print("everything else is installed")
    return None


if __name__ == "__main__":
    main()
