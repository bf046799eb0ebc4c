"""Tests `make gpu-check` without a GPU: its list of jobs, dry runs, the report of an interrupted run, its table."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gpu_kernels
from drivetrain import _C, optim
from suite import gpu, optim_gpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
from gpu_check import gates, jobs, outcomes, page, parts, report, run_tests, tools  # noqa: E402
from gpu_check.checks import findings  # noqa: E402
from gpu_check.checks import ranks as check_ranks  # noqa: E402
from gpu_check.checks import steps as check_steps  # noqa: E402
from gpu_check.checks.__main__ import CHECKS  # noqa: E402
from warm_python import warm_python  # noqa: E402

TIMEOUT_S = 600


def start(*arguments: str | Path, python: str | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    command = [python or warm_python(), "-m", "gpu_check", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def result_in(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.json")
    assert file.with_suffix(".md").read_text().startswith("# GPU check: dry run")
    return json.loads(file.read_text())


def test_list_names_every_job() -> None:
    assert list(parts.MEASUREMENTS) == list(gpu.MEASUREMENTS)
    output, _ = start("--list").communicate(timeout=TIMEOUT_S)
    parts_listed = [line.split()[0] for line in output.splitlines()]
    assert dict.fromkeys(parts_listed) == dict.fromkeys(parts.DEFAULT_PARTS)
    assert all(f"bench     {name}" in output for name in parts.MEASUREMENTS if name not in parts.LONG)


def test_a_job_that_there_is_not() -> None:
    process = start("--list", "--job", "optimizer")
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert "--job is optimizer, expected one of tools, package, doctor" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    process = start()
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert "torch sees no NVIDIA GPU here" in output


def dry_run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    process = start("--dry-run", "--results", tmp_path, *arguments)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    return result_in(tmp_path)


# A dry run has no compute-sanitizer, so that these jobs would run the script of memcheck again. A test below runs the
# check of two ranks.
LEFT_OUT = ("initcheck", "synccheck", "racecheck", "two-ranks")
DRY_PARTS = [part for part in parts.PARTS if part not in ("build", "bench", "tests", "long")]


@pytest.fixture(scope="module")
def dry_jobs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Runs the jobs of all parts above in one check, because the check itself takes seconds to start."""
    folder = tmp_path_factory.mktemp("gpu_check")
    every = parts.jobs(parts.Setting(folder, folder, folder, "", 2, True, []))
    names = [job.name for job in every if job.part in DRY_PARTS and job.name not in LEFT_OUT]
    options = [*(f"--part={part}" for part in DRY_PARTS), *(f"--job={name}" for name in names)]
    return dry_run(folder, *options)["jobs"]


@pytest.mark.parametrize("part", DRY_PARTS)
def test_a_dry_run_of_a_part(part: str, dry_jobs: list[dict[str, Any]]) -> None:
    """Every job's script runs on the CPU, so that no trivial error appears first on a GPU."""
    found = [job for job in dry_jobs if job["part"] == part]
    assert found
    for job in found:
        assert job["status"] in report.FINE, job
        if part in parts.CHECKS:
            assert all(finding["holds"] for finding in job["findings"])


def test_a_dry_run_of_tests_and_measurements(tmp_path: Path) -> None:
    """One process runs all measurements here; the check uses a process for each."""
    names = ["tools", "copy", "pytest"]
    chosen = [word for name in names for word in ("--job", name)]
    found = dry_run(tmp_path, *chosen, "--", "tests/monitor/test_device.py")
    assert [(job["name"], job["status"]) for job in found["jobs"]] == [(name, "passed") for name in names]
    _, copy, tests = found["jobs"]
    if not torch.cuda.is_available():
        (skip,) = tests["skips"]
        assert re.fullmatch(r"no NVIDIA GPU here, nor for \d+ more tests of this file", skip)
    assert copy["tables"]["Copy bandwidth"][0]["torch"] > 0
    assert {"torch", "commit", "cores"} <= set(found["machine"])

    file = tmp_path / "bench.json"
    command = [warm_python(), str(BENCHMARKS / "run.py"), "gpu", "--dry-run", "--json", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    tables = json.loads(file.read_text())["tables"]
    assert len(tables) == len(parts.MEASUREMENTS)
    for rows in tables.values():
        assert rows
        assert len(report.table(rows)) == 2 + len(rows)


def test_all_jobs_fit_into_ten_minutes(repository: Path) -> None:
    """The build is excluded, because its reserve is for a slow machine."""
    setting = parts.Setting(repository, repository, repository, "9.0", 16, False, [])
    every = parts.jobs(setting)
    assert list(dict.fromkeys(job.part for job in every)) == list(parts.PARTS)
    assert sum(job.least_s for job in every if job.name != "package" and job.part != "long") <= 540


def test_every_file_with_a_gpu_test_is_chosen(request: pytest.FixtureRequest, repository: Path) -> None:
    """This checks the files of this pytest run; a run of the whole suite checks all files."""
    files = {item.path for item in request.session.items if "gpu" in item.keywords}
    assert Path(__file__) in files
    assert files <= set(parts.gpu_test_files(repository))


SLEEPER = """
import os, subprocess, sys, time
import pytest
pytestmark = pytest.mark.gpu

def test_that_ends():
    pass

def test_that_does_not():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open({pid!r}, "w") as file:
        file.write(str(child.pid) + "\\n")
    time.sleep(600)
"""


def test_a_job_cut_off_leaves_its_results_and_no_process(tmp_path: Path) -> None:
    pid, tests = tmp_path / "pid", tmp_path / "test_sleeper.py"
    tests.write_text(SLEEPER.format(pid=str(pid)))
    results = tmp_path / "results"
    # A fork is no descendant of the process that asks for it, and this test looks for descendants.
    process = start("--dry-run", "--results", results, "--part", "tests", "--", tests, python=sys.executable)
    until = time.monotonic() + TIMEOUT_S
    while not (pid.exists() and pid.read_text().endswith("\n")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # has the effect of the deadline
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, output
    _, cut_off = result_in(results)["jobs"]
    assert cut_off["status"] == "timed out"
    assert cut_off["counts"] == {"passed": 1}
    (unfinished,) = cut_off["unfinished"]
    assert unfinished.endswith("::test_that_does_not")
    stat = Path(f"/proc/{pid.read_text().strip()}/stat")  # a zombie counts as ended
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_the_limit_of_a_job(tmp_path: Path) -> None:
    job = jobs.Job("tests", "endless", "", [sys.executable, "-c", "import time; time.sleep(600)"], 1)
    outcome = jobs.run(job, 0.5, jobs.Deadline(600), tmp_path / "log", tmp_path)
    assert outcome["status"] == "timed out"


def test_a_result_that_cannot_be_read_is_a_failure_and_not_the_end(tmp_path: Path) -> None:
    def read(code: int | None, output: str) -> dict[str, Any]:
        return json.loads(output)

    job = jobs.Job("bench", "cut", "", [sys.executable, "-c", "print('[1, 2')"], 1, read)
    outcome = jobs.run(job, 60, jobs.Deadline(600), tmp_path / "log", tmp_path)
    assert outcome["status"] == "failed"
    assert "its result cannot be read: JSONDecodeError" in outcome["note"]
    assert outcome["log"] == "[1, 2"


def test_outcomes_of_tests(tmp_path: Path) -> None:
    lines = [
        '{"begins": "a"}\n{"test": "a", "outcome": "passed", "seconds": 0.5, "why": ""}',
        '{"begins": "b"}\n{"test": "b", "outcome": "failed", "seconds": 2.0, "why": "wrong bits"}',
        '{"test": "b", "outcome": "failed", "seconds": 0, "why": "its process ended"}',
        '{"begins": "c"}\n{"test": "c", "outcome": "skipped", "seconds": 0, "why": "no second GPU"}',
        '{"begins": "d"}\n{"test": "d", "outco',  # a kill truncates the last line
    ]
    (tmp_path / "lines").write_text("\n".join(lines))
    found = parts._read_outcomes(tmp_path / "lines", None)
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["failures"] == {"b": "wrong bits\nits process ended"}
    assert found["skips"] == {"no second GPU": 1}
    assert found["unfinished"] == ["d"]
    assert found["note"] == "1 failed, 1 passed, 1 skipped, 1 did not end"
    assert parts._read_outcomes(tmp_path / "nothing", 0)["status"] == "failed"


def test_a_process_without_its_cuda_context_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    watch, failed = outcomes.LostContext(), SimpleNamespace(failed=True)
    watch.pytest_runtest_logfinish()
    watch.pytest_runtest_logreport(failed)
    watch.pytest_runtest_logfinish()  # the failure did not affect the context
    assert not ended

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    watch.pytest_runtest_logfinish()  # no test has failed since
    assert not ended
    watch.pytest_runtest_logreport(failed)
    watch.pytest_runtest_logfinish()
    assert ended == [outcomes.LOST_CONTEXT]


RAN = "imported\nthe device answers\nall kernels ran\n"
CLEAN, HAZARDS = "========= ERROR SUMMARY: 0 errors\n", "========= RACECHECK SUMMARY: 2 hazards displayed\n"


@pytest.mark.parametrize(
    ("code", "output", "status", "note"),
    [
        (0, RAN + CLEAN, "passed", "ERROR SUMMARY: 0 errors"),
        (9, RAN + HAZARDS, "failed", "RACECHECK SUMMARY: 2 hazards displayed"),
        (0, RAN, "failed", "the tool printed no summary"),
        (1, "imported\nthe device answers\n" + CLEAN, "failed", "ERROR SUMMARY: 0 errors"),
        (1, "SyntaxError", "failed", "the tool printed no summary"),
        (1, "ModuleNotFoundError: No module named 'hypothesis'", "not possible here", "missing: hypothesis"),
        (127, "", "not possible here", "no compute-sanitizer on PATH"),
        (1, "imported\n========= Error: Device not supported\n", "not possible here", "Error: Device not supported"),
    ],
)
def test_what_a_sanitizer_said(code: int, output: str, status: str, note: str) -> None:
    assert parts._read_sanitizer(code, output, is_dry=False) == {"status": status, "note": note}


OPTIM_ROWS = [
    {"what": "AdamW fp32, GPT-2 124M, against fused", "unit": "ms", "torch": 1.3, "ours": 1.1, "ratio": 0.85},
    {"what": "  against foreach", "unit": "ms", "torch": 4.0, "ours": 1.1, "ratio": 0.3},
    {"what": "  share of a copy's bandwidth", "unit": "%", "torch": 80.0, "ours": 96.5},
    {
        "what": "AdamW fp32, 8-bit states, GPT-2 124M, against fused",
        "unit": "ms",
        "torch": 1.3,
        "ours": 1.2,
        "ratio": 0.9,
    },
    {"what": "  share of a copy's bandwidth", "unit": "%", "torch": 80.0, "ours": 40.0},
]


def test_required_figures() -> None:
    found = {each["what"]: each for each in gates.verdicts("optim", {"Steps": OPTIM_ROWS})}
    share = found["AdamW A, fp32: share of a copy"]
    assert (share["required"], share["measured"], share["verdict"]) == (">= 95 %", 96.5, "met")
    assert found["AdamW A against torch's fused fp32"]["measured"] == 0.85
    missed = found["AdamW H, fp32 with 8-bit states: share of a copy"]
    assert (missed["measured"], missed["verdict"]) == (40.0, "missed")
    assert found["LAMB fp32: share of a copy"]["verdict"] == "not measured"
    details = gates.judged("optim", {"tables": {"Steps": OPTIM_ROWS}}, is_dry=False)
    assert details["status"] == "missed"
    assert details["note"] == f"2 of {len(found)} gates met"
    assert "| AdamW H, fp32 with 8-bit states: share of a copy | >= 95 % | 40.00 % | missed |" in report.gates(
        details["gates"]
    )
    assert gates.judged("optim", {"status": "failed", "tables": {"Steps": OPTIM_ROWS}}, False)["status"] == "failed"
    assert "gates" not in gates.judged("optim", {"tables": {"Steps": OPTIM_ROWS}}, is_dry=True)
    assert report.worst(["passed", "missed"]) == "missed"
    assert "missed" not in report.FINE


def test_every_required_figure_has_its_row() -> None:
    """The gates and the optimizers' rows are named in different files."""
    rows = [
        {"what": f"{layout.what}, GPT-2 124M, against {next(iter(layout.theirs))}", "ratio": 0.1, "ours": 1.0}
        for layout in optim_gpu.LAYOUTS
    ]
    rows = [each for row in rows for each in (row, {"what": f"  {gates.SHARE}", "ours": 99.0})]
    assert {each["verdict"] for each in gates.verdicts("optim", {"": rows})} == {"met"}
    assert {gate.job for gate in gates.GATES} <= set(parts.MEASUREMENTS)


def test_findings_of_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "found.json"
    found = findings.Findings(file)
    found.add(findings.Finding("a", True, "seen | here"))
    found.add(findings.Finding("b", None, "one GPU"))
    assert found.exit_code == 0
    read = parts._findings_of(file)
    assert read(0, "")["note"] == "1 hold, 0 fail, 1 not possible here"
    found.add(findings.Finding("c", False))
    assert found.exit_code == 1
    details = read(1, "")
    assert details["note"] == "1 hold, 1 fail, 1 not possible here"
    assert report.findings(details["findings"])[2:] == [
        "| a | holds | seen \\| here |",
        "| b | not possible here | one GPU |",
        "| c | **fails** |  |",
    ]
    file.write_text('[{"what": "b", "holds": null, "seen": "one GPU"}]')
    assert read(0, "") | {"findings": []} == {"status": "not possible here", "note": "one GPU", "findings": []}
    assert parts._findings_of(tmp_path / "none")(0, "")["status"] == "failed"


def test_bits_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One optimizer of each pair takes a step with one wrong bit."""
    step, count = optim.AdamW.step, [0]

    def off(self: Any, *args: Any) -> Any:
        result = step(self, *args)
        count[0] += 1
        if count[0] % 2 == 0:
            for param in self.param_groups[0]["params"][1:2]:
                param.data.view(torch.uint8)[:1] ^= 1
        return result

    monkeypatch.setattr(optim.AdamW, "step", off)
    failed = [each.what for each in check_steps.run(torch.device("cpu"), True) if not each.holds]
    assert failed == ["AdamW: one step gives the CPU's bits"]


def test_gradients_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """drivetrain's DDP has other gradients than torch's on two ranks if it does not reduce them."""
    monkeypatch.setattr(check_ranks, "_both_ways", broken_both_ways)
    found = list(CHECKS["two-ranks"](torch.device("cpu"), True))
    assert len(found) == 2
    assert not any(each.holds for each in found)


def broken_both_ways(device_type: str, transport: str) -> dict[bool, tuple[float, bool]]:
    made = check_ranks.drivetrain.DistributedDataParallel

    def without_reduction(model: Any, **options: Any) -> Any:
        wrapped = made(model, **options)
        wrapped.require_backward_grad_sync = False
        return wrapped

    check_ranks.drivetrain.DistributedDataParallel = without_reduction
    return {False: check_ranks._train_both(device_type, transport, False)}


def test_the_page_is_in_step_with_the_results(repository: Path) -> None:
    text = (repository / "docs" / "benchmarks.md").read_text()
    assert page.rewritten(text, page.newest(repository / "benchmarks" / "results")) == text


def test_the_pages_table(tmp_path: Path) -> None:
    assert page.newest(tmp_path) is None
    row = {"what": "AdamW", "unit": "ms", "torch": 2.0, "ours": 1.0, "ratio": 0.5, "low": 0.4, "high": 0.6}
    job = {"part": "bench", "name": "optim", "status": "timed out", "seconds": 1.0, "note": "late"}
    job |= {"tables": {"Steps": [row, {**row, "what": "  against foreach"}]}}
    found = {"dry_run": False, "begun": "2026-11-22T07:00:00+00:00", "seconds": 9.0, "deadline_seconds": 530.0}
    found |= {"machine": {"gpu": "NVIDIA X1 80GB", "torch": "2.11.0", "commit": "abc", "dirty": None}, "jobs": [job]}
    written = report.write(found, tmp_path)
    assert written.name == "nvidia-x1-80gb-2026-11-22.md"
    assert "**timed out** after 9 s, of 530" in written.read_text()
    report.write({**found, "begun": "2026-11-21T07:00:00+00:00", "jobs": []}, tmp_path)
    report.write({**found, "begun": "2026-11-23T07:00:00+00:00", "dry_run": True}, tmp_path)
    assert page.newest(tmp_path) == found
    text = page.rewritten(f"above\n{page.BEGIN}\nold\n{page.END}\nbelow", found)
    assert text.startswith(
        f"above\n{page.BEGIN}\nMeasured on NVIDIA X1 80GB with torch 2.11.0 at commit abc on 2026-11-22"
    )
    assert text.endswith(f"{page.END}\nbelow")
    assert "* bench, optim: timed out. late" in text
    assert "| AdamW | 2.00 ms | 1.00 ms | 0.50 [0.40, 0.60] |" in text
    assert "foreach" not in text
    with pytest.raises(ValueError, match=r"docs/benchmarks\.md needs the lines"):
        page.rewritten("no marks", found)


def test_parts_run_one_by_one_make_one_report(tmp_path: Path) -> None:
    found = {"dry_run": True, "begun": "2026-11-22T07:00:00+00:00", "seconds": 9.0, "deadline_seconds": 530.0}
    job = {"part": "tests", "name": "pytest", "status": "passed", "seconds": 1.0}
    for commit, dirty, jobs_found in (
        ("abc", False, [job]),
        ("abc", True, []),
        ("unknown", None, []),
        ("f", None, [job]),
    ):
        report.write({**found, "machine": {"commit": commit, "dirty": False}, "jobs": [job]}, tmp_path)
        assert report.earlier_jobs({**found, "machine": {"commit": commit, "dirty": dirty}}, tmp_path) == jobs_found
        assert not report.earlier_jobs({**found, "machine": {"commit": "other", "dirty": False}}, tmp_path)
    other_day = {**found, "begun": "2026-11-23T07:00:00+00:00", "machine": {"commit": "f", "dirty": False}}
    assert not report.earlier_jobs(other_day, tmp_path)


def test_tools_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"cmake": "3.18.4", "pytest": "9.2.0", "ninja": ""}
    monkeypatch.setattr(tools, "_version", lambda package: versions.get(package, "99.0"))
    assert tools.missing_tools() == ["cmake>=3.25", "ninja>=1.10"]


@pytest.mark.parametrize(("unavailable", "ends"), [("expecttest", False), ("ninja", True)])
def test_a_tool_that_cannot_be_installed_costs_its_own_part_alone(
    unavailable: str, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed: list[str] = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        wanted = command[command.index(str(tmp_path)) + 1 :]
        fails = any(each.startswith(unavailable) for each in wanted)
        installed.extend([] if fails else wanted)
        return SimpleNamespace(returncode=int(fails))

    monkeypatch.setattr(tools, "_version", lambda package: "" if package in ("expecttest", "ninja", "rich") else "99.0")
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match="nothing can be built without ninja") if ends else nullcontext():
        tools.install(tmp_path / "wheels", tmp_path)
    assert "rich>=13" in installed
    output = capsys.readouterr().out
    assert f"missing here: {unavailable}>=" in output
    assert parts._note_missing(0, output)["note"].startswith(f"missing: {unavailable}>=")


def test_tests_run_with_the_plugins_that_are_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--numprocesses" in run_tests.arguments(8, [])
    monkeypatch.setattr(run_tests, "is_here", lambda module: module not in ("xdist", "hypothesis", "expecttest"))
    monkeypatch.setattr(sys, "argv", ["run_tests", "--processes=8", "--", "-m", "gpu"])
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    run_tests.main()
    assert commands == [[sys.executable, "-m", "pytest", "-p", "gpu_check.outcomes", "-m", "gpu"]]
    note = parts._note_missing(0, capsys.readouterr().out)["note"]
    assert "tests/optim/test_optim_db*.py, cannot be collected" in note
    assert "one process" in note


# ---- Kernels that run under compute-sanitizer.


def rules_of_the_sources(repository: Path) -> set[str]:
    text = (repository / "csrc/optim/rules.h").read_text()
    tables = text[text.index("#define DT_OPTIM_RULES") : text.index("enum class RuleKind")]
    return set(re.findall(r'X\(\w+, "(\w+)"', tables))


def test_every_rule_is_run(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, seen = _C.optim_step, set()

    def recorded(reader: Any, groups: Any, rules: list[str], *others: Any) -> Any:
        seen.update(rules)
        return step(reader, groups, rules, *others)

    monkeypatch.setattr(_C, "optim_step", recorded)
    gpu_kernels.run_steps("cpu")
    # muon_step runs after Muon's momentum within one call of optim_step.
    assert seen | {"muon_step"} == rules_of_the_sources(repository)


def kernels_in_source(repository: Path) -> list[str]:
    """Returns the names of all CUDA kernels, in the order of the sources."""
    text = "".join(file.read_text() for file in sorted((repository / "csrc").rglob("*.cu*")))
    bounds = r"__\w+__\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\s+"  # the argument may contain parentheses
    kernels = re.findall(rf"__global__ void (?:{bounds})?(\w+)\(", text)
    assert len(kernels) == len(re.findall(r"__global__ void", text))
    return kernels


def test_every_kernel_is_found(repository: Path) -> None:
    kernels = kernels_in_source(repository)
    assert {"loop_cuda", "step_kernel", "chunk_sums", "accumulate_tiles", "write_bytes"} <= set(kernels)
    assert not any(kernel.startswith("__") for kernel in kernels)


@pytest.mark.gpu
def test_every_kernel_is_run(repository: Path) -> None:
    kernels = kernels_in_source(repository)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:  # torch 2.11 warns without it
        gpu_kernels.run_steps("cuda")
        gpu_kernels.run_packing("cuda")
        gpu_kernels.run_captured("cuda")
        torch.cuda.synchronize()
    launched = " ".join(event.key for event in profile.key_averages())
    assert {kernel for kernel in kernels if not re.search(rf"(?<![a-z_]){kernel}", launched)} == set()
