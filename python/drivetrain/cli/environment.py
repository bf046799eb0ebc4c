"""Implements `drivetrain env`: prints the versions and settings that a bug report needs."""

from __future__ import annotations

import argparse
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch.utils.collect_env import get_pretty_env_info

import drivetrain
from drivetrain import _C, _build_info
from drivetrain.cli.machine import check_shared_memory

_PACKAGES = ("accelerate", "transformers", "bitsandbytes", "pytest")  # torch's own report lacks them
_VARIABLES = ("DRIVETRAIN_", "OMP_", "NCCL_", "GLOO_", "TORCH_", "CUDA_", "MALLOC_")


def run(_: argparse.Namespace) -> int:
    """Prints drivetrain's versions and settings, and torch's report of the system. Returns 0."""
    facts = {
        "drivetrain": f"{drivetrain.__version__}, built for torch {_build_info.TORCH_VERSION}",
        "build": f"{_build_info.COMPILER}; CUDA kernels: {_build_info.CUDA}; NCCL: {_build_info.NCCL}",
        "processor": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, "
        f"instruction sets: {', '.join(_C.available_isas())}",
        "shared memory": check_shared_memory(Path("/dev/shm")).text,
    }
    facts |= {name: found for name in _PACKAGES if (found := _version(name))}
    facts |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    width = max(map(len, facts))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))
    print(f"\n{get_pretty_env_info()}")
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
