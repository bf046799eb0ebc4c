"""Lists the jobs of each part of the check and reads their results.

A new measurement is one job here, or one row in benchmarks/suite/gpu.py.
"""

import collections
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .gates import judged
from .jobs import Details, Job

Command = list[str | Path]
PARTS = ("build", "gates", "train", "ranks", "steps", "bench", "sanitize", "devices", "tests", "long")
DEFAULT_PARTS = PARTS[:-1]  # the last part does not fit into ten minutes
LONG = ("large", "repeats")  # measurements of the part "long"
# Maps each measurement of benchmarks/suite/gpu.py to its description and the seconds reserved for it.
MEASUREMENTS = {
    "copy": ("copy bandwidth", 8),
    "optim": ("every optimizer layout against torch's fused and foreach steps: ms, GB/s, share of a copy", 40),
    "tail": ("unscaling, clipping, AdamW and zeroing against torch's four calls", 12),
    "rivals": ("the compressed AdamW of 1.3 B parameters against FlashAdamW of the package flashoptim", 30),
    "ddp": ("a step under DDP against torch's DDP", 15),
    "comm": ("all-reduce against the process group's: time and busbw", 10),
    "accumulate": ("accumulation in float32 and 24 bits, with weight gradients fused and not, against torch's", 15),
    "activations": ("an activation budget against torch's checkpointing, of every block and of every 2nd", 20),
    "compiled": ("an activation budget on compiled blocks against torch's own memory budget at equal peaks", 40),
    "host": ("host time of a step, and a step under DDP of a model that is bound by the host", 20),
    "large": ("an 8 B model trained with all its parameters on one card of 80 GB: tokens/s and peak memory", 60),
    "repeats": ("10 runs of each kind of step, whose bits must agree; other bits would suggest a race", 60),
    "end to end": ("GPT-2 124M, eager and compiled: stock, installed, own form; tokens/s, MFU, peak memory", 50),
}
GPT_STEPS = ("--steps=5", "--sample-bytes=0")
# Maps each check of gpu_check/checks, by part, to its description and the seconds reserved for it.
CHECKS = {
    "ranks": {
        "two-ranks": ("2 ranks against torch's DDP; on one GPU, through sockets", 20),
        "four-ranks": ("4 ranks against torch's DDP; on fewer GPUs, through sockets", 20),
        "side-stream": (
            "DDP built on a side stream, weight gradients fused and not, main gradients, late products",
            20,
        ),
    },
    "steps": {
        "waits": ("number of times that the host waits in a step, against torch", 15),
        "bits": ("one step of every rule in every storage format against the CPU's bits", 15),
    },
    "devices": {
        "second-device": ("steps on a device that is not the current one", 8),
        "huge": ("AdamW on a tensor of more than 2^31 elements", 12),
    },
}


@dataclass(frozen=True)
class Setting:
    """Holds the folders and options of a run of the check."""

    repository: Path
    folder: Path  # output of builds and jobs, ignored by git
    wheels: Path
    capability: str  # compute capability of the GPU, such as "9.0"; empty without a GPU
    num_cores: int
    is_dry: bool
    pytest_arguments: list[str]

    @property
    def site(self) -> Path:
        return self.folder / "site"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the jobs. The build precedes other packages and the tests' modules on the path."""
        site = [] if self.is_dry else [self.site]
        paths = [*site, self.repository / "tests", self.repository / "benchmarks"]
        return {
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PATH": os.pathsep.join([str(self.site / "bin"), os.environ["PATH"]]),
            "CMAKE_BUILD_PARALLEL_LEVEL": str(self.num_cores),
            "OMP_WAIT_POLICY": "passive",
            "PYTHONUNBUFFERED": "1",
        }


def jobs(setting: Setting) -> list[Job]:
    """Returns the jobs of all parts, in order."""
    return [
        *_build(setting),
        *_gates(setting),
        *_train(setting),
        *_checks(setting, "ranks"),
        *_checks(setting, "steps"),
        *_bench(setting, "bench"),
        *_sanitize(setting),
        *_checks(setting, "devices"),
        *_tests(setting),
        *_bench(setting, "long"),
    ]


# ---- Build.


def _build(setting: Setting) -> list[Job]:
    python: Command = [sys.executable, "-m"]
    tools = [*python, "gpu_check.tools", "--wheels", setting.wheels, "--site", setting.site]
    dry = ["--dry-run"] if setting.is_dry else []
    what = "reports missing programs, and installs missing tools from wheels"
    found = [Job("build", "tools", what, [*tools, *dry], 10, _note_missing, setting.environment)]
    if setting.is_dry:
        return found
    architecture = f"{setting.capability.replace('.', '')}-real"
    command = [*python, "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--upgrade"]
    command += [
        "--target",
        setting.site,
        f"--config-settings=build-dir={setting.folder / 'cmake'}",
        "--config-settings=cmake.define.DRIVETRAIN_CUDA=on",
    ]
    command += [f"--config-settings=cmake.define.DRIVETRAIN_CUDA_ARCHITECTURES={architecture}", setting.repository]
    what = f"the package, for the installed torch and this GPU ({architecture})"
    return [*found, Job("build", "package", what, command, 150, environment=setting.environment)]


def _note_missing(code: int | None, output: str) -> Details:
    missing = [line.removeprefix("missing here: ") for line in output.splitlines() if "missing here: " in line]
    return {"note": "missing: " + "; ".join(missing)} if missing else {}


# ---- Gates: checks that run before the measurements.


def _gates(setting: Setting) -> list[Job]:
    """Returns the jobs that check the environment and the limits on the machine code."""
    what = "drivetrain doctor: drivers and libraries"
    ask: Command = [sys.executable, "-m", "drivetrain", "doctor"]
    doctor = Job("gates", "doctor", what, ask, 10, environment=setting.environment)
    command: Command = [sys.executable, setting.repository / "tests/kernel_gates.py"]
    command += ["--help"] if setting.is_dry else []
    what = "the machine code of specialized kernels for sm_90 against its limits (make check-kernels)"

    def read(code: int | None, output: str) -> Details:
        return _read_gates(code, output, setting)

    return [doctor, Job("gates", "kernels", what, command, 15, read, setting.environment)]


def _read_gates(code: int | None, output: str, setting: Setting) -> Details:
    """Reads the result of kernel_gates.py. Exit status 2 means that no disassembler or no code for sm_90 exists."""
    if not (setting.repository / "tests/kernel_gates.py").exists():
        return {"status": "not possible here", "note": "this checkout has no tests/kernel_gates.py"}
    lines = output.strip().splitlines()
    if code == 2 and not setting.is_dry:
        return {"status": "not possible here", "note": lines[-1] if lines else ""}
    failed = [line for line in lines if line.startswith("FAILED ")]
    return {"note": f"{len(failed)} limits exceeded" if failed else "a dry run" if setting.is_dry else lines[-1]}


def _train(setting: Setting) -> list[Job]:
    """Returns jobs that train the example. On a GPU its process group has NCCL as the only backend."""
    transports = ("torch", "shm") if setting.is_dry else ("torch", "nccl")
    found = []
    for transport in transports:
        file = setting.folder / f"train-{transport}.json"
        command: Command = [sys.executable, setting.repository / "examples/gpt/train.py", *GPT_STEPS, f"--json={file}"]
        command += ["--preset=tiny", "--device=cpu"] if setting.is_dry else ["--preset=small", "--device=cuda"]
        environment = {**setting.environment, "DRIVETRAIN_TRANSPORT": transport}
        what = f"5 steps of examples/gpt, process group {'gloo' if setting.is_dry else 'nccl'}, transport {transport}"
        found.append(Job("train", f"transport {transport}", what, command, 15, _read_training(file), environment, file))
    return found


def _read_training(file: Path) -> Callable[[int | None, str], Details]:
    def read(code: int | None, output: str) -> Details:
        if code != 0:
            return {}
        losses = json.loads(file.read_text())["losses"]
        is_fine = len(losses) >= 5 and all(math.isfinite(loss) for loss in losses)
        note = f"losses {', '.join(f'{loss:.3f}' for loss in losses[:5])}"
        return {"note": note} if is_fine else {"status": "failed", "note": note or "no losses"}

    return read


def _checks(setting: Setting, part: str) -> list[Job]:
    found = []
    for name, (what, least_s) in CHECKS[part].items():
        file = setting.folder / f"check-{name}.json"
        command: Command = [sys.executable, "-m", "gpu_check.checks", name, "--json", file]
        command += ["--dry-run"] if setting.is_dry else []
        # NCCL treats ranks that share a GPU as separate hosts, and then needs a network interface.
        environment = {"NCCL_SOCKET_IFNAME": "lo", **setting.environment} if part == "ranks" else setting.environment
        found.append(Job(part, name, what, command, least_s, _findings_of(file), environment, file))
    return found


def _findings_of(file: Path) -> Callable[[int | None, str], Details]:
    def read(code: int | None, output: str) -> Details:
        findings = json.loads(file.read_text()) if file.exists() else []
        details: Details = {"findings": findings}
        wrong = sum(each["holds"] is False for each in findings)
        untried = sum(each["holds"] is None for each in findings)
        details["note"] = f"{sum(each['holds'] is True for each in findings)} hold, {wrong} fail"
        if untried:
            details["note"] += f", {untried} not possible here"
        if code == 0 and not findings:
            details |= {"status": "failed", "note": "the check wrote no findings"}
        elif code == 0 and untried == len(findings):
            details |= {"status": "not possible here", "note": findings[0]["seen"]}
        return details

    return read


# ---- Tests.


def _tests(setting: Setting) -> list[Job]:
    outcomes = setting.folder / "outcomes.jsonl"
    processes = 1 if setting.is_dry else min(8, setting.num_cores)
    command: Command = [sys.executable, "-m", "gpu_check.run_tests", f"--processes={processes}", "--"]
    command += ["-m", "gpu", "-c", f"{setting.repository}/pyproject.toml"]
    command += [f"--rootdir={setting.repository}", "--continue-on-collection-errors", "--tb=short"]
    command += ["-o", "faulthandler_timeout=60", "-o", f"cache_dir={setting.folder / 'pytest_cache'}"]
    command += setting.pytest_arguments or gpu_test_files(setting.repository)
    # Other pytest plugins that are installed on the machine must not load.
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "GPU_CHECK_OUTCOMES": str(outcomes), **setting.environment}

    def read(code: int | None, output: str) -> Details:
        found = _read_outcomes(outcomes, code)
        missing = _note_missing(code, output)
        if code == 127:
            return {"status": "not possible here", **missing}
        return {**found, "note": "; ".join(filter(None, [found["note"], missing.get("note")]))}

    what = "every test marked gpu, including the CPU tests that also run on a GPU"
    return [Job("tests", "pytest", what, command, 30, read, environment, outcomes)]


def gpu_test_files(repository: Path) -> list[Path]:
    """Lists the test files with tests for a GPU, marked directly or through the fixture `device`.

    Other files may need packages that a GPU machine lacks.
    """
    marked = re.compile(r'mark\.gpu\b|usefixtures\("device"\)|[(,] ?device: str\b')
    return [file for file in sorted((repository / "tests").rglob("test_*.py")) if marked.search(file.read_text())]


def _read_outcomes(file: Path, code: int | None) -> Details:
    """Reads counts, failures with the end of their texts, reasons of skips, and tests that had not ended."""
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    begun = dict.fromkeys(line["begins"] for line in lines if "begins" in line)
    tests: dict[str, Details] = {}
    for line in lines:
        if "test" in line:
            earlier = tests.get(line["test"], {})  # a test may fail again, in its teardown or with its process
            failed = {"outcome": "failed", "why": f"{earlier['why']}\n{line['why']}"} if earlier.get("why") else {}
            tests[line["test"]] = {**line, **failed}
    counts = collections.Counter(line["outcome"] for line in tests.values())
    skips = collections.Counter(line["why"] for line in tests.values() if line["outcome"] == "skipped")
    details: Details = {
        "counts": dict(counts),
        "failures": {name: line["why"] for name, line in tests.items() if line["outcome"] == "failed"},
        "xfailed": {name: line["why"] for name, line in tests.items() if line["outcome"] == "failed, as expected"},
        "skips": dict(skips),
        "unfinished": [name for name in begun if name not in tests],
        "slowest": {
            name: line["seconds"] for name, line in sorted(tests.items(), key=lambda item: -item[1]["seconds"])[:8]
        },
    }
    details["note"] = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no test ran"
    if details["unfinished"]:
        details["note"] += f", {len(details['unfinished'])} did not end"
    if code is not None and not counts:
        details["status"] = "failed"
    return details


# ---- compute-sanitizer.


def _sanitize(setting: Setting) -> list[Job]:
    """Returns the compute-sanitizer jobs.

    Graph capture needs the caching allocator, which hides accesses beyond a tensor. Captured steps therefore have
    their own job.
    """
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    every = "every kernel at small odd sizes"
    return [
        _sanitizer(setting, "memcheck", "memcheck", f"{every}, caching allocator off", ["--steps"], uncached),
        _sanitizer(setting, "memcheck of graphs", "memcheck", "steps captured into graphs", ["--captured"], {}),
        _sanitizer(setting, "initcheck", "initcheck", f"{every}: reads of unwritten memory", ["--steps"], uncached),
        _sanitizer(setting, "synccheck", "synccheck", f"{every}: barriers", ["--steps"], {}),
        _sanitizer(setting, "racecheck", "racecheck", f"{every}: hazards in shared memory", ["--steps"], {}),
    ]


def _sanitizer(setting: Setting, name: str, tool: str, what: str, kernels: list[str], more: dict[str, str]) -> Job:
    command = [sys.executable, "-m", "gpu_kernels", *kernels]
    if setting.is_dry:
        command += ["--device", "cpu"]
    else:
        # Only drivetrain's kernels are checked: kernels of torch and cuBLAS take time and cannot be fixed here.
        options = ["--kernel-name", "kns=drivetrain", "--error-exitcode", "9", "--print-limit", "20"]
        options += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command = ["compute-sanitizer", "--tool", tool, *options, *command]
        # Exit status 127 marks a missing tool, which is a property of the machine and no failure.
        command = ["sh", "-c", f"command -v compute-sanitizer > /dev/null || exit 127; exec {shlex.join(command)}"]

    def read(code: int | None, output: str) -> Details:
        return _read_sanitizer(code, output, setting.is_dry)

    return Job("sanitize", name, f"{tool}: {what}", command, 15, read, {**setting.environment, **more})


def _read_sanitizer(code: int | None, output: str, is_dry: bool) -> Details:
    summaries = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", output, re.M)
    if is_dry or code is None:
        return {"note": "the script ran on the CPU without the tool" if is_dry else "; ".join(summaries)}
    if code == 127:
        return {"status": "not possible here", "note": "no compute-sanitizer on PATH"}
    if missing := re.findall(r"ModuleNotFoundError: No module named '([\w.]+)'", output):
        return {"status": "not possible here", "note": f"missing: {missing[0]}"}
    if "imported" in output and "the device answers" not in output:
        refusals = re.findall(r"^=+ (Error: .*|.*not supported.*)$", output, re.M | re.I)
        return {"status": "not possible here", "note": "; ".join(refusals[:3]) or "the device refuses the tool"}
    ran = "all kernels ran" in output
    note = "; ".join(summaries) or "the tool printed no summary"
    return {"status": "passed" if ran and summaries and code == 0 else "failed", "note": note}


# ---- Benchmarks.


def _bench(setting: Setting, part: str) -> list[Job]:
    found = []
    for name, (what, least_s) in MEASUREMENTS.items():
        if (name in LONG) != (part == "long"):
            continue
        file = setting.folder / f"bench-{name.replace(' ', '-')}.json"
        program = setting.repository / "benchmarks" / "run.py"
        command: Command = [sys.executable, program, "gpu", "--only", name, "--json", file]
        command += ["--dry-run"] if setting.is_dry else []
        read = _tables_of(name, file, setting.is_dry)
        found.append(Job(part, name, what, command, least_s, read, setting.environment, file))
    return found


def _tables_of(name: str, file: Path, is_dry: bool) -> Callable[[int | None, str], Details]:
    def read(code: int | None, output: str) -> Details:
        details: Details = {"tables": json.loads(file.read_text())["tables"]} if file.exists() else {}
        if code and "Duplicate GPU detected" in output:
            return details | {"status": "not possible here", "note": "this NCCL rejects two ranks on one GPU"}
        if code != 0:
            details["status"] = "timed out" if code is None else "failed"
        return judged(name, details, is_dry)

    return read
