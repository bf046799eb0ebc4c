"""Collects facts about the machine for the report: GPU, driver, versions and commit."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

TORCH_FACTS = """
import json, torch
facts = {"torch": torch.__version__, "cuda_of_torch": torch.version.cuda or "none", "gpus": torch.cuda.device_count()}
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    facts |= {"gpu": gpu.name, "gpu_memory_mib": gpu.total_memory >> 20, "capability": f"{gpu.major}.{gpu.minor}"}
    facts |= {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
print(json.dumps(facts))
"""
SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "power.limit")


def answer(*command: str | Path, timeout_s: float = 90) -> str:
    """Returns the output of a command; an empty string if it fails, is missing or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def facts(repository: Path, commit: str) -> dict[str, object]:
    """Collects the facts by name. A separate process queries torch, so that its failure is harmless.

    Args:
        repository: The checkout.
        commit: Commit to report if the checkout has no history.
    """
    found: dict[str, object] = {"host_python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    found |= json.loads(answer(sys.executable, "-c", TORCH_FACTS) or "{}")
    values = answer("nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader").splitlines()
    if values:
        found |= dict(zip(SMI_FIELDS, (value.strip() for value in values[0].split(",")), strict=False))
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    found |= {"cpu": models[0] if models else platform.machine(), "kernel": platform.release()}
    found["nvcc"] = (re.findall(r"V([\d.]+)", answer("nvcc", "--version")) or ["none"])[0]
    found["compute_sanitizer"] = (re.findall(r"[\d.]{4,}", answer("compute-sanitizer", "--version")) or ["none"])[0]
    head = answer("git", "-C", repository, "rev-parse", "HEAD")
    found["commit"] = head or commit or "unknown"
    changes = answer("git", "-C", repository, "status", "--porcelain", "--", ".", ":!benchmarks/results")
    found["dirty"] = bool(changes) if head else None
    return found
