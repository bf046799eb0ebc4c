"""Tests the errors of a build and an import that lack a prerequisite: one sentence each, with the cure."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest

from drivetrain import _check_system, _check_torch
from file_module import file_module

CONFIGURE_TIMEOUT_S = 120


def configure(
    repository: Path, folder: Path, environment: dict[str, str], *options: str
) -> subprocess.CompletedProcess[str]:
    """Runs CMake's configuration in `folder`, as pip would, and returns the completed process."""
    cmake = Path(sys.executable).parent / "cmake"
    command = [cmake, "-S", repository, "-B", folder / "build", f"-DPython_EXECUTABLE={sys.executable}", *options]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=CONFIGURE_TIMEOUT_S, check=False
    )


def message(run: subprocess.CompletedProcess[str]) -> str:
    """Returns CMake's error as one line."""
    assert run.returncode != 0, run.stdout
    assert run.stderr.count("CMake Error") == 1, run.stderr
    return re.sub(r"\s+", " ", run.stderr)


def fake_torch(folder: Path, version: str, cuda: str = "None", code: str = "") -> dict[str, str]:
    """Returns an environment with that version of torch, in which `import torch` runs `code`."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text(code)
    (folder / "torch/version.py").write_text(f"__version__, cuda = {version!r}, {cuda}")
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_no_torch(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()  # an empty folder hides the torch of this environment
    (tmp_path / "torch/__init__.py").write_text("")
    said = message(configure(repository, tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)}))
    assert 'this Python has none: run "pip install torch==2.13.0" and then "pip install --no-build-isolation ."' in said


def test_a_torch_that_is_too_old(repository: Path, tmp_path: Path) -> None:
    said = message(configure(repository, tmp_path, fake_torch(tmp_path, "2.10.1")))
    assert 'supports torch 2.11 to 2.14 and found 2.10.1: run "pip install torch==2.13.0" and build again.' in said


def test_a_torch_that_is_newer_than_the_tested_ones(repository: Path, tmp_path: Path) -> None:
    options = ("-DDRIVETRAIN_CUDA=off", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}")
    run = configure(repository, tmp_path, fake_torch(tmp_path, "2.15.0+cu130"), *options)
    said = re.sub(r"\s+", " ", run.stderr)
    assert run.returncode == 0, said
    assert "was tested with torch 2.11 to 2.14 and found 2.15.0+cu130. If the build fails, run" in said


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_another_operating_system(repository: Path, tmp_path: Path, system: str) -> None:
    expected = f"drivetrain runs on Linux, and this is {system}. On Windows, use WSL 2; on macOS, a container."
    with pytest.raises(ImportError, match=re.escape(expected)):
        _check_system(system)
    script = tmp_path / "system.cmake"
    checks = (repository / "CMakeLists.txt").read_text().split("\nproject(")[0]
    script.write_text(f'set(CMAKE_HOST_SYSTEM_NAME "{system}")\n{checks}')
    cmake = Path(sys.executable).parent / "cmake"
    run = subprocess.run([cmake, "-P", script], capture_output=True, text=True, timeout=60, check=False)
    assert expected in message(run)


def test_no_compiler(repository: Path, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC")}
    environment["PATH"] = "/nonexistent"
    # CMake also searches the system's directories, unless its root path points elsewhere.
    elsewhere = ["-DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=ONLY", f"-DCMAKE_FIND_ROOT_PATH={tmp_path}"]
    said = message(configure(repository, tmp_path, environment, *elsewhere))
    assert "needs a C++20 compiler and found none: install one (g++ 11 or newer) or point CXX at yours." in said


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("DRIVETRAIN_CUDA", "OFF", "auto, on, off, emulated"),  # CMake's spelling must be rejected
        ("DRIVETRAIN_CUDA_RUNTIME", "dynamic", "static, shared"),
        ("DRIVETRAIN_GROUP_SOURCES", "", "auto, on, off"),
        ("DRIVETRAIN_KERNELS", "off", "own, shared, or the path of a library"),
    ],
)
def test_an_option_of_the_build_with_a_value_that_it_does_not_have(
    repository: Path, tmp_path: Path, option: str, value: str, expected: str
) -> None:
    said = message(configure(repository, tmp_path, dict(os.environ), f"-D{option}={value}"))
    assert f'{option} is "{value}", expected one of: {expected}.' in said


@pytest.fixture(scope="module")
def with_nvcc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder for several configurations, of which the first examines nvcc for all."""
    return tmp_path_factory.mktemp("with_nvcc")


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc here")
@pytest.mark.parametrize("runtime", ["static", "shared"])
def test_an_nvcc_of_a_newer_cuda_than_torchs(repository: Path, tmp_path: Path, with_nvcc: Path, runtime: str) -> None:
    """A driver for torch's CUDA could not launch the kernels, and a shared runtime would not be found."""
    environment = fake_torch(tmp_path, "2.13.0", "'11.8'")
    options = [
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DDRIVETRAIN_CUDA_RUNTIME={runtime}",
        "-DDRIVETRAIN_CUDA=auto",
    ]
    run = configure(repository, with_nvcc, environment, *options)
    said = re.sub(r"\s+", " ", run.stderr)
    assert "nvcc is of CUDA" in said
    assert "and torch 2.13.0 of CUDA 11.8" in said
    if runtime == "shared":
        assert run.returncode != 0
        assert "Point CUDACXX at an nvcc of CUDA 11, or leave the runtime static." in said
    else:
        assert run.returncode == 0, run.stderr
        assert "CMake Warning" in said
        assert "Point CUDACXX at an nvcc of CUDA 11, or see that the driver is for CUDA" in said


ALL_ARCHITECTURES = "80-real;90-real;100-real;120"


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc here")
@pytest.mark.parametrize(
    ("torch_cuda", "gpus", "option", "architectures"),
    [
        ("None", [], "auto", None),
        ("None", [], "on", ALL_ARCHITECTURES),
        ("'13.0'", [], "off", None),
        ("'13.0'", [], "auto", ALL_ARCHITECTURES),
        ("'13.0'", [(9, 0), (9, 0)], "auto", "90-real"),
        ("'13.0'", [(9, 0), (8, 0)], "auto", "80-real;90-real"),
        ("'13.0'", [(9, 0), (99, 0)], "auto", ALL_ARCHITECTURES),
        ("'13.0'", [(7, 5)], "auto", None),
        ("'13.0'", [(7, 5), (9, 0)], "auto", "90-real"),
    ],
)
def test_kernels_are_built_where_torch_has_cuda_and_for_the_gpus_there(
    repository: Path,
    tmp_path: Path,
    with_nvcc: Path,
    torch_cuda: str,
    gpus: list[tuple[int, int]],
    option: str,
    architectures: str | None,
) -> None:
    code = f"""
class cuda:
    device_count = lambda: {len(gpus)}
    get_device_capability = {gpus}.__getitem__
"""
    options = [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", "-DDRIVETRAIN_CUDA_RUNTIME=static"]
    run = configure(
        repository,
        with_nvcc,
        fake_torch(tmp_path, "2.13.0", torch_cuda, code),
        *options,
        f"-DDRIVETRAIN_CUDA={option}",
    )
    assert run.returncode == 0, run.stderr
    (said,) = re.findall(r"CUDA kernels: (.*), NCCL", run.stdout)
    if architectures is None:
        assert said == "none"
    else:
        assert said.endswith(f" for {architectures}")


@pytest.mark.parametrize(
    ("way", "link_shared"), [("wrapper", True), ("CXXFLAGS", True), ("LDFLAGS", True), ("LDFLAGS", False)]
)
def test_a_compiler_that_links_libstdcxx_statically(
    repository: Path, tmp_path: Path, way: str, link_shared: bool
) -> None:
    """This small module uses the two CMake functions that the package's module uses."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS", "LDFLAGS")}
    if way == "wrapper":
        wrapper = tmp_path / "g++"
        wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" -static-libstdc++\n')
        wrapper.chmod(0o755)
        environment["CXX"] = str(wrapper)
    else:
        environment |= {"CXX": compiler, way: "-static-libstdc++"}
    option = f"-DLINK_SHARED={'ON' if link_shared else 'OFF'}"
    configured = configure(repository / "tests/libstdcxx", tmp_path, environment, option)
    assert configured.returncode == 0, configured.stderr
    command = [Path(sys.executable).parent / "cmake", "--build", tmp_path / "build"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=CONFIGURE_TIMEOUT_S, check=False)
    if link_shared:
        assert run.returncode == 0, run.stdout + run.stderr
        (module,) = (tmp_path / "build").glob("libsmall.so")
        assert ctypes.CDLL(str(module)).length_of(12) == len("12 1.5")
        libstdcxx = file_module(repository / "csrc/base/libstdcxx.py")
        assert libstdcxx.find_problem(module) == ""
    else:
        assert run.returncode != 0
        said = re.sub(r"\s+", " ", run.stdout + run.stderr)
        assert "libsmall.so defines std:: streams and locales of its own" in said
        assert "take -static-libstdc++ out of CXXFLAGS and LDFLAGS" in said


def test_a_module_with_a_hidden_copy_of_libstdcxx(repository: Path, tmp_path: Path) -> None:
    """A stripped and hidden copy shows because the module does not need the shared library."""
    libstdcxx = file_module(repository / "csrc/base/libstdcxx.py")
    source, module = tmp_path / "empty.cpp", tmp_path / "empty.so"
    source.write_text('extern "C" int answer() { return 42; }\n')
    subprocess.run(["c++", "-shared", "-fPIC", "-s", "-Wl,--as-needed", source, "-o", module], check=True)
    assert libstdcxx.find_problem(module) == "does not ask for libstdc++.so.6"
    with pytest.raises(ValueError, match="is not a 64-bit little-endian ELF file"):
        libstdcxx.find_problem(source)


def test_a_compiled_python_file_is_no_source(repository: Path, tmp_path: Path) -> None:
    """Tests compile csrc/base/libstdcxx.py. Two targets of `make` that run in parallel would then both build."""
    (tmp_path / "csrc/__pycache__").mkdir(parents=True)
    for name in ("csrc/a.cpp", "csrc/a.py", "csrc/__pycache__/a.cpython-311.pyc"):
        (tmp_path / name).touch()
    show = ("--no-print-directory", "--eval", "show: ; @echo $(SOURCES)", "show")
    command = ["env", "--unset=VIRTUAL_ENV", "make", "--file", repository / "Makefile", *show]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=CONFIGURE_TIMEOUT_S, check=True)
    assert sorted(run.stdout.split()) == ["CMakeLists.txt", "csrc/a.cpp", "csrc/a.py", "pyproject.toml"]


def test_a_torch_of_another_minor_is_refused_at_import() -> None:
    _check_torch("2.13.1+cpu", "2.13.0")
    with pytest.raises(ImportError) as caught:
        _check_torch("2.14.0", "2.13.0")
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
