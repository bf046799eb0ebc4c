"""Implements `drivetrain env`: prints the versions and settings that a bug report needs."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import drivetrain
from drivetrain import _C, _build_info

_PACKAGES = ("numpy", "accelerate", "lightning", "transformers", "torchao", "bitsandbytes", "pytest")
_VARIABLES = ("DRIVETRAIN_", "OMP_", "NCCL_", "GLOO_", "TORCH_", "CUDA_", "MALLOC_")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `env`."""
    parser.epilog = "Paste the output into a bug report. `drivetrain doctor` checks what this command only lists."
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Prints the versions and settings and returns 0."""
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        width = max(map(len, facts))
        print("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))
    return 0


def collect() -> dict[str, str]:
    """Collects the versions and settings by name, in printing order."""
    facts = {
        "drivetrain": f"{drivetrain.__version__}, built for torch {_build_info.TORCH_VERSION}",
        "build": f"{_build_info.COMPILER}; CUDA kernels: {_build_info.CUDA}; NCCL: {_build_info.NCCL}",
        "torch": f"{torch.__version__}; CUDA: {torch.version.cuda or 'none'}",
        "gpus": _gpus(),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, "
        f"instruction sets: {', '.join(_C.available_isas())}",
        "shared memory": _shared_memory(),
    }
    facts |= {name: found for name in _PACKAGES if (found := _version(name))}
    facts |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    return facts


def _gpus() -> str:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "none that torch can use"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _processor() -> str:
    names = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return next(names, "model name: unknown").partition(":")[2].strip()


def _shared_memory() -> str:
    try:
        space = os.statvfs("/dev/shm")
    except OSError as error:
        return f"/dev/shm cannot be read: {error.strerror}"
    return f"{space.f_bavail * space.f_frsize / 2**20:.0f} MiB free in /dev/shm"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
