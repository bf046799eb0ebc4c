"""Tests the command line in real processes: help, `run` as a replacement for python, and the doctor's findings."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.run

import drivetrain
from drivetrain import _C, _build_info
from drivetrain.cli import doctor, main, whole_parser
from drivetrain.cli.doctor import covers, driver_problem
from ports import free_port
from warm_python import warm_python

TIMEOUT_S = 60
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _environ(**changes: str) -> dict[str, str]:
    dropped = (*LAUNCH_VARIABLES, "DRIVETRAIN_ISA")
    plain = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**plain, "PYTHON_EXEC": warm_python(), "OMP_NUM_THREADS": "1", **changes}


def _python(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), *arguments],
        cwd=cwd,
        env=_environ(**environ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def _cli(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return _python("-m", "drivetrain", *arguments, cwd=cwd, **environ)


@pytest.mark.parametrize("command", [(), ("run",), ("bench",), ("ckpt",), ("doctor",), ("env",)], ids=" ".join)
def test_help(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([*command, "--help"])
    assert exit_info.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(" ".join(("usage: drivetrain", *command)))
    assert command or "torchrun --nproc-per-node 2 -m drivetrain run train.py" in said


def test_help_imports_no_torch() -> None:
    """torch's import takes more than a second, which shells would wait for at each completion."""
    code = (
        "import contextlib, io, sys\nfrom drivetrain.cli import _COMMANDS, main\n"
        "for words in (['--version'], ['--help'], *([command, '--help'] for command in _COMMANDS), ['bench', 'no']):\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main(words)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options_of(command)


@pytest.mark.parametrize("command", ["run", "try", "explain"])
@pytest.mark.parametrize("arguments", [[], ["--"], ["--", "--x"], ["a", "--", "b"], ["--x", "--"], ["--", "--"]])
def test_all_words_after_the_script_are_its_own(command: str, arguments: list[str]) -> None:
    assert whole_parser().parse_args([command, "a.py", *arguments]).arguments == arguments
    assert whole_parser().parse_args([command, "--", "a.py", "x"]).arguments == ["x"]


def test_an_error_of_a_package_before_its_module_is_shown(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("import a_module_that_is_missing")
    (tmp_path / "package/train.py").write_text("")
    for name, code, message in (
        ("package.train", 1, r'__init__\.py", line 1.*\n.*\n*.*ModuleNotFoundError: .*a_module_that_is_missing'),
        ("packages.train", 2, r"drivetrain run: module 'packages.train' was not found"),
    ):
        command = [sys.executable, "-m", "drivetrain", "run", "-m", name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        assert re.search(message, done.stderr, re.DOTALL), done.stderr


def test_no_option_is_the_beginning_of_one_of_torchruns() -> None:
    """torchrun refuses "-m drivetrain run --monitor" because it has two spellings of --monitor-interval."""
    theirs = torch.distributed.run.get_args_parser()._option_string_actions
    ours = set(options_of(whole_parser())) - {"--help"}
    assert "--with-monitor" in ours
    assert not [(own, option) for own in ours for option in theirs if option.startswith(own)]


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (("bnech",), "bench"),
        (("bench", "optimm"), "optim"),
        (("doctor", "--jsn"), "--json"),
        (("run", "--with-monitr", "a.py"), "--with-monitor"),
    ],
)
def test_a_misspelled_word_gets_the_nearest(
    words: tuple[str, ...], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert f"Did you mean {near}?" in capsys.readouterr().err


def test_a_number_of_rounds_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "optim", "--rounds", "0"])
    assert "argument --rounds: '0' is not a whole number of 1 or more" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"drivetrain {drivetrain.__version__}\n"


def test_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_TRANSPORT", "torch")
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    assert f"PyTorch version: {torch.__version__}" in said
    assert re.search(r"^DRIVETRAIN_TRANSPORT +torch$", said, re.MULTILINE)
    assert re.search(rf"^drivetrain +{re.escape(drivetrain.__version__)}, built for torch", said, re.MULTILINE)


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed")
    done = _python("-m", "shtab", "--shell=bash", "drivetrain.cli.whole_parser")
    assert done.returncode == 0, done.stderr
    script = tmp_path / "completion.bash"
    ask = "; ".join(
        (
            "COMP_WORDS=(drivetrain bench optim --js)",
            "COMP_CWORD=3",
            "$(complete -p drivetrain | sed -E 's/.*-F ([^ ]+).*/\\1/') drivetrain --js optim",
            'echo "${COMPREPLY[@]}"',
        )
    )
    script.write_text(f"{done.stdout}\n{ask}\n")
    completed = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert completed.stdout.split() == ["--json"], completed.stderr


def test_unknown_command() -> None:
    done = _cli("dance")
    assert done.returncode == 2
    usage, error = done.stderr.splitlines()
    assert usage == "usage: drivetrain [-h] [--version] COMMAND ..."
    assert "argument COMMAND: invalid choice: 'dance' (choose from" in error
    assert "run" in error


SHOW_SELF = """
import json, sys
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ and __spec__.name]))
import __main__
assert __main__.__dict__ is globals()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Creates a script and a module inside a package."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "__main__.py").write_text(SHOW_SELF)
    path = tmp_path / "package" / "train.py"
    path.write_text(SHOW_SELF)
    return path


@pytest.mark.parametrize(
    "target", [("package/train.py",), ("-m", "package.train"), ("-m", "package")], ids=["file", "module", "package"]
)
def test_run_looks_like_python_to_the_script(script: Path, target: tuple[str, ...]) -> None:
    folder, arguments = script.parent.parent, ("--lr", "1", "--", "--optim", "-m", "")
    expected = _python(*target, *arguments, cwd=folder)
    done = _cli("run", *target, *arguments, cwd=folder)
    assert done.returncode == expected.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(expected.stdout)


@pytest.mark.parametrize(
    "body",
    [
        "def f():\n    raise KeyError('lost')\nf()",
        "raise SystemExit(7)",
        "raise SystemExit('said at exit')",
        # A shell's background job and its children ignore the signal unless it is reset.
        "import os, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('after') from error",
        "def f(:",
    ],
    ids=["exception", "exit-code", "exit-text", "interrupt", "cause", "syntax"],
)
def test_run_ends_as_python_does(tmp_path: Path, body: str) -> None:
    """No report follows the error, and tracebacks show no frame of drivetrain."""
    path = tmp_path / "script.py"
    path.write_text(body)
    expected, done = _python(str(path)), _cli("run", str(path))
    assert done.returncode == expected.returncode
    assert done.stderr == expected.stderr


def test_run_dies_of_a_signal_as_python_does(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    assert _cli("run", str(path)).returncode == -signal.SIGTERM


@pytest.mark.parametrize("target", [("none.py",), ("-m", "no_such_module_anywhere")], ids=" ".join)
def test_run_without_a_script_that_exists(tmp_path: Path, target: tuple[str, ...]) -> None:
    done = _cli("run", *target, cwd=tmp_path)
    assert done.returncode == 2
    assert target[-1] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("bucket_cap=1", "it takes: .*bucket_cap_mb"),
        ("bucket_cap_mb", "not NAME=VALUE"),
        ("shard=bogus", "shard is 'bogus', expected one of"),
        ("transport=bogus", "transport is 'bogus', expected one of"),
    ],
)
def test_run_refuses_wrong_defaults(tmp_path: Path, option: str, complaint: str) -> None:
    path = tmp_path / "script.py"
    path.write_text("print('ran')")
    done = _cli("run", "--ddp", option, str(path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.search(complaint, done.stderr)


def test_run_passes_defaults_and_reports_that_nothing_was_wrapped(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("from drivetrain.ddp.distributed import defaults\nprint(defaults)")
    options = ("bucket_cap_mb=1.5", "gradient_as_bucket_view=true", "forward_sync_buffers=none")
    done = _cli("run", *(word for option in options for word in ("--ddp", option)), str(path))
    assert ast.literal_eval(done.stdout) == {
        "bucket_cap_mb": 1.5,
        "gradient_as_bucket_view": True,
        "forward_sync_buffers": None,
    }
    assert done.stderr.count("\n") == 1
    assert "one process, which built no DistributedDataParallel" in done.stderr
    many = _cli("run", str(path), WORLD_SIZE="2")
    assert "no model was wrapped. To check, print(type(model))" in many.stderr


def test_run_names_its_options_that_follow_the_script(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import sys\nprint(sys.argv[1:])")
    done = _cli("run", str(path), "--optim", "adam", "--lr=1")
    assert done.stdout == "['--optim', 'adam', '--lr=1']\n"
    assert f"passed --optim to {path}. For drivetrain, write it before the script." in done.stderr


def test_only_rank_0_reports(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.touch()
    assert _cli("run", str(path), RANK="1").stderr == ""


IMPORTS = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
"""
WORK = """
def work(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=1)
    model = DDP(torch.nn.Linear(2, 2))
    assert type(model).__module__ == "drivetrain.ddp.distributed", type(model)
    dist.destroy_process_group()
"""
SPAWNING_SCRIPT = f"""{IMPORTS}
import sys
import torch.multiprocessing as mp
{WORK}
if __name__ == "__main__":
    mp.start_processes(work, (sys.argv[2],), nprocs=1, start_method=sys.argv[1])
"""


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_run_follows_into_child_processes(tmp_path: Path, start_method: str) -> None:
    """A spawned child imports the script in a new interpreter, where torch's names would hold torch's classes."""
    path = tmp_path / "script.py"
    path.write_text(SPAWNING_SCRIPT)
    done = _cli("run", str(path), start_method, str(free_port()))
    assert done.returncode == 0, done.stderr
    assert "Process-1: wrapped: Linear (" in done.stderr


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_install_follows_into_child_processes(tmp_path: Path, start_method: str) -> None:
    """Also into processes that import torch late, and not into the processes of a pool that needs no torch."""
    path = tmp_path / "script.py"
    late = WORK.replace(":\n", ":\n" + textwrap.indent(IMPORTS.strip(), "    ") + "\n", 1)
    path.write_text(
        f"""
import sys

def has(name):
    return name in sys.modules
{late}
if __name__ == "__main__":
    import drivetrain, multiprocessing
    import torch.multiprocessing as mp
    drivetrain.install(transport="torch")
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.apply(has, ("torch",)))
    mp.start_processes(work, (sys.argv[2],), nprocs=1, start_method=sys.argv[1])
    drivetrain.uninstall()
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.apply(has, ("drivetrain",)))
"""
    )
    done = _python(str(path), start_method, str(free_port()))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False"]


RERUNNING_SCRIPT = """
import os, subprocess, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ.setdefault("RANK", "0"))
if rank == 0:
    import __main__
    script = [sys.argv[0]] if __main__.__spec__ is None else ["-m", __main__.__spec__.name]
    child = subprocess.Popen([sys.executable, *script, *sys.argv[1:]], env=os.environ | {"RANK": "1"})
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=2)
model = DDP(torch.nn.Linear(2, 2))
assert type(model).__module__ == "drivetrain.ddp.distributed", type(model)
assert model.bucket_bytes_cap == 3 * 2**20
model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
if rank == 0:
    assert child.wait() == 0
"""


@pytest.mark.parametrize("target", [("script.py",), ("-m", "script")], ids=" ".join)
def test_run_follows_a_script_that_starts_itself_as_the_other_ranks(tmp_path: Path, target: tuple[str, ...]) -> None:
    (tmp_path / "script.py").write_text(RERUNNING_SCRIPT)
    done = _cli("run", "--ddp", "bucket_cap_mb=3", *target, str(free_port()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


Findings = dict[str, dict[str, str]]
Doctor = Callable[[dict[str, str]], Findings]


@pytest.fixture
def sick(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Runs the doctor in an environment that must fail a check, and returns the findings by name."""

    def findings(environ: dict[str, str]) -> Findings:
        monkeypatch.setattr(os, "environ", _environ(**environ))
        assert main(["doctor", "--json", "--timeout", "1"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert report["ok"] is False
        return {finding["name"]: finding for finding in report["findings"]}

    return findings


def _launch(rank: int, world_size: int, port: int, host: str = "127.0.0.1") -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": host, "MASTER_PORT": str(port)}


@pytest.mark.parametrize(
    ("runtime", "driver", "problem"),
    [
        (13000, 12080, "the driver takes CUDA up to 12.8, and drivetrain's runtime is 13.0"),
        (13020, 13000, ""),
        (12080, 13000, ""),
        (0, 0, ""),
    ],
)
def test_a_driver_is_for_the_runtimes_major_version(runtime: int, driver: int, problem: str) -> None:
    assert driver_problem(runtime, driver) == problem


def test_the_runtimes_version_is_that_of_nvcc() -> None:
    runtime, _ = _C.cuda_versions()
    assert (runtime > 0) == _C.has_cuda()
    if _build_info.CUDA[0].isdigit():  # otherwise there are no kernels, or they are emulated
        assert _build_info.CUDA.startswith(f"{runtime // 1000}.")


def test_doctor_says_it_in_one_line_and_by_the_exit_code() -> None:
    done = _cli("doctor", DRIVETRAIN_ISA="neon", **_launch(1, 2, 29500, "no-such-host.invalid"))
    assert done.returncode == 1
    wrong = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert len(wrong) == 2
    assert all("; cure: " in line for line in wrong)


def test_doctor_on_a_healthy_machine() -> None:
    done = _cli("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert list(lines) == [
        *("torch", "cuda", "nccl", "gloo", "memory", "shm", "limits", "threads", "signals"),
        *("variables", "interfaces", "disk", "launch"),
    ]
    assert all(line.startswith(("PASS ", "-- ")) for line in lines.values())
    assert torch.__version__ in lines["torch"]


@pytest.mark.parametrize(
    ("environ", "name", "text", "cure"),
    [
        ({"DRIVETRAIN_ISA": "neon"}, "variables", "neon", "unset it"),
        ({"RANK": "0"}, "launch", "WORLD_SIZE is unset", "torchrun"),
        ({"WORLD_SIZE": "2"}, "launch", "RANK is unset", "torchrun"),
        (_launch(2, 2, 29500), "launch", "RANK=2 is not below WORLD_SIZE=2", "torchrun"),
        ({**_launch(0, 2, 29500), "RANK": "zero"}, "launch", "RANK=zero", "torchrun"),
        ({**_launch(1, 4, 29500), "LOCAL_RANK": "-1"}, "launch", "LOCAL_RANK=-1", "torchrun"),
        (_launch(0, 2, 99999), "launch", "MASTER_PORT=99999", "torchrun"),
        (_launch(1, 2, 29500, "no-such-host.invalid"), "master", "does not resolve", "MASTER_ADDR="),
    ],
    ids=["isa", "no-world", "no-rank", "rank", "number", "local-rank", "port", "host"],
)
def test_doctor_names_what_is_wrong_and_its_cure(
    sick: Doctor, environ: dict[str, str], name: str, text: str, cure: str
) -> None:
    findings = sick(environ)
    assert findings[name]["status"] == "FAIL"
    assert text in findings[name]["text"]
    assert cure in findings[name]["cure"]
    assert [other for other in findings.values() if other["status"] == "FAIL"] == [findings[name]]


def test_doctor_on_rank_0_with_its_port_taken(sick: Doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        findings = sick(_launch(0, 2, taken.getsockname()[1]))
    assert "another program listens" in findings["master"]["text"]
    assert "export MASTER_PORT=" in findings["master"]["cure"]


def test_doctor_says_which_rank_is_missing(sick: Doctor) -> None:
    findings = sick(_launch(0, 3, free_port()))
    assert findings["master"]["status"] == "PASS"  # no process should listen yet
    assert "ranks 1, 2 of 3" in findings["ranks"]["text"]


def test_doctor_without_rank_0(sick: Doctor) -> None:
    findings = sick(_launch(1, 2, free_port()))
    assert "no process listens yet" in findings["master"]["text"]
    assert "no store" in findings["ranks"]["text"]


def _torchrun_doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return _python(*torchrun, *arguments, **environ)


def test_doctor_under_torchrun() -> None:
    done = _torchrun_doctor("-m", "drivetrain", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("versions") == 1  # only rank 0 prints
    assert "equal on 2 ranks" in done.stdout
    assert "passes over gloo between 2 ranks" in done.stdout


def test_doctor_under_torchrun_tells_what_differs_and_what_is_wrong_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "one_odd_rank.py"
    path.write_text(
        "import os, sys\n"
        "import drivetrain.cli\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.environ['DRIVETRAIN_ISA'] = 'neon'\n"
        "    drivetrain.__version__ = '0.0.9'\n"
        "sys.exit(drivetrain.cli.main(['doctor']))\n"
    )
    done = _torchrun_doctor(str(path))
    assert done.returncode == 1
    wrong = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert len(wrong) == 2
    assert "rank 1: DRIVETRAIN_ISA=neon" in wrong[0]
    assert "drivetrain differs: " in wrong[1]
    assert "0.0.9 on rank 1" in wrong[1]


@pytest.mark.parametrize(
    ("built", "capability", "expected"),
    [
        ("13.0.88 for 80-real;90-real;100-real;120", (8, 0), True),
        ("13.0.88 for 80-real;90-real;100-real;120", (8, 9), True),
        ("13.0.88 for 80-real;90-real;100-real;120", (7, 5), False),
        ("13.0.88 for 80-real;90-real;100-real;120", (12, 1), True),
        ("13.0.88 for 80-real;90-real;100-real;120", (13, 0), True),  # PTX of 120
        ("13.0.88 for 80-real;90-real", (10, 0), False),
        ("13.0.88 for 90a-real", (9, 0), True),
        ("13.0.88 for 80-virtual", (9, 0), True),
        ("none", (9, 0), False),
    ],
)
def test_which_gpus_the_kernels_cover(built: str, capability: tuple[int, int], expected: bool) -> None:
    assert covers(built, capability) is expected


def test_a_gpu_that_is_too_old_for_the_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"device_count": 2, "get_device_name": "Tesla T4", "get_device_capability": (7, 5)}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    finding = doctor._cuda_kernels()
    assert finding.status == "FAIL"
    assert "2 x Tesla T4 of compute capability 7.5, but drivetrain's kernels need 8.0" in str(finding)


@pytest.mark.parametrize("limit", ["-1", "0", "nan", "soon"])
def test_the_doctors_limit_is_checked(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--timeout", limit])
    assert f"'{limit}' is not a number of seconds above 0" in capsys.readouterr().err


def test_a_benchs_file_without_a_folder_is_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "optim", "--json", "/nowhere/optim.json"]) == 2
    assert "--json is /nowhere/optim.json, and there is no folder for it" in capsys.readouterr().err
