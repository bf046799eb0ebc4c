"""Implements `drivetrain doctor`: prints one line per part of the installation, machine and process group."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.text import Text
from torch.distributed import HashStore  # type: ignore[attr-defined]

import drivetrain
from drivetrain import _C, _build_info
from drivetrain.cli.collectives import GLOO_CURE
from drivetrain.cli.finding import Finding, fail, not_applicable, passed
from drivetrain.cli.launch import first_line, read_launch, within
from drivetrain.cli.machine import check_machine
from drivetrain.cli.ranks import Meeting

_STYLES = {"PASS": "green", "--": "dim", "WARN": "bold yellow", "FAIL": "bold red"}
_LEAST_CAPABILITY = (8, 0)  # of a GPU, for the kernels
_REBUILD = "build drivetrain again: pip install --no-build-isolation --force-reinstall --no-deps ."


def run(args: argparse.Namespace) -> int:
    """Checks this process and, if it is one of several ranks, all ranks together.

    Returns:
        1 if a check fails (on rank 0: if a check fails on any rank), otherwise 0.
    """
    is_first_of_host = os.environ.get("LOCAL_RANK", "0") == "0"  # one rank tests a host's disk
    findings = [_torch(), _cuda(), _nccl(), _gloo(), *check_machine(args.checkpoint if is_first_of_host else None)]
    launch, launch_findings = read_launch(os.environ, args.timeout)
    findings += launch_findings
    show = partial(_print, as_json=args.json)
    if launch is None:
        show(findings)
    else:
        findings = Meeting(launch, args.timeout).hold(findings, _versions(), show)
    return int(_any_wrong(findings))


def _versions() -> dict[str, str]:
    """Returns the versions that all ranks should have in common."""
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {"drivetrain": drivetrain.__version__, "torch": torch.__version__, "Python": python}
    if torch.version.cuda is not None and dist.is_nccl_available():
        versions["NCCL"] = _dotted(tuple(torch.cuda.nccl.version()[:3]))
    return versions


def _any_wrong(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "FAIL" for finding in findings)


def _print(findings: Sequence[Finding], as_json: bool) -> None:
    if as_json:
        report = {"ok": not _any_wrong(findings), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2), flush=True)
        return
    console = Console(file=sys.stdout, highlight=False)
    for finding in findings:
        line = Text(str(finding))
        line.stylize(_STYLES[finding.status], 0, len(finding.status))
        console.print(line, soft_wrap=True)
    sys.stdout.flush()


def _torch() -> Finding:
    """The import has refused another minor release; CPU and CUDA builds of one release load the same module."""
    minor = ".".join(_build_info.TORCH_VERSION.split(".")[:2])
    return passed("torch", f"{torch.__version__}; drivetrain was built for torch {minor}")


def _cuda() -> Finding:
    gpu = Path("/dev/nvidia0").exists()
    if torch.version.cuda is None:
        hint = "; this machine has an NVIDIA GPU, which a CUDA build of torch would use" if gpu else ""
        return not_applicable("cuda", f"torch is a CPU build{hint}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        return _cuda_kernels()
    if gpu and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        reason = f": {caught[0].message}" if caught else ""
        cure = f"install a driver for CUDA {torch.version.cuda}, or a torch that suits the driver"
        return fail("cuda", f"there is an NVIDIA GPU that torch cannot use{reason}", cure)
    return not_applicable("cuda", f"torch is built for CUDA {torch.version.cuda}; no GPU is visible")


def _cuda_kernels() -> Finding:
    devices = range(torch.cuda.device_count())
    found = f"CUDA {torch.version.cuda}, {len(devices)} x {torch.cuda.get_device_name(0)}"
    capabilities = sorted({torch.cuda.get_device_capability(device) for device in devices})
    if capabilities[0] < _LEAST_CAPABILITY:
        least, number = ("{}.{}".format(*one) for one in (_LEAST_CAPABILITY, capabilities[0]))
        problem = f"{found} of compute capability {number}, but drivetrain's kernels need {least}"
        return fail("cuda", problem, "use torch's optimizers on this GPU")
    if not _C.has_cuda():
        cure = f"put nvcc on PATH and {_REBUILD}"
        return fail("cuda", f"{found}, but drivetrain was built without CUDA", cure)
    if problem := driver_problem(*_C.cuda_versions()):
        cure = (
            f"install a newer driver, or point CUDACXX at an nvcc of CUDA {torch.version.cuda} or older and {_REBUILD}"
        )
        return fail("cuda", f"{found}, but {problem}", cure)
    for capability in capabilities:
        if not covers(_build_info.CUDA, capability):
            number = "{}{}".format(*capability)
            cure = f"{_REBUILD} --config-settings=cmake.define.DRIVETRAIN_CUDA_ARCHITECTURES={number}"
            return fail("cuda", f"{found} (sm_{number}), but the kernels are for {_build_info.CUDA}", cure)
    return passed("cuda", f"{found}, covered by the kernels ({_build_info.CUDA})")


def driver_problem(runtime: int, driver: int) -> str:
    """Explains why a driver cannot serve a CUDA runtime. Within a major version every driver serves every runtime.

    Args:
        runtime: Version of the module's CUDA runtime in CUDA's numbering: 13020 is 13.2.
        driver: Newest CUDA version that the driver supports, in the same numbering.

    Returns:
        The reason, or an empty string if the driver serves the runtime.
    """
    if driver // 1000 >= runtime // 1000:
        return ""
    return f"the driver takes CUDA up to {_cuda_version(driver)}, and drivetrain's runtime is {_cuda_version(runtime)}"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def covers(built: str, capability: tuple[int, int]) -> bool:
    """Checks whether kernels built for some architectures run on a GPU.

    Machine code runs on GPUs of its major version and an equal or later minor version. PTX ("-virtual" or no suffix)
    runs on every equal or later version.

    Args:
        built: Architectures in CMake's spelling, such as "13.0 for 80-real;120".
        capability: Major and minor compute capability of the GPU.

    Returns:
        True if the kernels run on that GPU.
    """
    for digits, kind in re.findall(r"\b(\d{2,3})[af]?(-real|-virtual)?(?=;|$)", built):
        major, minor = divmod(int(digits), 10)
        if kind != "-virtual" and major == capability[0] and minor <= capability[1]:
            return True
        if kind != "-real" and (major, minor) <= capability:
            return True
    return False


def _nccl() -> Finding:
    if torch.version.cuda is None or not dist.is_nccl_available():
        return not_applicable("nccl", "torch is built without NCCL")
    built = tuple(torch.cuda.nccl.version()[:3])
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:
        return passed("nccl", f"{_dotted(built)} is linked into torch")
    loaded = (number.value // 10000, number.value // 100 % 100, number.value % 100)
    if loaded < built:
        cure = "take the folder of the older libnccl.so.2 off LD_LIBRARY_PATH"
        return fail("nccl", f"{_dotted(loaded)} is loaded, but torch was built for {_dotted(built)}", cure)
    return passed("nccl", f"{_dotted(loaded)} is loaded, torch was built for {_dotted(built)}")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _gloo() -> Finding:
    if not dist.is_gloo_available():
        return fail("gloo", "torch is built without gloo", "install torch's official wheel")
    try:
        within(6, lambda: dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=5)))
    except (RuntimeError, TimeoutError) as error:
        return fail("gloo", f"a group of one process cannot be created: {first_line(error)}", GLOO_CURE)
    return passed("gloo", "available, and it finds a network interface")
