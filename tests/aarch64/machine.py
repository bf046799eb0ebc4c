"""Makes an emulated aarch64 machine in a folder: a root of Debian or Ubuntu, its Python, torch, and the package.

Nothing outside the folder changes, and no step needs root. Programs of the machine run under qemu's user emulation. It
translates instructions and passes system calls to this machine's kernel, so its memory order is this processor's.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from pybind11 import get_cmake_dir

REPOSITORY = Path(__file__).parents[2]
COMPILER, EMULATOR, BOOTSTRAP = "aarch64-linux-gnu-g++", "qemu-aarch64-static", "mmdebstrap"
MODEL = "/usr/include/relacy/relacy.hpp"
# A program or file of each package of Debian that is needed.
DEBIAN_PACKAGES = {
    "g++-aarch64-linux-gnu": COMPILER,
    "qemu-user-static": EMULATOR,
    "mmdebstrap": BOOTSTRAP,
    "relacy-dev": MODEL,
}
IN_ROOT = ("python3-dev", "libstdc++6", "zlib1g")
# torch is installed without what it requires, because its CUDA build would bring 2 GB of libraries.
PACKAGES = (
    *("filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec", "numpy", "rich"),
    *("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6", "safetensors>=0.7"),
)
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
# What torch and oneDNN read about a processor that qemu does not describe: an Arm Neoverse N1.
CPUINFO = """processor\t: {number}
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
MIDR = "0x00000000413fd0c1\n"
# Tests start sys.executable, which the kernel must be able to run. This script is.
PYTHON = """#!/bin/sh
: "${{QEMU_CPU:=neoverse-n1}}" && export QEMU_CPU
exec {emulator} -L {root} -0 "$0" {root}/usr/bin/python3 "$@"
"""
# torch's CUDA build loads with empty libraries in place of NVIDIA's if functions are looked up when they are called.
LAZY = "import os, sys; sys.setdlopenflags(os.RTLD_LAZY)\n"


def require_tools() -> None:
    """Ends the program with the line that installs what this machine lacks. In CI as root, installs it."""
    missing = [name for name, of_it in DEBIAN_PACKAGES.items() if not shutil.which(of_it) and not Path(of_it).exists()]
    if not missing:
        return
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.environ.get("CI") and os.geteuid() == 0:
        run(["apt-get", "update"])
        run(install)
    else:
        sys.exit(f'make test-aarch64 needs Debian\'s packages: run "{" ".join(install)}" as root.')


def run(command: list[str | Path], **options: object) -> None:
    """Runs a command, and ends the program with its output if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout[-4000:]}")


class Machine:
    """The emulated machine. `torch` is a requirement of pip."""

    def __init__(self, folder: Path, torch: str) -> None:
        self.folder, self.root, self.torch = folder, folder / "root", torch
        self.python = folder / "env/bin/python"

    def make(self) -> None:
        """Makes what the folder lacks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.root / "usr/bin/python3").exists():
            self._make_root()
        if not (self.site / "torch/version.py").exists():
            self._make_python()
        self._build_all()

    @property
    def site(self) -> Path:
        return self.folder / "env/lib" / self._version / "site-packages"

    @property
    def _version(self) -> str:
        return next(path.name for path in (self.root / "usr/include").glob("python3.*"))

    def _make_root(self) -> None:
        release = platform.freedesktop_os_release()["VERSION_CODENAME"]
        shutil.rmtree(self.root, ignore_errors=True)
        command = [BOOTSTRAP, "--mode=chrootless", "--variant=extract", "--architectures=arm64"]
        run([*command, f"--include={','.join(IN_ROOT)}", release, self.root])
        (self.root / "proc").mkdir(exist_ok=True)
        numbers = range(os.cpu_count() or 1)
        (self.root / "proc/cpuinfo").write_text("".join(CPUINFO.format(number=number) for number in numbers))
        for number in numbers:
            of_cpu = self.root / f"sys/devices/system/cpu/cpu{number}/regs/identification"
            of_cpu.mkdir(parents=True)
            (of_cpu / "midr_el1").write_text(MIDR)

    def _make_python(self) -> None:
        shutil.rmtree(self.folder / "env", ignore_errors=True)
        self.site.mkdir(parents=True)
        self.python.parent.mkdir()
        self.python.write_text(PYTHON.format(emulator=shutil.which(EMULATOR), root=self.root))
        self.python.chmod(0o755)
        (self.folder / "env/pyvenv.cfg").write_text(f"home = {self.root}/usr/bin\n")
        number = self._version.removeprefix("python")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", self.site, "--only-binary", ":all:"]
        pip += ["--implementation", "cp", "--python-version", number, *(f"--platform={name}" for name in PLATFORMS)]
        run([*pip, *PACKAGES])
        run([*pip, "--no-deps", self.torch])
        metadata = next(self.site.glob("torch-*.dist-info/METADATA")).read_text()
        if release := re.search(r"^Requires-Dist: cuda-toolkit\S*==([\d.]+)", metadata, re.MULTILINE):
            run([*pip, f"cuda-toolkit[cudart]=={release[1]}"])
            self._replace_nvidia()

    def _replace_nvidia(self) -> None:
        """Gives torch's CUDA build empty libraries where it needs NVIDIA's, whose functions no test calls."""
        libraries = self.site / "torch/lib"
        have = {path.name for folder in (self.site, self.root) for path in folder.rglob("*.so*")}
        for library in libraries.glob("lib*.so"):
            read = subprocess.run(["readelf", "--dynamic", library], capture_output=True, text=True, check=True)
            for name in set(re.findall(r"\(NEEDED\).*\[(.*)\]", read.stdout)) - have:
                run([COMPILER, "-shared", "-xc++", os.devnull, f"-Wl,-soname,{name}", "-o", libraries / name])
                have.add(name)
        (self.site / "lazy_symbols.pth").write_text(LAZY)

    def _build(self, source: Path, name: str, targets: tuple[str, ...], *options: str) -> Path:
        folder = self.folder / name
        run(["cmake", "-S", source, "-B", folder, "-GNinja", "-DCMAKE_BUILD_TYPE=Release", *options])
        run(["ninja", "-C", folder, *targets])
        return folder

    def _build_all(self) -> None:
        headers, native = self.root / "usr/include", REPOSITORY / "tests/native"
        cross = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}")
        module = self._build(
            REPOSITORY,
            "module",
            ("_C",),
            *cross,
            "-DDRIVETRAIN_CUDA=off",
            f"-DCMAKE_CXX_FLAGS=-idirafter {headers}",
            f"-DPython_EXECUTABLE={self.python}",
            f"-DPython_INCLUDE_DIR={headers / self._version}",
            f"-Dpybind11_DIR={get_cmake_dir()}",
        )
        package = self.site / "drivetrain"
        shutil.rmtree(package, ignore_errors=True)
        ignored = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
        shutil.copytree(REPOSITORY / "python/drivetrain", package, ignore=ignored)
        run(["cmake", "--install", module, "--prefix", self.site])
        facts = self.site / "drivetrain-0.dist-info"
        facts.mkdir(exist_ok=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: drivetrain\nVersion: {version('drivetrain')}\n")
        # The other part emulates CUDA, and switches between its threads by instructions of x86-64.
        self._build(native, "native", ("native_tests", "kernel_bits"), *cross, "-DDRIVETRAIN_PART=threads")
        self._build(native, "native-here", ("memory_order", "kernel_bits"))
