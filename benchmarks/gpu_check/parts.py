"""The parts of the check as a list of jobs, and how to read what each leaves: a new measurement is one job here, or one
row in drivetrain/bench/gpu.py."""

import collections
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .jobs import Details, Job

Command = list[str | Path]
PARTS = ("build", "tests", "sanitize", "bench")
# Names of drivetrain/bench/gpu.py's measurements, with the seconds kept for each.
MEASUREMENTS = {
    "copy": ("copy bandwidth", 10),
    "optim": ("every optimizer layout against torch's fused and foreach steps: ms, GB/s, share of a copy", 40),
    "tail": ("unscaling, clipping, AdamW and zeroing against torch's four calls", 15),
    "ddp": ("a step under DDP against torch's DDP", 20),
    "comm": ("all-reduce against the process group's: time and busbw", 20),
    "accumulate": ("accumulation in float32 and 24 bits, with weight gradients fused and not, against torch's", 15),
    "activations": ("an activation budget against torch's checkpointing, of every block and of every 2nd", 30),
}
GPT_124M = ("--preset=gpt2", "--vocab-size=50304", "--bf16", "--batch-size=16", "--accumulate=1", "--steps=40")
GPT_WHAT = "examples/gpt at 124 M parameters in bf16 against the stock script: tokens/s and peak memory"
GPT_TINY = ("--preset=tiny", "--device=cpu", "--steps=4")


@dataclass(frozen=True)
class Setting:
    """Where the check runs."""

    repository: Path
    folder: Path  # what builds and runs leave, ignored by git
    wheels: Path
    capability: str  # of the GPU, as "9.0"; empty where there is none
    num_cores: int
    is_dry: bool
    pytest_arguments: list[str]

    @property
    def site(self) -> Path:
        return self.folder / "site"

    @property
    def environment(self) -> dict[str, str]:
        """The build first, then the tests' modules; what other programs were installed there is found, too."""
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
    """All of them, in order."""
    return [*_build(setting), *_tests(setting), *_sanitize(setting), *_bench(setting)]


# ---- Build.


def _build(setting: Setting) -> list[Job]:
    python: Command = [sys.executable, "-m"]
    tools = [*python, "gpu_check.tools", "--wheels", setting.wheels, "--site", setting.site]
    dry = ["--dry-run"] if setting.is_dry else []
    what = "says what is missing here, and installs missing tools from wheels"
    found = [Job("build", "tools", what, [*tools, *dry], 20, _note_missing, setting.environment)]
    if setting.is_dry:
        return found
    architecture = f"{setting.capability.replace('.', '')}-real"
    command = [*python, "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--upgrade"]
    command += [
        "--target",
        setting.site,
        f"-Cbuild-dir={setting.folder / 'cmake'}",
        "-Ccmake.define.DRIVETRAIN_CUDA=on",
    ]
    command += [f"-Ccmake.define.DRIVETRAIN_CUDA_ARCHITECTURES={architecture}", setting.repository]
    what = f"the package, against the torch that is here and for this GPU alone ({architecture})"
    return [*found, Job("build", "package", what, command, 60, environment=setting.environment)]


def _note_missing(code: int | None, output: str) -> Details:
    missing = [line.removeprefix("missing here: ") for line in output.splitlines() if "missing here: " in line]
    return {"note": "missing: " + "; ".join(missing)} if missing else {}


# ---- Tests.


def _tests(setting: Setting) -> list[Job]:
    outcomes = setting.folder / "outcomes.jsonl"
    processes = 1 if setting.is_dry else min(8, setting.num_cores)
    command: Command = [sys.executable, "-m", "gpu_check.run_tests", f"--processes={processes}", "--"]
    command += ["-m", "gpu", "-c", f"{setting.repository}/pyproject.toml"]
    command += [f"--rootdir={setting.repository}", "--continue-on-collection-errors", "--tb=short"]
    command += ["-o", "faulthandler_timeout=60", "-o", f"cache_dir={setting.folder / 'pytest_cache'}"]
    command += setting.pytest_arguments or gpu_test_files(setting.repository)
    # Whatever else is installed on the machine for pytest is not ours.
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "GPU_CHECK_OUTCOMES": str(outcomes), **setting.environment}

    def read(code: int | None, output: str) -> Details:
        found = _read_outcomes(outcomes, code)
        missing = _note_missing(code, output)
        if code == 127:
            return {"status": "not possible here", **missing}
        return {**found, "note": "; ".join(filter(None, [found["note"], missing.get("note")]))}

    what = "every test marked gpu, the device-parametrised ones of the CPU suite among them"
    return [Job("tests", "pytest", what, command, 90, read, environment, outcomes)]


def gpu_test_files(repository: Path) -> list[Path]:
    """Those with tests marked gpu, by hand or by the fixture `device`: others may need what no GPU machine has."""
    marked = re.compile(r'mark\.gpu\b|usefixtures\("device"\)|[(,] ?device: str\b')
    return [file for file in sorted((repository / "tests").glob("test_*.py")) if marked.search(file.read_text())]


def _read_outcomes(file: Path, code: int | None) -> Details:
    """Counts, failures with the end of their accounts, reasons of skips, and who had begun when all was over."""
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    begun = dict.fromkeys(line["begins"] for line in lines if "begins" in line)
    tests: dict[str, Details] = {}
    for line in lines:
        if "test" in line:
            earlier = tests.get(line["test"], {})  # it may fail once more, in its teardown or with its process
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
        details["note"] += f", {len(details['unfinished'])} had begun"
    if code is not None and not counts:
        details["status"] = "failed"
    return details


# ---- compute-sanitizer.


def _sanitize(setting: Setting) -> list[Job]:
    """Captures need the caching allocator, which hides what lies beyond a tensor: so they are checked apart."""
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    every = "every kernel at small odd sizes"
    return [
        _sanitizer(setting, "memcheck", "memcheck", f"{every}, caching allocator off", ["--steps"], uncached),
        _sanitizer(setting, "memcheck of graphs", "memcheck", "steps captured into graphs", ["--captured"], {}),
        _sanitizer(setting, "racecheck", "racecheck", f"{every}: hazards in shared memory", ["--steps"], {}),
    ]


def _sanitizer(setting: Setting, name: str, tool: str, what: str, kernels: list[str], more: dict[str, str]) -> Job:
    command = [sys.executable, "-m", "gpu_kernels", *kernels]
    if setting.is_dry:
        command += ["--device", "cpu"]
    else:
        # Of our kernels alone: torch's and cuBLAS's take time, and what they do is not ours to judge.
        options = ["--kernel-name", "kns=drivetrain", "--error-exitcode", "9", "--print-limit", "20"]
        options += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command = ["compute-sanitizer", "--tool", tool, *options, *command]
        # A tool that is not there is a matter of the machine, as one that it refuses.
        command = ["sh", "-c", f"command -v compute-sanitizer > /dev/null || exit 127; exec {shlex.join(command)}"]

    def read(code: int | None, output: str) -> Details:
        return _read_sanitizer(code, output, setting.is_dry)

    return Job("sanitize", name, f"{tool}: {what}", command, 25, read, {**setting.environment, **more})


def _read_sanitizer(code: int | None, output: str, is_dry: bool) -> Details:
    summaries = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", output, re.M)
    if is_dry or code is None:
        return {"note": "the script alone, on the CPU" if is_dry else "; ".join(summaries)}
    if code == 127:
        return {"status": "not possible here", "note": "no compute-sanitizer on PATH"}
    if "imported" in output and "the device answers" not in output:
        refusals = re.findall(r"^=+ (Error: .*|.*not supported.*)$", output, re.M | re.I)
        return {"status": "not possible here", "note": "; ".join(refusals[:3]) or "the device refuses the tool"}
    ran = "all kernels ran" in output
    note = "; ".join(summaries) or "no summary of the tool's"
    return {"status": "passed" if ran and summaries and code == 0 else "failed", "note": note}


# ---- Benchmarks.


def _bench(setting: Setting) -> list[Job]:
    found = []
    for name, (what, least_s) in MEASUREMENTS.items():
        file = setting.folder / f"bench-{name}.json"
        command: Command = [sys.executable, "-m", "drivetrain", "bench", "gpu", "--only", name, "--json", file]
        command += ["--dry-run"] if setting.is_dry else []
        found.append(Job("bench", name, what, command, least_s, _tables_of(file), setting.environment, file))
    file = setting.folder / "bench-gpt.json"
    command = [sys.executable, setting.repository / "examples/gpt/compare.py", "--ranks=1", f"--json={file}"]
    command += GPT_TINY if setting.is_dry else [*GPT_124M, "--device=cuda"]

    def read_gpt(code: int | None, output: str) -> Details:
        return {"tables": _gpt_tables(json.loads(file.read_text()))} if file.exists() else {}

    return [*found, Job("bench", "gpt", GPT_WHAT, command, 50, read_gpt, setting.environment, file)]


def _tables_of(file: Path) -> Callable[[int | None, str], Details]:
    def read(code: int | None, output: str) -> Details:
        details: Details = {"tables": json.loads(file.read_text())["tables"]} if file.exists() else {}
        if code and "Duplicate GPU detected" in output:
            details |= {"status": "not possible here", "note": "this NCCL refuses two ranks on one GPU"}
        return details

    return read


def _gpt_tables(runs: Details) -> Details:
    """Rows as `bench` writes them, from what compare.py writes."""
    sides = [runs[engine][0] for engine in ("torch", "drivetrain")]
    tokens = [1e3 * side["tokens_per_step"] / side["step_ms"] for side in sides]
    memory = [max(side["peak_memory_bytes"]) / 2**20 for side in sides]
    held_out = [side["held_out_losses"][-1][1] for side in sides]

    def row(what: str, unit: str, values: list[float], ratio: float | None = None) -> Details:
        return {"what": what, "unit": unit, "torch": values[0], "ours": values[1], "ratio": ratio}

    size = f"{sides[0]['num_parameters'] / 1e6:.0f} M parameters, {'bf16' if sides[0]['bf16'] else 'fp32'}"
    rows = [
        row(f"GPT of {size}, {sides[0]['tokens_per_step']:,} tokens a step", "tokens/s", tokens, tokens[1] / tokens[0]),
        row("  median step", "ms", [side["step_ms"] for side in sides]),
        row("  peak memory", "MiB", memory, memory[1] / memory[0]),
        row("  held-out loss afterwards", "nats per byte", held_out),
    ]
    return {"Training, against the stock script": rows}
